"""What images are made of."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from typing import NamedTuple, Optional, TypedDict, Union

#: The name of an image. ``str`` and ``bytes`` are names as ``zebu`` has them (a path, ``json:...``,
#: ``nbd://...``).
Name = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]


class Extent(NamedTuple):
    """A range of the disk that is alike."""

    #: Bytes from the start of the disk.
    offset: int
    #: In bytes.
    length: int
    #: The range is stored as data.
    data: bool
    #: The range reads as zeroes.
    zero: bool
    #: The data are compressed.
    compressed: bool
    #: An image of the chain has the range; else it reads as zeroes for want of one.
    present: bool
    #: The image of the chain that has it: 0 is the one that was opened.
    depth: int
    #: Where the data are in the file of that image, in bytes.
    host_offset: Optional[int]


class Snapshot(NamedTuple):
    """An internal snapshot."""

    id: str
    name: str
    #: Of the disk in bytes; None in old images.
    disk_size: Optional[int]
    #: In bytes.
    vm_state_size: int
    #: When it was taken, in seconds since the epoch.
    timestamp: float
    #: How long the guest had run, in nanoseconds.
    vm_clock_nsec: int

    @property
    def date(self) -> datetime:
        """When it was taken, in UTC."""
        return datetime.fromtimestamp(self.timestamp, timezone.utc)


class Info(TypedDict):
    """What an image is. Sizes are in bytes."""

    filename: str
    format: str
    virtual_size: int
    actual_size: Optional[int]
    cluster_size: Optional[int]
    backing_filename: Optional[str]
    backing_filename_format: Optional[str]
    snapshots: int
    writable: bool
    encrypted: bool
    dirty: bool
