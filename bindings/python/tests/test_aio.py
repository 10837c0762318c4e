"""Guards against requests of an event loop that block it, get lost, or wake the wrong task."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Coroutine

import pytest

import zebu

MIB = 1 << 20


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_many_requests_at_once(path: Path, noise: bytes) -> None:
    async def work() -> None:
        async with await zebu.aio.open(path, "r+") as disk:
            assert disk.size == 8 * MIB
            pieces = [(at, noise[at : at + 4096]) for at in range(0, MIB, 4096)]
            await asyncio.gather(*(disk.pwrite(piece, 3 * at) for at, piece in pieces))
            read = await asyncio.gather(*(disk.pread(4096, 3 * at) for at, _ in pieces))
            assert read == [piece for _, piece in pieces]
            await disk.flush()
            with pytest.raises(zebu.OutOfRangeError):
                await disk.pwrite(b"x", 8 * MIB)
        assert disk.closed
        with pytest.raises(ValueError, match="closed"):
            await disk.pread(1, 0)

    run(work())
    assert zebu.check(path).ok


def test_as_a_file(path: Path) -> None:
    async def work() -> None:
        async with await zebu.aio.open(path, "r+") as disk:
            assert await disk.write(b"hello ") == 6
            await asyncio.gather(disk.write(b"a"), disk.write(b"b"))
            assert disk.tell() == 8
            disk.seek(0)
            assert await disk.read(8) == b"hello ab"
            buffer = bytearray(5)
            assert await disk.preadinto(buffer, 0) == 5
            assert buffer == b"hello"
            disk.seek(-2, 2)
            assert await disk.read() == bytes(2)
            await disk.write_zeroes(0, 3)
            await disk.resize(9 * MIB)
            assert disk.size == 9 * MIB
            extents = [extent async for extent in disk.extents()]
            assert sum(extent.length for extent in extents) == 9 * MIB
            await disk.snapshots.create("one")
            assert [snapshot.name for snapshot in await disk.snapshots.list()] == ["one"]
            assert (await disk.info())["snapshots"] == 1
            await disk.snapshots.apply("one")
            await disk.snapshots.delete("one")

    run(work())


def test_a_cancelled_task_disturbs_no_other(path: Path) -> None:
    async def work() -> None:
        async with await zebu.aio.open(path) as disk:
            tasks = [asyncio.ensure_future(disk.pread(4096, 0)) for _ in range(20)]
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(r, asyncio.CancelledError) for r in results[::2])
            assert all(r == bytes(4096) for r in results[1::2])

    run(work())


def test_jobs(path: Path, noise: bytes) -> None:
    with zebu.open(path, "r+") as disk:
        # More than the chunks that are in work at once, which a cancelled job finishes.
        disk.resize(64 * MIB)
        for offset in range(0, 64 * MIB, MIB):
            disk.pwrite(noise, offset)
    target = path.with_name("target.qcow2")

    async def work() -> None:
        calls: list[int] = []
        await zebu.aio.create(path.with_name("new.qcow2"), MIB)
        await zebu.aio.convert(
            path, target, format="qcow2", progress=lambda done, total: calls.append(done)
        )
        assert calls[-1] == 64 * MIB
        assert (await zebu.aio.check(target)).ok

        slow = asyncio.ensure_future(
            zebu.aio.convert(path, target, format="qcow2", rate=16 * MIB)
        )
        await asyncio.sleep(0.3)
        slow.cancel()
        start = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await slow
        assert time.monotonic() - start < 10
        with pytest.raises(zebu.Error):
            await zebu.aio.open(target)

        def fail(done: int, total: int) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await zebu.aio.convert(path, target, format="qcow2", rate=16 * MIB, progress=fail)

    run(work())


def test_two_loops(path: Path) -> None:
    async def open_it() -> zebu.aio.AsyncImage:
        return await zebu.aio.open(path)

    loop = asyncio.new_event_loop()
    disk = loop.run_until_complete(open_it())

    async def work() -> None:
        with pytest.raises(RuntimeError, match="loop"):
            await disk.pread(1, 0)

    run(work())
    loop.run_until_complete(disk.close())
    loop.close()
