"""Guards against wrong information about images, and against errors of a wrong class."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable

import pytest

import zebu

MIB = 1 << 20


def test_info(path: Path) -> None:
    top = path.with_name("top.qcow2")
    zebu.create(top, backing=path, backing_format="qcow2", options={"cluster_size": 4096})
    with zebu.open(top) as disk:
        info = disk.info
    assert info["format"] == "qcow2"
    assert info["virtual_size"] == 8 * MIB
    assert info["cluster_size"] == 4096
    assert info["backing_filename"] == str(path)
    assert info["backing_filename_format"] == "qcow2"
    assert info["filename"] == str(top)
    assert not info["writable"] and not info["dirty"] and not info["encrypted"]
    assert info["actual_size"]


def test_extents(path: Path, noise: bytes) -> None:
    with zebu.open(path, "r+") as disk:
        disk.pwrite(noise, MIB)
        disk.write_zeroes(4 * MIB, MIB)
        extents = list(disk.extents())
        assert sum(extent.length for extent in extents) == disk.size
        data = [extent for extent in extents if extent.data]
        assert [(e.offset, e.length, e.zero, e.depth) for e in data] == [(MIB, MIB, False, 0)]
        assert data[0].host_offset
        inner = list(disk.extents(MIB + 5, MIB + 10))
        assert [(e.offset, e.length) for e in inner] == [(MIB + 5, 5)]
        assert list(disk.extents(9 * MIB)) == []


def test_many_extents(path: Path) -> None:
    with zebu.open(path, "r+") as disk:
        disk.resize(256 * MIB)
        for offset in range(0, 192 * MIB, 128 << 10):
            disk.pwrite(b"x", offset)
        extents = list(disk.extents())
        some = disk.extents()
        next(some)
        disk.resize(MIB)
        assert len(list(some)) < 3072
    assert len(extents) == 3072
    ends = [extent.offset + extent.length for extent in extents]
    assert [extent.offset for extent in extents[1:]] == ends[:-1]
    assert ends[-1] == 256 * MIB


def test_snapshots(path: Path) -> None:
    with zebu.open(path, "r+") as disk:
        disk.pwrite(b"before", 0)
        disk.snapshots.create("first")
        disk.pwrite(b"after.", 0)
        assert [snapshot.name for snapshot in disk.snapshots] == ["first"]
        snapshot = disk.snapshots["first"]
        assert snapshot == disk.snapshots[snapshot.id]
        assert snapshot.disk_size == 8 * MIB
        assert snapshot.date.year > 2020
        assert "first" in disk.snapshots and "second" not in disk.snapshots
        with pytest.raises(KeyError):
            disk.snapshots["second"]
        disk.flush()
        disk.snapshots.apply("first")
        assert disk.pread(6, 0) == b"before"
        disk.pwrite(b"third.", 0)
    with zebu.open(path, snapshot="first") as old:
        assert old.pread(6, 0) == b"before"
        assert not old.writable()
    with zebu.open(path, "r+") as disk:
        disk.snapshots.delete("first")
        assert len(disk.snapshots) == 0
        with pytest.raises(zebu.Error):
            disk.snapshots.delete("first")


def test_errors(path: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        zebu.open(tmp_path / "none")
    assert isinstance(missing.value, zebu.NotFoundError)
    assert missing.value.errno == 2
    assert "Could not open" in str(missing.value) and "Errno" not in str(missing.value)
    content = path.read_bytes()
    with pytest.raises(zebu.CorruptError):
        # The offset of the L1 table.
        zebu.open(_file(tmp_path, content[:40] + b"\0\0\0\0\0\0\0\x07" + content[48:]))
    with pytest.raises(zebu.UnsupportedError):
        zebu.open(_file(tmp_path, b"QFI\xfb\0\0\0\x09" + bytes(600)))
    with pytest.raises(zebu.Error):
        zebu.open(path, format="none")
    with zebu.open(path, "r+"):
        with pytest.raises(zebu.LockedError):
            zebu.open(path, "r+")
        zebu.open(path, force_share=True).close()
    with zebu.open(path) as disk:
        with pytest.raises(PermissionError):
            disk.pwrite(b"x", 0)
        with pytest.raises(OSError, match="not writable"):
            disk.write(b"x")
        with pytest.raises(PermissionError):
            disk.snapshots.create("x")


def _file(directory: Path, content: bytes) -> Path:
    path = directory / "file"
    path.write_bytes(content)
    return path


def test_untrusted(path: Path) -> None:
    top = path.with_name("top.qcow2")
    zebu.create(top, backing=path, backing_format="qcow2")
    with pytest.raises(zebu.RefusedError):
        zebu.open(top, untrusted=True)
    zebu.open(path, untrusted=True).close()
    with pytest.raises(zebu.LimitError):
        zebu.open(path, untrusted={"virtual-size": MIB})
    with pytest.raises(zebu.RefusedError, match="limit"):
        zebu.open(path, untrusted={"something": 1})


def test_wrong_arguments(path: Path) -> None:
    with pytest.raises(ValueError, match="mode"):
        zebu.open(path, "w")
    with pytest.raises(ValueError, match="null"):
        zebu.open("a\0b")
    with pytest.raises(zebu.RefusedError, match="cache"):
        zebu.open(path, cache="warm")
    with pytest.raises(TypeError):
        zebu.open(7)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        zebu.open(path, format=7)  # type: ignore[arg-type]
    with zebu.open(path, "r+") as disk:
        for wrong in (lambda: disk.pread(-1, 0), lambda: disk.pread(1, -1), lambda: disk.seek(-1)):
            with pytest.raises(ValueError):
                wrong()
        with pytest.raises(ValueError):
            disk.pwrite(b"x", -1)
        with pytest.raises(OverflowError):
            disk.pwrite(b"x", 1 << 64)
        with pytest.raises(TypeError):
            disk.pwrite("text", 0)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            disk.pread("1", 0)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            disk.preadinto(b"only read", 0)
        with pytest.raises(ValueError):
            disk.seek(0, 9)
        with pytest.raises(TypeError):
            disk.snapshots.create(7)  # type: ignore[arg-type]


def test_many_threads(path: Path, noise: bytes) -> None:
    with zebu.open(path, "r+") as disk:

        def work(number: int) -> None:
            for turn in range(50):
                at = number * MIB + turn * 4099
                piece = noise[turn * 4099 : (turn + 1) * 4099]
                disk.pwrite(piece, at)
                assert disk.pread(len(piece), at) == piece

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    assert zebu.check(path).ok


def test_the_position_of_many_threads(path: Path) -> None:
    with zebu.open(path, "r+") as disk:
        pieces: list[bytes] = []

        def work() -> None:
            for _ in range(100):
                pieces.append(disk.read(512))
                disk.write(b"x" * 512)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert disk.tell() == 400 * 1024


def test_close_while_others_read(path: Path) -> None:
    disk = zebu.open(path)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                assert len(disk.pread(4096, 0)) == 4096
            except (ValueError, zebu.RefusedError):
                return

    with ThreadPoolExecutor(4) as pool:
        ends = [pool.submit(work) for _ in range(4)]
        disk.close()
        for end in ends:
            end.result(10)
        stop.set()


def test_a_forked_process_must_open_it_again(path: Path) -> None:
    code = """
