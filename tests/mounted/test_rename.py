"""Renames: over what is there, between directories, exchanged, and refused."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

from ..running import Mounted
from .kernel import fails, opened, read_all

NOREPLACE, EXCHANGE, WHITEOUT = 1, 2, 4
_libc = ctypes.CDLL(None, use_errno=True)


def rename2(old: Path, new: Path, flags: int) -> None:
    """renameat2(2)."""
    if _libc.renameat2(-100, os.fsencode(old), -100, os.fsencode(new), flags):
        raise OSError(ctypes.get_errno(), "renameat2")


def inode(path: Path) -> int:
    return os.stat(path).st_ino


def test_to_a_new_name(here: Path) -> None:
    (here / "a").write_bytes(b"data")
    was = inode(here / "a")
    os.rename(here / "a", here / "b")
    assert os.listdir(here) == ["b"]
    assert inode(here / "b") == was
    assert (here / "b").read_bytes() == b"data"
    with fails(errno.ENOENT):
        os.rename(here / "a", here / "c")


def test_over_a_file(here: Path) -> None:
    (here / "a").write_bytes(b"new")
    (here / "b").write_bytes(b"old" * 100_000)
    os.rename(here / "a", here / "b")
    assert os.listdir(here) == ["b"]
    assert (here / "b").read_bytes() == b"new"
    os.rename(here / "b", here / "b")
    assert (here / "b").read_bytes() == b"new"


def test_over_a_file_that_is_open(here: Path) -> None:
    """It has no name any more, and is there until it is closed."""
    old = os.urandom(300_000)
    (here / "b").write_bytes(old)
    (here / "a").write_bytes(b"new")
    with opened(here / "b", os.O_RDONLY) as reader, opened(here / "b", os.O_RDWR) as writer:
        os.rename(here / "a", here / "b")
        assert os.fstat(reader).st_nlink == 0
        assert read_all(reader) == old
        os.pwrite(writer, b"still written to", 0)
        assert os.pread(reader, 5, 0) == b"still"
        os.fsync(writer)
        assert os.fstat(writer).st_size == len(old)
        assert (here / "b").read_bytes() == b"new"
    assert (here / "b").read_bytes() == b"new"


def test_while_it_is_written(here: Path) -> None:
    """The name moves, the descriptor stays with the file."""
    with opened(here / "a.tmp", os.O_WRONLY | os.O_CREAT) as fd:
        os.write(fd, b"1" * 2_000_000)
        os.rename(here / "a.tmp", here / "a")
        os.write(fd, b"2" * 2_000_000)
        assert os.stat(here / "a").st_size == 4_000_000
        assert os.fstat(fd).st_nlink == 1
    assert (here / "a").read_bytes() == b"1" * 2_000_000 + b"2" * 2_000_000


def test_between_directories(here: Path) -> None:
    for name in ("x", "y"):
        (here / name).mkdir()
    (here / "x/f").write_bytes(b"data")
    (here / "x/sub").mkdir()
    (here / "x/sub/deep").write_bytes(b"deep")
    os.rename(here / "x/f", here / "y/g")
    os.rename(here / "x/sub", here / "y/sub")
    assert os.listdir(here / "x") == []
    assert sorted(os.listdir(here / "y")) == ["g", "sub"]
    assert (here / "y/sub/deep").read_bytes() == b"deep"
    assert (os.stat(here / "x").st_nlink, os.stat(here / "y").st_nlink) == (2, 3)
    assert inode(here / "y/sub/..") == inode(here / "y")
    with opened(here / "y/sub", os.O_RDONLY | os.O_DIRECTORY) as fd:
        assert os.stat("../g", dir_fd=fd).st_size == 4


def test_directories_over_directories(here: Path) -> None:
    for name in ("from", "empty", "full"):
        (here / name).mkdir()
    (here / "from/f").write_bytes(b"data")
    (here / "full/f").touch()
    (here / "file").touch()
    with fails(errno.ENOTEMPTY, errno.EEXIST):
        os.rename(here / "from", here / "full")
    with fails(errno.ENOTDIR):
        os.rename(here / "from", here / "file")
    with fails(errno.EISDIR):
        os.rename(here / "file", here / "empty")
    os.rename(here / "from", here / "empty")
    assert (here / "empty/f").read_bytes() == b"data"
    assert sorted(os.listdir(here)) == ["empty", "file", "full"]
    assert os.stat(here).st_nlink == 4


def test_directories_not_into_themselves(here: Path) -> None:
    (here / "a/b/c").mkdir(parents=True)
    with fails(errno.EINVAL):
        os.rename(here / "a", here / "a/b/d")
    with fails(errno.ENOTEMPTY, errno.EEXIST):
        os.rename(here / "a/b", here / "a")
    assert (here / "a/b/c").is_dir()


def test_not_over_what_is_there(here: Path) -> None:
    (here / "a").write_bytes(b"a")
    (here / "b").write_bytes(b"b")
    with fails(errno.EEXIST):
        rename2(here / "a", here / "b", NOREPLACE)
    rename2(here / "a", here / "c", NOREPLACE)
    assert (here / "b").read_bytes() + (here / "c").read_bytes() == b"ba"
    with fails(errno.EEXIST):
        rename2(here / "c", here / "c", NOREPLACE)


def test_exchange(here: Path) -> None:
    (here / "file").write_bytes(b"file")
    (here / "other").write_bytes(b"other" * 50_000)
    (here / "dir/sub").mkdir(parents=True)
    rename2(here / "file", here / "other", EXCHANGE)
    assert (here / "other").read_bytes() == b"file"
    assert (here / "file").read_bytes() == b"other" * 50_000
    rename2(here / "file", here / "dir/sub", EXCHANGE)
    assert (here / "file").is_dir()
    assert (here / "dir/sub").read_bytes() == b"other" * 50_000
    assert (os.stat(here).st_nlink, os.stat(here / "dir").st_nlink) == (4, 2)
    assert inode(here / "file/..") == inode(here)
    with fails(errno.ENOENT):
        rename2(here / "other", here / "nothing", EXCHANGE)
    with fails(errno.EINVAL):
        rename2(here / "dir", here / "dir/sub", EXCHANGE)
    with fails(errno.EINVAL):
        rename2(here / "file", here / "other", EXCHANGE | NOREPLACE)
    with fails(errno.EINVAL):
        rename2(here / "other", here / "nothing", WHITEOUT)


def test_exchange_while_both_are_open(here: Path) -> None:
    one, two = os.urandom(100_000), os.urandom(200_000)
    (here / "a").write_bytes(one)
    (here / "b").write_bytes(two)
    with opened(here / "a", os.O_RDWR) as a, opened(here / "b", os.O_RDWR) as b:
        rename2(here / "a", here / "b", EXCHANGE)
        os.pwrite(a, b"A", 0)
        os.pwrite(b, b"B", 0)
        assert read_all(a) == b"A" + one[1:]
        assert read_all(b) == b"B" + two[1:]
    assert (here / "b").read_bytes() == b"A" + one[1:]
    assert (here / "a").read_bytes() == b"B" + two[1:]


def test_the_times_of_a_rename(here: Path) -> None:
    """Both directories have changed, the file's content has not."""
    for name in ("x", "y"):
        (here / name).mkdir()
        os.utime(here / name, ns=(1, 1))
    (here / "x/f").write_bytes(b"data")
    os.utime(here / "x/f", ns=(2, 3))
    os.utime(here / "x", ns=(1, 1))
    before = os.stat(here / "x/f")
    os.rename(here / "x/f", here / "y/f")
    after = os.stat(here / "y/f")
    assert (after.st_mtime_ns, after.st_atime_ns) == (3, 2)
    assert after.st_ctime_ns >= before.st_ctime_ns
    for name in ("x", "y"):
        assert os.stat(here / name).st_mtime_ns > 1


@pytest.mark.parametrize("clean", [True, False])
def test_renames_stay(shared: Mounted, here: Path, clean: bool) -> None:
    """Over a remount, or a kill once the directory was synced."""
    (here / "a").write_bytes(b"a" * 1_000_000)
    (here / "b").write_bytes(b"b")
    (here / "d").mkdir()
    os.rename(here / "a", here / "b")
    os.rename(here / "b", here / "d/c")
    if clean:
        shared.remount()
    else:
        with opened(here, os.O_RDONLY | os.O_DIRECTORY) as fd:
            os.fsync(fd)
        shared.kill()
        shared.mount()
    assert os.listdir(here) == ["d"]
    assert (here / "d/c").read_bytes() == b"a" * 1_000_000
