"""An image as a file."""

from __future__ import annotations

import io
import os
import threading
from typing import TYPE_CHECKING, Any, Iterator, NoReturn, Optional

from . import _zebu
from ._names import Untrusted, checked_text, opening
from ._types import Extent, Info, Name, Snapshot

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

#: Bytes of one request at most.
PART = 16 << 20
#: Threads that execute the requests of an image.
THREADS = min(4, os.cpu_count() or 1)


def as_bytes(data: ReadableBuffer) -> bytes:
    """Data that nobody changes while they are written."""
    return data if type(data) is bytes else bytes(memoryview(data).cast("B"))


def open_image(
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
) -> Image:
    """Opens an image. It is locked against other programs, as QEMU does.

    mode: ``"r"``, or ``"r+"`` to write, too.
    format: None guesses it, which a guest that writes to a raw image could abuse.
    untrusted: no file that the image names is opened, and memory and work are bounded. A mapping
    changes limits: ``{"virtual-size": 1 << 40}``.
    cache: QEMU's cache modes.
    snapshot: this internal snapshot, by ID or name, only for reading.
    backing: False leaves the backing file out, whose data read as zeroes.
    force_share: opens although another program may write to the image.
    discard: frees what is discarded.
    """
    how = opening(
        name,
        mode,
        format=format,
        untrusted=untrusted,
        cache=cache,
        snapshot=snapshot,
        backing=backing,
        force_share=force_share,
        discard=discard,
    )
    return Image(_zebu.open(how, THREADS), how["name"], how["write"])


