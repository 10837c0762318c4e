"""Guards against an image that is not quite a file: for the io module, for zipfile, for others."""

from __future__ import annotations

import array
import errno
import gc
import io
import os
import zipfile
from pathlib import Path

import pytest

import zebu

MIB = 1 << 20


def test_what_is_written_is_read(path: Path, noise: bytes) -> None:
    with zebu.open(path, "r+") as disk:
        assert disk.size == 8 * MIB
        assert disk.pwrite(noise, 4097) == MIB
        assert disk.pread(MIB, 4097) == noise
        assert disk.pread(10, 0) == bytes(10)
        disk.flush()
    with zebu.open(path) as disk:
        assert disk.pread(MIB, 4097) == noise
        assert disk.pread(100, 8 * MIB - 10) == bytes(10)
        assert disk.pread(100, 9 * MIB) == b""


def test_it_is_a_raw_file(path: Path) -> None:
    with zebu.open(path, "r+") as disk:
        assert isinstance(disk, io.RawIOBase)
        assert (disk.readable(), disk.writable(), disk.seekable()) == (True, True, True)
        assert disk.write(b"hello") == 5
        assert disk.tell() == 5
        assert disk.seek(-1, os.SEEK_CUR) == 4
        assert disk.read(1) == b"o"
        assert disk.seek(0, os.SEEK_END) == 8 * MIB
        assert disk.read() == b""
        assert disk.seek(1) == 1
        buffer = bytearray(4)
        assert disk.readinto(buffer) == 4
        assert buffer == b"ello"
        disk.seek(8 * MIB - 3)
        assert len(disk.readall()) == 3
        with pytest.raises(io.UnsupportedOperation):
            disk.fileno()
    assert disk.closed
    disk.close()
    for use in (disk.read, disk.tell, disk.flush, lambda: disk.size, disk.readable):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_any_buffer_is_taken(path: Path) -> None:
    with zebu.open(path, "r+") as disk:
        numbers = array.array("Q", range(64))
        disk.pwrite(numbers, 512)
        disk.pwrite(memoryview(b"0123456789")[::1], 0)
        assert disk.write(bytearray(b"ab")) == 2
        again = array.array("Q", bytes(512))
        assert disk.preadinto(again, 512) == 512
        assert again == numbers
        assert disk.pread(10, 0) == b"ab23456789"
        part = memoryview(bytearray(6))[2:4]
        disk.preadinto(part, 0)
        assert bytes(part) == b"ab"


def test_the_end_of_the_disk(path: Path) -> None:
    with zebu.open(path, "r+") as disk:
        disk.seek(-3, os.SEEK_END)
        assert disk.write(b"12345") == 3
        with pytest.raises(OSError) as full:
            disk.write(b"4")
        assert full.value.errno == errno.ENOSPC
        with pytest.raises(zebu.OutOfRangeError):
            disk.pwrite(b"12345", 8 * MIB - 3)


def test_large_requests_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "large.raw"
    with open(path, "wb") as file:
        file.truncate(40 * MIB)
        file.seek(39 * MIB)
        file.write(b"end")
    with zebu.open(path, format="raw") as disk:
        content = disk.pread(1 << 62, MIB)
        assert len(content) == 39 * MIB
        assert content.index(b"end") == 38 * MIB
        assert disk.readall()[1:].strip(b"\0") == b"end"


def test_buffered(path: Path, noise: bytes) -> None:
    with io.BufferedRandom(zebu.open(path, "r+")) as disk:
        disk.write(noise)
        disk.seek(0)
        assert disk.read(MIB) == noise
    with io.BufferedReader(zebu.open(path)) as disk:
        assert disk.peek(4)[:4] == noise[:4]
        assert disk.read(MIB) == noise
        disk.seek(0)
        assert io.TextIOWrapper(disk, "latin-1").read(4) == noise[:4].decode("latin-1")


