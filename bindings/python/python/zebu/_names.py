"""Arguments, as the native module takes them."""

from __future__ import annotations

import os
from typing import Any, Mapping, Optional, Union

from ._types import Name

#: The image is of unknown origin: True, or limits that differ from the default, by name.
Untrusted = Union[bool, Mapping[str, int]]
#: Options of a new image, as ``zebu create -o`` has them.
CreateOptions = Mapping[str, Union[Name, int, bool]]

_MODES = {"r": False, "rb": False, "r+": True, "r+b": True, "rb+": True}


def name_of(name: Name) -> str:
    """The name, with undecodable bytes as surrogates."""
    text = os.fsdecode(name)
    if "\0" in text:
        raise ValueError("embedded null byte")
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
        limits = [] if untrusted is True else list(untrusted.items())
    return {
        "name": name_of(name),
        "write": _MODES[mode],
        "format": format,
        "cache": cache,
        "limits": limits,
        "snapshot": snapshot,
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
        texts.append(f"{key}={text}".replace(",", ",,"))
    return {"name": name_of(name), "format": format, "options": texts}
