"""Unlinking and removing directories, also of what is in use."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ..running import Mounted, eventually
from .kernel import fails, opened, read_all


def test_unlink(here: Path) -> None:
    (here / "a").write_bytes(b"data")
    (here / "d").mkdir()
    os.unlink(here / "a")
    with fails(errno.ENOENT):
        os.unlink(here / "a")
    with fails(errno.ENOENT):
        os.stat(here / "a")
    with fails(errno.EISDIR, errno.EPERM):
        os.unlink(here / "d")
    assert os.listdir(here) == ["d"]


@pytest.mark.parametrize("size", [100, 3_000_000])
def test_unlink_while_open(here: Path, size: int) -> None:
    """It can be read, written, cut and synced until it is closed; the name is free at once."""
    data = os.urandom(size)
    (here / "a").write_bytes(data)
    with opened(here / "a", os.O_RDWR) as fd:
        os.unlink(here / "a")
        assert os.fstat(fd).st_nlink == 0
        assert os.listdir(here) == []
        (here / "a").write_bytes(b"another")
        assert read_all(fd) == data
        os.pwrite(fd, b"more", size)
        os.fsync(fd)
        os.fchmod(fd, 0o400)
        os.utime(fd, ns=(5, 5))
        assert read_all(fd) == data + b"more"
        os.ftruncate(fd, 10)
        assert read_all(fd) == data[:10]
    assert (here / "a").read_bytes() == b"another"


def test_a_file_without_a_name_from_the_start(here: Path) -> None:
    """As tempfile makes them: created, unlinked, used."""
    with opened(here / "t", os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        os.unlink(here / "t")
        os.write(fd, b"x" * 2_000_000)
        assert read_all(fd) == b"x" * 2_000_000


def test_the_room_comes_back(shared: Mounted, here: Path) -> None:
    """Of a file that was open when it lost its name, and of one still open at the unmount."""
    with opened(here / "a", os.O_RDWR | os.O_CREAT) as fd:
        os.write(fd, os.urandom(3_000_000))
        os.fsync(fd)
        with_file = shared.stats()["stored_bytes"]
        os.unlink(here / "a")
        assert os.fstat(fd).st_size == 3_000_000

    def gone() -> bool:
        (here / "other").touch()  # so that there is something to commit
        return int(shared.stats()["stored_bytes"]) <= with_file - 2_900_000

    assert eventually(gone)


@pytest.mark.parametrize("clean", [True, False])
def test_no_nameless_file_outlives_the_mount(shared: Mounted, here: Path, clean: bool) -> None:
    before = shared.remount().stats()
    fd = os.open(here / "a", os.O_RDWR | os.O_CREAT)
    os.write(fd, os.urandom(3_000_000))
    os.fsync(fd)
    os.unlink(here / "a")
    os.fsync(fd)
    if clean:
        os.close(fd)
        shared.remount()
    else:
        shared.kill()
        with fails(errno.ENOTCONN):
            os.close(fd)
        shared.mount()
    after = shared.stats()
    assert [after[n] for n in ("entries", "logical_bytes", "stored_bytes")] == [
        before[n] for n in ("entries", "logical_bytes", "stored_bytes")
    ]


def test_rmdir(here: Path) -> None:
    (here / "d/sub").mkdir(parents=True)
    (here / "d/f").touch()
    with fails(errno.ENOTEMPTY):
        os.rmdir(here / "d")
    os.rmdir(here / "d/sub")
    with fails(errno.ENOTEMPTY):
        os.rmdir(here / "d")
    with fails(errno.ENOTDIR):
        os.rmdir(here / "d/f")
    os.unlink(here / "d/f")
    os.rmdir(here / "d")
    with fails(errno.ENOENT):
        os.rmdir(here / "d")
    with fails(errno.EINVAL):
        os.rmdir(f"{here}/.")
    assert os.stat(here).st_nlink == 2


def test_rmdir_of_a_directory_in_use(here: Path) -> None:
    """Nothing can be made in it any more; who works in it finds it empty."""
    (here / "d").mkdir()
    with opened(here / "d", os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.rmdir(here / "d")
        assert os.listdir(fd) == []
        assert os.fstat(fd).st_nlink == 0
        with fails(errno.ENOENT):
            os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
        with fails(errno.ENOENT):
            os.mkdir("sub", dir_fd=fd)
        (here / "f").touch()
        with fails(errno.ENOENT):
            os.rename(here / "f", "f", dst_dir_fd=fd)
    (here / "d").mkdir()
    assert os.listdir(here / "d") == []


def test_a_name_that_is_used_again_and_again(here: Path) -> None:
    for number in range(100):
        (here / "a").write_bytes(b"%d" % number)
        assert (here / "a").read_bytes() == b"%d" % number
        os.unlink(here / "a")
        (here / "a").mkdir()
        os.rmdir(here / "a")
    assert os.listdir(here) == []