@pytest.mark.parametrize("format", ["raw", "qcow2", "vmdk", "vdi", "vpc", "vhdx"])
def test_zipfile_reads_every_format(tmp_path: Path, noise: bytes, format: str) -> None:
    raw = tmp_path / "source.img"
    with zipfile.ZipFile(raw, "w") as archive:
        archive.writestr("noise", noise)
        archive.writestr("text", b"hello" * 1000, zipfile.ZIP_DEFLATED)
    with open(raw, "r+b") as file:
        file.truncate(-(-file.seek(0, os.SEEK_END) // 512) * 512)
    image = tmp_path / f"archive.{format}"
    zebu.convert(raw, image, source_format="raw", format=format)
    with zebu.open(image, format=format) as disk, zipfile.ZipFile(disk) as archive:
        assert archive.testzip() is None
        assert archive.read("noise") == noise
        assert archive.read("text") == b"hello" * 1000


def test_zipfile_writes(path: Path, noise: bytes) -> None:
    with zebu.open(path, "r+") as disk:
        with zipfile.ZipFile(disk, "w") as archive:
            archive.writestr("noise", noise)
        disk.truncate(-(-disk.tell() // 512) * 512)
        assert disk.size < 2 * MIB
    with zebu.open(path) as disk:
        assert zipfile.ZipFile(disk).read("noise") == noise


def test_fsspec_copies_from_it(path: Path, noise: bytes) -> None:
    fsspec = pytest.importorskip("fsspec")
    with zebu.open(path, "r+") as disk:
        disk.pwrite(noise, MIB)
    with zebu.open(path) as disk:
        memory = fsspec.filesystem("memory")
        with memory.open("/copy", "wb") as copy:
            copy.write(disk.read())
        assert memory.cat("/copy")[MIB : 2 * MIB] == noise
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("a", noise)
        archive.seek(0)
    with zebu.open(path, "r+") as disk:
        disk.resize(-(-len(archive.getbuffer()) // 512) * 512)
        disk.pwrite(archive.getbuffer(), 0)
        # An archive inside the image, as a file system.
        assert fsspec.filesystem("zip", fo=disk).cat("a") == noise


def test_pyarrow_reads_from_it(path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    feather = pytest.importorskip("pyarrow.feather")
    table = arrow.table({"number": list(range(1000))})
    sink = io.BytesIO()
    feather.write_feather(table, sink)
    length = len(sink.getbuffer())
    with zebu.open(path, "r+") as disk:
        disk.pwrite(sink.getbuffer(), 0)
        # It looks for its end at the end of the file.
        part = arrow.PythonFile(disk, "r")
        assert feather.read_table(arrow.BufferReader(part.read(length))).equals(table)


def test_resize_zeroes_and_discard(path: Path, noise: bytes) -> None:
    with zebu.open(path, "r+", discard=True) as disk:
        disk.pwrite(noise, 0)
        disk.write_zeroes(0, 65536)
        disk.write_zeroes(65536, 65536, unmap=True)
        assert disk.pread(131072, 0) == bytes(131072)
        disk.discard(131072, 65536)
        assert disk.pread(MIB - 196608, 196608) == noise[196608:]
        assert disk.truncate(16 * MIB) == 16 * MIB
        disk.resize(17 * MIB, preallocation="metadata")
        assert disk.info["virtual_size"] == disk.size == 17 * MIB
        with pytest.raises(zebu.RefusedError, match="preallocation"):
            disk.resize(MIB, preallocation="some")


def test_an_image_that_is_forgotten_is_closed(path: Path) -> None:
    disk = zebu.open(path, "r+")
    disk.pwrite(b"kept", 0)
    del disk
    gc.collect()
    with zebu.open(path, "r+") as disk:
        assert disk.pread(4, 0) == b"kept"


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    zebu.create(Path("nbd:with a colon"), MIB)
    assert os.listdir() == ["nbd:with a colon"]
    zebu.open(Path("nbd:with a colon")).close()
    odd = os.fsencode(tmp_path) + b"/\xff.qcow2"
    zebu.create(odd, MIB)
    with zebu.open(odd) as disk:
        assert os.fsencode(disk.info["filename"]) == odd
    options = 'json:{"driver": "qcow2", "file": {"driver": "file", "filename": "nbd:with a colon"}}'
    assert zebu.open(options).size == MIB