class Image(io.RawIOBase):
    """An open image: an unbuffered binary file of a fixed length.

    Any number of threads may use it. ``pread`` and ``pwrite`` run at the same time; what uses the
    position runs one after the other. A process that was forked must open the image again.
    """

    def __init__(self, device: _zebu.Device, name: str, writable: bool) -> None:
        self._device = device
        self._writable = writable
        self._position = 0
        self._lock = threading.RLock()
        self.name = name
        self.mode = "rb+" if writable else "rb"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        # Two objects of one device: the end of one would close the other.
        raise TypeError("an open image cannot be copied or pickled: open it again")

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<zebu.Image name={self.name!r} mode={self.mode!r}{state}>"

    # What the image is.

    @property
    def size(self) -> int:
        """The length of the disk in bytes."""
        return self._device.size()

    @property
    def info(self) -> Info:
        """Format, sizes, backing file, flags."""
        info: Info = self._device.info()
        return info

    @property
    def snapshots(self) -> Snapshots:
        """The internal snapshots."""
        return Snapshots(self)

    def extents(self, start: int = 0, end: Optional[int] = None) -> Iterator[Extent]:
        """What the range of the disk is made of, in ascending order."""
        size = self.size
        end = size if end is None else min(end, size)
        # None are found behind the end of the disk, which may become shorter meanwhile.
        while start < end and (found := self._device.extents(start, end)):
            for extent in found:
                yield Extent(*extent)
                start = extent[0] + extent[1]

    # At an offset.

    def pread(self, length: int, offset: int) -> bytes:
        """The ``length`` bytes from ``offset`` on; fewer at the end of the disk."""
        if length < 0 or offset < 0:
            raise ValueError("negative length or offset")
        if length <= PART:
            data: bytes = self._device.pread(offset, length)
            return data
        content = bytearray(min(length, max(self.size - offset, 0)))
        count = self.preadinto(content, offset)
        return bytes(memoryview(content)[:count])

    def preadinto(self, buffer: WriteableBuffer, offset: int) -> int:
        """Fills the buffer from ``offset`` on. Returns the bytes read: fewer at the end."""
        if offset < 0:
            raise ValueError("negative offset")
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view):
            data = self._device.pread(offset + done, min(PART, len(view) - done))
            if not data:
                break
            view[done : done + len(data)] = data
            done += len(data)
        return done

    def pwrite(self, data: ReadableBuffer, offset: int) -> int:
        """Writes all of the data from ``offset`` on. They must lie inside the disk."""
        if offset < 0:
            raise ValueError("negative offset")
        content = as_bytes(data)
        self._device.pwrite(offset, content)
        return len(content)

    def write_zeroes(self, offset: int, length: int, *, unmap: bool = False) -> None:
        """Makes the range zero. ``unmap`` frees its space where the image can."""
        self._device.write_zeroes(offset, length, unmap)

    def discard(self, offset: int, length: int) -> None:
        """Gives the range up: what it reads as is unspecified."""
        self._device.discard(offset, length)

    # As a file.

    def readable(self) -> bool:
        self._check_open()
        return True

    def writable(self) -> bool:
        self._check_open()
        return self._writable

    def seekable(self) -> bool:
        self._check_open()
        return True

    def tell(self) -> int:
        self._check_open()
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._check_open()
        with self._lock:
            if whence == os.SEEK_SET:
                position = offset
            elif whence == os.SEEK_CUR:
                position = self._position + offset
            elif whence == os.SEEK_END:
                position = self.size + offset
            else:
                raise ValueError(f"invalid whence ({whence}, should be 0, 1 or 2)")
            if position < 0:
                raise ValueError(f"negative seek position {position}")
            self._position = position
            return position

    def read(self, size: Optional[int] = -1, /) -> bytes:
        with self._lock:
            if size is None or size < 0:
                size = max(self.size - self._position, 0)
            data = self.pread(size, self._position)
            self._position += len(data)
            return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        with self._lock:
            count = self.preadinto(buffer, self._position)
            self._position += count
            return count

    def write(self, data: ReadableBuffer, /) -> int:
        """Writes at the position. As on a disk, what lies behind the end is not written."""
        self._check_writable()
        with self._lock:
            content = as_bytes(data)
            left = max(self.size - self._position, 0)
            if len(content) > left:
                if not left:
                    raise OSError(28, "The disk has no room behind its end")
                content = content[:left]
            self.pwrite(content, self._position)
            self._position += len(content)
            return len(content)

    def truncate(self, size: Optional[int] = None, /) -> int:
        """Changes the length of the disk: to the position without a size."""
        self._check_writable()
        size = self._position if size is None else size
        self.resize(size)
        return size

    def resize(self, size: int, *, preallocation: str = "off") -> None:
        """Changes the length of the disk. What is cut off is lost."""
        self._device.resize(size, preallocation)

    def flush(self) -> None:
        """Makes everything that was written durable."""
        self._check_open()
        if self._writable:
            self._device.flush()

    def close(self) -> None:
        """Makes everything durable, and gives up the image's locks."""
        if self.closed:
            return
        try:
            # It flushes; and the file is closed then, whatever the device says.
            self._device.close()
        finally:
            self._writable = False
            super().close()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file.")

    def _check_writable(self) -> None:
        self._check_open()
        if not self._writable:
            raise io.UnsupportedOperation("not writable")


class Snapshots:
    """The internal snapshots of an image: iterable, with a length."""

    def __init__(self, image: Image) -> None:
        self._device = image._device

    def list(self) -> list[Snapshot]:
        """All of them, in the order of the image."""
        return [Snapshot(*snapshot) for snapshot in self._device.snapshots()]

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(self.list())

    def __len__(self) -> int:
        return len(self.list())

    def __contains__(self, name: object) -> bool:
        return any(name in (snapshot.id, snapshot.name) for snapshot in self.list())

    def __getitem__(self, name: str) -> Snapshot:
        """By ID or name."""
        snapshots: dict[str, Any] = {}
        for snapshot in self.list():
            snapshots.setdefault(snapshot.name, snapshot)
        for snapshot in self.list():
            snapshots[snapshot.id] = snapshot
        found: Snapshot = snapshots[name]
        return found

    def create(self, name: str) -> None:
        """Takes a snapshot of the disk as it is now."""
        self._device.snapshot_create(checked_text("name", name))

    def apply(self, name: str) -> None:
        """Makes the disk what it was, by ID or name."""
        self._device.snapshot_apply(checked_text("name", name))

    def delete(self, name: str) -> None:
        """Deletes a snapshot, by ID or name."""
        self._device.snapshot_delete(checked_text("name", name))
