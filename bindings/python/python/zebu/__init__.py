"""Disk images (qcow2, raw, VMDK, VHD, VHDX, VDI, ...) as files.

    import zebu

    with zebu.open("disk.qcow2") as disk:
        print(disk.info["format"], disk.size)
        first = disk.read(512)

``zebu.aio`` is the same for asyncio. Every function takes names as the program ``zebu`` does; an
``os.PathLike`` object is always a file.
"""

from . import aio
from ._errors import (
    CorruptError,
    DirtyError,
    Error,
    LimitError,
    LockedError,
    NoSpaceError,
    NotFoundError,
    NotPermittedError,
    OutOfRangeError,
    RefusedError,
    UnsupportedError,
)
from ._image import Image, Snapshots
from ._image import open_image as open
from ._jobs import CheckResult, check, convert, create
from ._types import Extent, Info, Snapshot
from ._zebu import VERSION as __version__

__all__ = [
    "CheckResult",
    "CorruptError",
    "DirtyError",
    "Error",
    "Extent",
    "Image",
    "Info",
    "LimitError",
    "LockedError",
    "NoSpaceError",
    "NotFoundError",
    "NotPermittedError",
    "OutOfRangeError",
    "RefusedError",
    "Snapshot",
    "Snapshots",
    "UnsupportedError",
    "__version__",
    "aio",
    "check",
    "convert",
    "create",
    "open",
]
