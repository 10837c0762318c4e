"""Images for the tests."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import zebu

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A new qcow2 image of 8 MiB."""
    path = tmp_path / "disk.qcow2"
    zebu.create(path, 8 * MIB)
    return path


@pytest.fixture(scope="session")
def noise() -> bytes:
    """A mebibyte that does not compress."""
    return random.Random(7).randbytes(MIB)
