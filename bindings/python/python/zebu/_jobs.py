"""What is done with whole images. Each function blocks without Python's lock, and an exception of
its callback or of a signal's handler (``KeyboardInterrupt``) cancels it."""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional

from . import _zebu
from ._names import U64, CreateOptions, Untrusted, checked, new_image, number, opening
from ._types import Name

#: Takes what is done and the total.
Progress = Callable[[int, int], object]


class CheckResult(NamedTuple):
    """What a check has found. Counts are of clusters or errors."""

    corruptions: int
    leaks: int
    check_errors: int
    corruptions_fixed: int
    leaks_fixed: int
    total_clusters: int
    allocated_clusters: int
    fragmented_clusters: int
    compressed_clusters: int
    #: In bytes.
    image_end_offset: int
    #: The first thousand messages.
    messages: list[str]

    @property
    def ok(self) -> bool:
        """Nothing is wrong with the image (any more)."""
        return not (self.corruptions or self.leaks or self.check_errors)


def create(
    name: Name,
    size: Optional[int] = None,
    *,
    format: str = "qcow2",
    backing: Optional[Name] = None,
    backing_format: Optional[str] = None,
    options: Optional[CreateOptions] = None,
) -> None:
    """Makes a new image of ``size`` bytes. A file of this name is overwritten.

    backing: the backing file, whose size it has if none is given. Its format is needed.
    options: as of ``zebu create -o``: ``{"cluster_size": 1 << 20, "lazy_refcounts": True}``.
    """
    options = dict(options or {})
    if backing is not None:
        options["backing_file"] = backing
    if backing_format is not None:
        options["backing_fmt"] = backing_format
    _zebu.create(new_image(name, format, options), number("size", size, 0, U64))


def convert(
    source: Name,
    target: Name,
    *,
    format: str,
    source_format: Optional[str] = None,
    untrusted: Untrusted = False,
    snapshot: Optional[str] = None,
    compress: bool = False,
    level: Optional[int] = None,
    options: Optional[CreateOptions] = None,
    rate: Optional[int] = None,
    workers: Optional[int] = None,
    progress: Optional[Progress] = None,
) -> None:
    """Writes the content of an image to a new one. A target file of this name is overwritten.

    compress: store compressed clusters; ``level`` is that of the codec: 1 to 9 for zlib, 1 to 22
    for zstd.
    options: of the target, as of ``zebu create -o``.
    rate: bytes a second at most.
    workers: chunks in work at once, 1 to 256; None keeps all cores busy.
    progress: is called with bytes done and their total about ten times a second.

    A target that is not finished, after an error or because the conversion was cancelled, is left as
    it is; a qcow2 image is marked as incomplete.
    """
    if level is not None and not compress:
        raise ValueError("a level needs compress=True")
    how = {
        "compress": compress,
        "level": number("level", level, 1, 22),
        "rate": number("rate", rate, 1, U64),
        "workers": number("workers", workers, 1, 256),
    }
    image = opening(source, format=source_format, untrusted=untrusted, snapshot=snapshot)
    _zebu.convert(image, new_image(target, format, options), how, progress)


def check(
    name: Name,
    *,
    format: Optional[str] = None,
    untrusted: Untrusted = False,
    repair: Optional[str] = None,
    progress: Optional[Progress] = None,
) -> CheckResult:
    """Checks an image.

    repair: ``"leaks"`` or ``"all"`` repairs a qcow2 image first.
    progress: is called with the table entries done and their total.
    """
    image = opening(name, format=format, untrusted=untrusted)
    return CheckResult(**_zebu.check(image, checked("repair", repair), progress))
