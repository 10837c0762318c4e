"""Guards against jobs that cannot be cancelled, or that lose exceptions."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import zebu

MIB = 1 << 20


def test_convert(path: Path, noise: bytes) -> None:
    with zebu.open(path, "r+") as disk:
        disk.pwrite(b"text " * 100000, 0)
        disk.pwrite(noise, 4 * MIB)
    calls: list[tuple[int, int]] = []
    small = path.with_name("small.qcow2")
    zebu.convert(
        path,
        small,
        format="qcow2",
        compress=True,
        level=3,
        options={"compression_type": "zstd", "cluster_size": 32768},
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls and calls[-1] == (8 * MIB, 8 * MIB)
    assert zebu.check(small).compressed_clusters > 0
    raw = path.with_name("disk.raw")
    zebu.convert(small, raw, format="raw")
    content = raw.read_bytes()
    assert len(content) == 8 * MIB
    assert content[: 500000] == b"text " * 100000
    assert content[4 * MIB : 5 * MIB] == noise


@pytest.mark.skipif(not shutil.which("qemu-img"), reason="needs qemu-img")
def test_qemu_agrees(path: Path, noise: bytes) -> None:
    with zebu.open(path, "r+") as disk:
        disk.pwrite(noise, 12345)
    target = path.with_name("target.vmdk")
    zebu.convert(path, target, format="vmdk")
    subprocess.run(["qemu-img", "check", path], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["qemu-img", "compare", path, target], check=True, stdout=subprocess.DEVNULL)


def test_an_exception_of_the_callback_cancels(path: Path, noise: bytes) -> None:
    with zebu.open(path, "r+") as disk:
        # More than the chunks that are in work at once, which a cancelled job finishes.
        disk.resize(64 * MIB)
        for offset in range(0, 64 * MIB, MIB):
            disk.pwrite(noise, offset)
    target = path.with_name("target.qcow2")

    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        zebu.convert(path, target, format="qcow2", rate=16 * MIB, progress=stop)
    with pytest.raises(zebu.Error):
        zebu.open(target)


def test_ctrl_c_cancels(path: Path, noise: bytes) -> None:
    with zebu.open(path, "r+") as disk:
        for offset in range(0, 8 * MIB, MIB):
            disk.pwrite(noise, offset)
    # A program in the background ignores it by default.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    start = time.monotonic()
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        zebu.convert(path, path.with_name("target"), format="raw", rate=MIB // 4)
    assert time.monotonic() - start < 20


def test_other_threads_run_meanwhile(path: Path, noise: bytes) -> None:
    with zebu.open(path, "r+") as disk:
        disk.pwrite(noise, 0)
    turns = 0
    ended = threading.Event()

    def count() -> None:
        nonlocal turns
        while not ended.wait(0.01):
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    zebu.convert(path, path.with_name("target"), format="raw", rate=2 * MIB)
    ended.set()
    thread.join()
    assert turns > 5


def test_check_and_repair(path: Path, noise: bytes) -> None:
    with zebu.open(path, "r+") as disk:
        disk.pwrite(noise, 0)
    assert zebu.check(path).ok
    # The refcount of a cluster of data.
    with open(path, "r+b") as file:
        header = file.read(72)
        table = int.from_bytes(header[48:56], "big")
        file.seek(table)
        block = int.from_bytes(file.read(8), "big")
        file.seek(block + 2 * 6)
        file.write(bytes(2))
    calls: list[int] = []
    result = zebu.check(path, progress=lambda done, total: calls.append(done))
    assert result.corruptions > 0 and not result.ok
    assert len(result.messages) >= 1
    assert calls
    repaired = zebu.check(path, repair="all")
    assert repaired.ok and repaired.corruptions_fixed > 0
    assert zebu.check(path).ok
    with pytest.raises(zebu.RefusedError):
        zebu.check(path, repair="some")


def test_create(tmp_path: Path) -> None:
    for format in ["raw", "qcow2", "vmdk", "vdi", "vpc", "vhdx"]:
        zebu.create(tmp_path / format, 16 * MIB, format=format)
        with zebu.open(tmp_path / format, format=format) as disk:
            assert disk.size >= 16 * MIB
    zebu.create(
        tmp_path / "options",
        MIB,
        options={"compat": "1.1", "lazy_refcounts": True, "refcount_bits": 32},
    )
    for size, options, format in [
        (None, {}, "qcow2"),
        (MIB, {"cluster_size": 3}, "qcow2"),
        (MIB, {"something": 1}, "qcow2"),
        (MIB, {}, "none"),
        (MIB, {}, "dmg"),
    ]:
        with pytest.raises(zebu.RefusedError):
            zebu.create(tmp_path / "wrong", size, format=format, options=options)
    assert not (tmp_path / "wrong").exists()
    with pytest.raises(zebu.RefusedError):
        zebu.create(tmp_path / "wrong", backing=tmp_path / "qcow2")
    comma = tmp_path / "a,b"
    zebu.create(comma, MIB, format="raw")
    zebu.create(tmp_path / "top", backing=comma, backing_format="raw")
    with zebu.open(tmp_path / "top") as disk:
        assert disk.info["backing_filename"] == str(comma)


def test_convert_refuses(path: Path) -> None:
    target = path.with_name("target")
    with pytest.raises(ValueError):
        zebu.convert(path, target, format="qcow2", level=3)
    with pytest.raises(zebu.RefusedError):
        zebu.convert(path, target, format="raw", compress=True)
    with pytest.raises(zebu.RefusedError):
        zebu.convert(path, target, format="qcow2", options={"backing_file": path})
    with zebu.open(path, "r+"), pytest.raises(zebu.LockedError):
        zebu.convert(path, target, format="raw")
    zebu.create(target, MIB)
    with zebu.open(target), pytest.raises(zebu.LockedError):
        zebu.convert(path, target, format="raw")
    with zebu.open(target), pytest.raises(zebu.LockedError):
        zebu.create(target, MIB)
    with pytest.raises(zebu.LockedError):
        zebu.convert(path, path, format="qcow2")
    with pytest.raises(zebu.NotFoundError):
        zebu.create(path.with_name("none") / "x", MIB)
    assert zebu.check(path).ok


def test_numbers_out_of_range(path: Path) -> None:
    target = path.with_name("target")
    for workers, level, rate in (1 << 30, 1, 1), (0, 1, 1), (1, 1 << 40, 1), (1, 1, -1):
        with pytest.raises(ValueError, match="must be from"):
            zebu.convert(
                path, target, format="qcow2", compress=True, workers=workers, level=level, rate=rate
            )
    with pytest.raises(ValueError, match="must be from"):
        zebu.create(target, -1)
    assert not target.exists()
