"""Arguments, as the native module takes them."""

from __future__ import annotations

import os
from typing import Any, Mapping, Optional, Union

from ._types import Name

#: The image is of unknown origin: True, or limits that differ from the default, by name.
Untrusted = Union[bool, Mapping[str, int]]
#: Options of a new image, as ``zebu create -o`` has them.
CreateOptions = Mapping[str, Union[Name, int, bool]]

#: The largest number of 64 bits without a sign.
U64 = (1 << 64) - 1

_MODES = {"r": False, "rb": False, "r+": True, "r+b": True, "rb+": True}


def checked_text(what: str, text: str) -> str:
    """The text. One with a NUL byte would be cut there."""
    if "\0" in text:
        raise ValueError(f"{what}: embedded null byte")
    return text


def checked(what: str, text: Optional[str]) -> Optional[str]:
    """The text, if there is one, as that of ``checked_text``."""
    return None if text is None else checked_text(what, text)


def number(what: str, value: Optional[int], least: int, most: int) -> Optional[int]:
    """The number, if it is in the range."""
    if value is not None and not least <= value <= most:
        raise ValueError(f"{what} must be from {least} to {most}, not {value}")
    return value


def name_of(name: Name) -> str:
    """The name, with undecodable bytes as surrogates."""
    text = os.fsdecode(name)
    checked("name", text)
    if not isinstance(name, (str, bytes)) and not text.startswith("/"):
        # So that no colon makes it the name of something else.
        return "./" + text
    return text


def opening(
    name: Name,
    mode: str = "r",
    *,
    format: Optional[str] = None,
    untrusted: Untrusted = False,
    cache: str = "writeback",
    snapshot: Optional[str] = None,
    backing: bool = True,
    force_share: bool = False,
    discard: bool = False,
) -> dict[str, Any]:
    """What is opened, and how."""
    if mode not in _MODES:
        raise ValueError(f"invalid mode: {mode!r}: an image is opened with 'r' or 'r+'")
    limits = None
    if untrusted is not False:
        changed = {} if untrusted is True else untrusted
        limits = [(name, number(name, value, 0, U64)) for name, value in changed.items()]
    return {
        "name": name_of(name),
        "write": _MODES[mode],
        "format": checked("format", format),
        "cache": checked("cache", cache),
        "limits": limits,
        "snapshot": checked("snapshot", snapshot),
        "backing": backing,
        "force_share": force_share,
        "discard": discard,
    }


def new_image(name: Name, format: str, options: Optional[CreateOptions]) -> dict[str, Any]:
    """A file that is to become an image."""
    texts = []
    for key, value in (options or {}).items():
        if isinstance(value, bool):
            value = "on" if value else "off"
        text = str(value) if isinstance(value, int) else os.fsdecode(value)
        checked(key, text)
        texts.append(f"{key}={text}".replace(",", ",,"))
    return {"name": name_of(name), "format": checked("format", format), "options": texts}
