"""Images for asyncio.

    async with await zebu.aio.open("disk.qcow2") as disk:
        first, last = await asyncio.gather(disk.pread(512, 0), disk.pread(512, disk.size - 512))

Requests are executed by threads of the library, any number at once: the caller bounds the memory
that they take. A request goes on if the task that waits for it is cancelled.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any, AsyncIterator, Callable, NoReturn, Optional, TypeVar

from . import _jobs, _zebu
from ._image import PART, THREADS, Image, as_bytes, open_image
from ._jobs import CheckResult, Progress
from ._names import CreateOptions, Untrusted, checked_text
from ._types import Extent, Info, Name, Snapshot

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["AsyncImage", "AsyncSnapshots", "check", "convert", "create", "open"]

_T = TypeVar("_T")


async def open(
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
) -> AsyncImage:
    """Opens an image: the arguments are those of ``zebu.open``."""
    work = functools.partial(
        open_image,
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
    return AsyncImage(await _in_thread(work))


class AsyncImage:
    """An open image, of the event loop that is running."""

    def __init__(self, image: Image) -> None:
        self._image = image
        self._device = image._device
        self._loop = asyncio.get_running_loop()
        self._completions = _zebu.Completions()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._next = 0
        self._closing: Optional[asyncio.Task[None]] = None
        self._loop.add_reader(self._completions.fileno(), self._take)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        # As that of Image.
        raise TypeError("an open image cannot be copied or pickled: open it again")

    def _take(self) -> None:
        for number, value, exception in self._completions.take():
            future = self._waiting.pop(number)
            if future.done():
                continue
            if exception is None:
                future.set_result(value)
            else:
                future.set_exception(exception)

    async def _request(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if self._loop is not asyncio.get_running_loop():
            raise RuntimeError("the image belongs to another event loop")
        number = self._next
        self._next += 1
        future = self._loop.create_future()
        self._waiting[number] = future
        try:
            method(*arguments, to=(self._completions, number))
        except BaseException:
            del self._waiting[number]
            raise
        return await future

    @property
    def size(self) -> int:
        """The length of the disk in bytes."""
        return self._image.size

    @property
    def name(self) -> str:
        return self._image.name

    @property
    def closed(self) -> bool:
        return self._image.closed

    @property
    def snapshots(self) -> AsyncSnapshots:
        """The internal snapshots."""
        return AsyncSnapshots(self)

    async def info(self) -> Info:
        """Format, sizes, backing file, flags."""
        info: Info = await self._request(self._device.info)
        return info

    async def extents(self, start: int = 0, end: Optional[int] = None) -> AsyncIterator[Extent]:
        """What the range of the disk is made of, in ascending order."""
        size = self.size
        end = size if end is None else min(end, size)
        # As in Image.extents.
        while start < end and (found := await self._request(self._device.extents, start, end)):
            for extent in found:
                yield Extent(*extent)
                start = extent[0] + extent[1]

    async def pread(self, length: int, offset: int) -> bytes:
        """The ``length`` bytes from ``offset`` on; fewer at the end of the disk."""
        if length < 0 or offset < 0:
            raise ValueError("negative length or offset")
        if length <= PART:
            data: bytes = await self._request(self._device.pread, offset, length)
            return data
        content = bytearray(min(length, max(self.size - offset, 0)))
        count = await self.preadinto(content, offset)
        return bytes(memoryview(content)[:count])

    async def preadinto(self, buffer: WriteableBuffer, offset: int) -> int:
        """Fills the buffer from ``offset`` on. Returns the bytes read: fewer at the end."""
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view):
            data = await self.pread(min(PART, len(view) - done), offset + done)
            if not data:
                break
            view[done : done + len(data)] = data
            done += len(data)
        return done

    async def pwrite(self, data: ReadableBuffer, offset: int) -> int:
        """Writes all of the data from ``offset`` on. They must lie inside the disk."""
        if offset < 0:
            raise ValueError("negative offset")
        content = as_bytes(data)
        await self._request(self._device.pwrite, offset, content)
        return len(content)

    async def write_zeroes(self, offset: int, length: int, *, unmap: bool = False) -> None:
        """Makes the range zero. ``unmap`` frees its space where the image can."""
        await self._request(self._device.write_zeroes, offset, length, unmap)

    async def discard(self, offset: int, length: int) -> None:
        """Gives the range up: what it reads as is unspecified."""
        await self._request(self._device.discard, offset, length)

    def tell(self) -> int:
        """The position, in bytes."""
        return self._image.tell()

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Changes the position, and returns it."""
        return self._image.seek(offset, whence)

    async def read(self, size: int = -1) -> bytes:
        """Reads from the position on, which moves at the call: several may be under way."""
        start = self.tell()
        left = max(self.size - start, 0)
        size = left if size < 0 else min(size, left)
        self.seek(start + size)
        return await self.pread(size, start)

    async def write(self, data: ReadableBuffer) -> int:
        """Writes all of the data at the position, which moves at the call."""
        content = as_bytes(data)
        start = self.tell()
        self.seek(start + len(content))
        return await self.pwrite(content, start)

    async def flush(self) -> None:
        """Makes everything durable whose write has ended."""
        await self._request(self._device.flush)

    async def resize(self, size: int, *, preallocation: str = "off") -> None:
        """Changes the length of the disk. What is cut off is lost."""
        await self._request(self._device.resize, size, preallocation)

    async def close(self) -> None:
        """Waits for all requests, makes everything durable and gives up the image's locks. It goes
        on if the task that waits for it is cancelled."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await _in_thread(self._image.close)
        finally:
            # The last requests may have ended and not been reported yet.
            if self._waiting:
                await asyncio.wait(self._waiting.values())
            self._loop.remove_reader(self._completions.fileno())

    async def __aenter__(self) -> AsyncImage:
        return self

    async def __aexit__(
        self,
        kind: Optional[type[BaseException]],
        exception: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        await self.close()


class AsyncSnapshots:
    """The internal snapshots of an image."""

    def __init__(self, image: AsyncImage) -> None:
        self._image = image
        self._device = image._device

    async def list(self) -> list[Snapshot]:
        """All of them, in the order of the image."""
        found = await self._image._request(self._device.snapshots)
        return [Snapshot(*snapshot) for snapshot in found]

    async def create(self, name: str) -> None:
        """Takes a snapshot of the disk as it is now."""
        await self._image._request(self._device.snapshot_create, checked_text("name", name))

    async def apply(self, name: str) -> None:
        """Makes the disk what it was, by ID or name."""
        await self._image._request(self._device.snapshot_apply, checked_text("name", name))

    async def delete(self, name: str) -> None:
        """Deletes a snapshot, by ID or name."""
        await self._image._request(self._device.snapshot_delete, checked_text("name", name))


async def create(
    name: Name,
    size: Optional[int] = None,
    *,
    format: str = "qcow2",
    backing: Optional[Name] = None,
    backing_format: Optional[str] = None,
    options: Optional[CreateOptions] = None,
) -> None:
    """``zebu.create``."""
    work = functools.partial(
        _jobs.create,
        name,
        size,
        format=format,
        backing=backing,
        backing_format=backing_format,
        options=options,
    )
    await _in_thread(work)


async def convert(
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
    """``zebu.convert``. ``progress`` is called in the event loop; cancelling the task cancels it."""
    job = functools.partial(
        _jobs.convert,
        source,
        target,
        format=format,
        source_format=source_format,
        untrusted=untrusted,
        snapshot=snapshot,
        compress=compress,
        level=level,
        options=options,
        rate=rate,
        workers=workers,
    )
    await _job(job, progress)


async def check(
    name: Name,
    *,
    format: Optional[str] = None,
    untrusted: Untrusted = False,
    repair: Optional[str] = None,
    progress: Optional[Progress] = None,
) -> CheckResult:
    """``zebu.check``, as ``convert``."""
    job = functools.partial(_jobs.check, name, format=format, untrusted=untrusted, repair=repair)
    return await _job(job, progress)


async def _in_thread(work: Callable[[], _T]) -> _T:
    return await asyncio.get_running_loop().run_in_executor(None, work)


class _Cancelled(Exception):
    pass


async def _job(job: functools.partial[_T], callback: Optional[Progress]) -> _T:
    """Runs a job in a thread, and waits for its end also if it is cancelled."""
    loop = asyncio.get_running_loop()
    cancelled = threading.Event()
    failures: list[BaseException] = []

    def call(done: int, total: int) -> None:
        try:
            if callback is not None and not failures:
                callback(done, total)
        except BaseException as exception:
            failures.append(exception)
            cancelled.set()

    def progress(done: int, total: int) -> None:
        if cancelled.is_set():
            raise _Cancelled
        if callback is not None:
            loop.call_soon_threadsafe(call, done, total)

    work = asyncio.ensure_future(_in_thread(functools.partial(job, progress=progress)))
    try:
        result = await asyncio.shield(work)
    except asyncio.CancelledError:
        cancelled.set()
        await asyncio.wait([work])
        work.exception()
        raise
    except _Cancelled:
        raise failures[0] from None
    if failures:
        raise failures[0]
    return result
