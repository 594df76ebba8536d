"""Extended attributes: any of the user's, and the one that pins."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from ..running import Mounted, run_cachefs
from .kernel import fails, opened, sync_directory

PIN = "user.cachefs.pin"


@pytest.fixture(params=["file", "dir"])
def path(here: Path, request: pytest.FixtureRequest) -> Path:
    made = here / request.param
    made.mkdir() if request.param == "dir" else made.touch()
    return made


def test_set_list_and_remove(shared: Mounted, path: Path) -> None:
    assert os.listxattr(path) == []
    os.setxattr(path, "user.a", b"1")
    os.setxattr(path, "user.b", b"")
    os.setxattr(path, "user.a", b"\0two\xff")
    shared.remount()
    assert sorted(os.listxattr(path)) == ["user.a", "user.b"]
    assert os.getxattr(path, "user.a") == b"\0two\xff"
    assert os.getxattr(path, "user.b") == b""
    os.removexattr(path, "user.a")
    with fails(errno.ENODATA):
        os.getxattr(path, "user.a")
    with fails(errno.ENODATA):
        os.removexattr(path, "user.a")
    assert os.listxattr(path) == ["user.b"]


def test_create_and_replace(path: Path) -> None:
    with fails(errno.ENODATA):
        os.setxattr(path, "user.a", b"1", os.XATTR_REPLACE)
    os.setxattr(path, "user.a", b"1", os.XATTR_CREATE)
    with fails(errno.EEXIST):
        os.setxattr(path, "user.a", b"2", os.XATTR_CREATE)
    os.setxattr(path, "user.a", b"3", os.XATTR_REPLACE)
    assert os.getxattr(path, "user.a") == b"3"


def test_sizes(path: Path) -> None:
    for size in (1, 4_000, 65_536):
        os.setxattr(path, "user.big", b"x" * size)
        assert os.getxattr(path, "user.big") == b"x" * size
    with fails(errno.E2BIG):
        os.setxattr(path, "user.big", b"x" * 65_537)
    longest = "user." + "n" * 250
    os.setxattr(path, longest, b"1")
    assert longest in os.listxattr(path)
    with fails(errno.ERANGE):
        os.setxattr(path, longest + "n", b"1")
    assert len(os.getxattr(path, "user.big")) == 65_536


def test_many(path: Path) -> None:
    names = sorted(f"user.attribute-{number:03d}" for number in range(300))
    for name in names:
        os.setxattr(path, name, name.encode())
    assert sorted(os.listxattr(path)) == names
    assert all(os.getxattr(path, name) == name.encode() for name in names)


def test_only_the_users(path: Path) -> None:
    for name in ("trusted.a", "security.a", "system.a", "other.a"):
        with fails(errno.EOPNOTSUPP, errno.EPERM, errno.EACCES):
            os.setxattr(path, name, b"1")
        with fails(errno.EOPNOTSUPP, errno.ENODATA, errno.EPERM):
            os.getxattr(path, name)
    assert os.listxattr(path) == []


def test_through_descriptors_and_renames(here: Path) -> None:
    with opened(here / "a", os.O_RDWR | os.O_CREAT) as fd:
        os.setxattr(fd, "user.a", b"1")
        os.write(fd, b"x" * 1_000_000)
        os.rename(here / "a", here / "b")
        assert os.getxattr(here / "b", "user.a") == b"1"
        (here / "c").touch()
        os.setxattr(here / "c", "user.c", b"1")
        os.rename(here / "c", here / "b")
        assert os.getxattr(fd, "user.a") == b"1"
        assert os.listxattr(here / "b") == ["user.c"]
        os.unlink(here / "b")
    (here / "b").touch()
    assert os.listxattr(here / "b") == []


def test_the_pin(here: Path) -> None:
    def pinned() -> set[str]:
        sync_directory(here)  # `ls` shows what is committed
        done = run_cachefs("ls", "--json", here)
        assert done.returncode == 0, done.stderr
        return {
            os.path.basename(each["name"]) for each in json.loads(done.stdout)["entries"] if each["pinned"]
        }

    for name in ("a", "b"):
        (here / name).write_bytes(b"data")
        os.setxattr(here / name, PIN, b"1")
    os.removexattr(here / "b", PIN)
    assert pinned() == {"a"}
    os.rename(here / "a", here / "b")  # the pin belongs to the file, not to its name
    assert pinned() == {"b"}
    os.unlink(here / "b")
    assert pinned() == set()