import os, sys, zebu
disk = zebu.open(sys.argv[1])
child = os.fork()
if child == 0:
    try:
        disk.pread(1, 0)
    except RuntimeError as error:
        assert "fork" in str(error)
        disk.close()
        assert zebu.open(sys.argv[1]).pread(1, 0) == b"\\0"
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert disk.pread(1, 0) == b"\\0"
"""
    subprocess.run([sys.executable, "-c", code, os.fspath(path)], check=True, timeout=60)


def test_copies_are_refused(path: Path) -> None:
    with zebu.open(path, "r+") as disk:
        for copier in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="open it again"):
                copier(disk)
        gc.collect()
        assert disk.pread(1, 0) == b"\0"


def test_nul_bytes(path: Path) -> None:
    nul = "a\0b"
    new = path.with_name("new")
    calls: list[Callable[[], object]] = [
        lambda: zebu.open(nul),
        lambda: zebu.open(path, format="qcow2\0"),
        lambda: zebu.open(path, snapshot=nul),
        lambda: zebu.open(path, cache=nul),
        lambda: zebu.create(new, MIB, format="raw\0"),
        lambda: zebu.create(new, MIB, options={"data_file": nul}),
        lambda: zebu.create(new, backing=nul, backing_format="raw"),
        lambda: zebu.convert(path, new, format=nul),
        lambda: zebu.check(path, repair=nul),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="null byte"):
            call()
    assert not new.exists()
    with zebu.open(path, "r+") as disk:
        for change in (disk.snapshots.create, disk.snapshots.apply, disk.snapshots.delete):
            with pytest.raises(ValueError, match="null byte"):
                change(nul)
        assert not len(disk.snapshots)


def test_the_file_that_is_missing(path: Path) -> None:
    missing = path.with_name("none")
    with pytest.raises(zebu.NotFoundError) as found:
        zebu.open(missing)
    assert found.value.filename == str(missing)
    assert str(found.value).count("Could not open") == 1
    top = path.with_name("top")
    zebu.create(top, backing=path, backing_format="qcow2")
    path.unlink()
    with pytest.raises(zebu.NotFoundError) as found:
        zebu.open(top)
    assert found.value.filename == str(path)
