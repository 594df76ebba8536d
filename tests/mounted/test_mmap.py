"""Memory maps, shared and private, of files small and large."""

from __future__ import annotations

import errno
import mmap
import os
import random
from pathlib import Path

import pytest

from ..running import Mounted
from ..states import build
from .kernel import elsewhere, fails, opened, read_all

SIZES = [1, 4096, 100_001, 3_000_000]


def state(salt: int = 0) -> bytes:
    """A state of about 4 MB."""
    positions = list(range(1_000))
    return build.ggsq(build.packed(positions), build.kv(positions, width=1024, salt=salt))


@pytest.mark.parametrize("size", SIZES)
def test_shared_writing(shared: Mounted, here: Path, size: int) -> None:
    """What is written to the map is in the file for others at once, and stays."""
    data = bytearray(random.Random(size).randbytes(size))
    (here / "a").write_bytes(data)
    with opened(here / "a", os.O_RDWR) as fd, mmap.mmap(fd, size) as view:
        assert view[:] == data
        for offset in {0, size // 2, size - 1}:
            view[offset] = data[offset] = data[offset] ^ 0xFF
        with opened(here / "a", os.O_RDWR) as other:
            assert read_all(other) == data
        view.flush()
        assert (here / "a").read_bytes() == data
        assert elsewhere("print(open(sys.argv[1], 'rb').read().hex())", here / "a") == data.hex()
        os.pwrite(fd, b"w", 0)
        data[:1] = b"w"
        assert view[0] == ord("w")
    shared.remount()
    assert (here / "a").read_bytes() == data


def test_a_file_made_through_its_map(shared: Mounted, here: Path) -> None:
    size = 6_000_000
    with opened(here / "a", os.O_RDWR | os.O_CREAT) as fd:
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as view:
            data = random.Random(1).randbytes(size)
            view[:] = data
            os.close(os.dup(fd))  # a close on the way: flush
            view[5:8] = b"abc"
        os.fsync(fd)
    shared.remount()
    assert (here / "a").read_bytes() == data[:5] + b"abc" + data[8:]


def test_the_map_outlives_its_descriptor_and_its_name(here: Path) -> None:
    data = random.Random(2).randbytes(200_000)
    (here / "a").write_bytes(data)
    with opened(here / "a", os.O_RDWR) as fd:
        view = mmap.mmap(fd, len(data))
    view[:4] = b"head"
    view.flush()
    assert (here / "a").read_bytes() == b"head" + data[4:]
    os.unlink(here / "a")
    assert view[-100:] == data[-100:]
    view[-4:] = b"tail"
    view.flush()
    assert view[:] == b"head" + data[4:-4] + b"tail"
    view.close()


@pytest.mark.parametrize("size", SIZES)
def test_private_maps(here: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    (here / "a").write_bytes(data)
    with (
        opened(here / "a", os.O_RDONLY) as fd,
        mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as view,
    ):
        assert view[:] == data
        view[0] = data[0] ^ 1
        assert os.pread(fd, 1, 0) == data[:1]
    assert (here / "a").read_bytes() == data


@pytest.mark.parametrize("size", SIZES)
def test_reading_a_shared_map(here: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    (here / "a").write_bytes(data)
    with opened(here / "a", os.O_RDONLY) as fd, mmap.mmap(fd, size, access=mmap.ACCESS_READ) as view:
        assert view[:] == data
        with opened(here / "a", os.O_WRONLY) as writer:
            os.pwrite(writer, b"\xaa", size // 2)
        assert view[size // 2] == 0xAA
    with opened(here / "a", os.O_RDONLY) as fd, fails(errno.EACCES):
        mmap.mmap(fd, size)


def test_maps_of_large_states(here: Path) -> None:
    """They are read past the page cache: a private map, or one of a file opened read-write, is what works."""
    data = state()
    (here / "a").write_bytes(data)
    with opened(here / "a", os.O_RDONLY) as fd:
        with mmap.mmap(fd, len(data), mmap.MAP_PRIVATE, mmap.PROT_READ) as view:
            assert view[:] == data
        with fails(errno.ENODEV):
            mmap.mmap(fd, len(data), mmap.MAP_SHARED, mmap.PROT_READ)
        assert read_all(fd) == data
    with opened(here / "a", os.O_RDWR) as fd:
        with mmap.mmap(fd, len(data), mmap.MAP_SHARED, mmap.PROT_READ) as view:
            assert view[:] == data
        with mmap.mmap(fd, len(data)) as view:
            view[1_000_000] ^= 0xFF
    assert (here / "a").read_bytes() == data[:1_000_000] + bytes([data[1_000_000] ^ 0xFF]) + data[1_000_001:]


def test_beyond_the_end_of_the_file(here: Path) -> None:
    (here / "a").write_bytes(b"x" * 100)
    with opened(here / "a", os.O_RDWR) as fd, mmap.mmap(fd, 100) as view:
        assert view[:] == b"x" * 100
        os.ftruncate(fd, 4)
        os.ftruncate(fd, 100)
        assert view[:] == b"xxxx" + bytes(96)
