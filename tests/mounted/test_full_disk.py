"""The disk under the store is smaller than the bound, or others fill it."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..crash.disk import Disk, make_disk
from ..running import Mounted, eventually
from .kernel import can_put, fails, opened, put

PIN = "user.cachefs.pin"
MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = make_disk(tmp_path, "ext4", 128 * MIB)
    yield made
    made.down()


@pytest.fixture
def m(disk: Disk, tmp_path: Path) -> Iterator[Mounted]:
    mounted = Mounted(disk.path / "store", tmp_path / "mnt")
    mounted.path.mkdir()
    mounted.mount("--max-size", "1G")
    yield mounted
    wrong = mounted.clean_up()
    assert not wrong, wrong


def content(number: int) -> bytes:
    return random.Random(number).randbytes(8 * MIB)


def test_what_can_go_goes(m: Mounted) -> None:
    """A disk that is full is a bound like any other."""
    for number in range(20):
        put(m.path / f"{number:02d}", content(number))
    left = sorted(os.listdir(m.path))
    assert left == [f"{number:02d}" for number in range(20 - len(left), 20)]
    assert len(left) >= 5
    m.remount()
    assert all((m.path / name).read_bytes() == content(int(name)) for name in left)


def test_nothing_that_is_kept_is_lost(m: Mounted) -> None:
    """Promise P9. With all files pinned the disk's end is an error of write(); removing makes room."""
    m.expect_errors()
    kept: list[int] = []
    with fails(errno.ENOSPC):
        for number in range(20):
            put(m.path / f"{number:02d}", content(number))
            os.setxattr(m.path / f"{number:02d}", PIN, b"1")
            kept.append(number)
    assert len(kept) >= 5
    os.unlink(m.path / f"{len(kept):02d}")
    assert all((m.path / f"{number:02d}").read_bytes() == content(number) for number in kept)
    for number in kept[:3]:
        os.unlink(m.path / f"{number:02d}")
    assert eventually(lambda: can_put(m.path / "again", content(99)))
    m.remount()
    assert (m.path / "again").read_bytes() == content(99)
    assert all((m.path / f"{number:02d}").read_bytes() == content(number) for number in kept[3:])


def test_others_fill_the_disk(m: Mounted, disk: Disk) -> None:
    """Down to its last byte: the mount lives, reads go on, and so does all once there is room."""
    m.expect_errors()
    for number in range(3):
        put(m.path / f"{number:02d}", content(number))
        os.setxattr(m.path / f"{number:02d}", PIN, b"1")
    with opened(disk.path / "ballast", os.O_WRONLY | os.O_CREAT) as fd, fails(errno.ENOSPC):
        while True:
            os.write(fd, bytes(64 << 10))
    with fails(errno.ENOSPC, errno.EIO):
        put(m.path / "new", content(9))
    assert m.alive
    assert all((m.path / f"{number:02d}").read_bytes() == content(number) for number in range(3))
    os.unlink(disk.path / "ballast")
    assert eventually(lambda: can_put(m.path / "new", content(9)))
    m.remount()
    for number, name in enumerate(["00", "01", "02"]):
        assert (m.path / name).read_bytes() == content(number)
    assert (m.path / "new").read_bytes() == content(9)
