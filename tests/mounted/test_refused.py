"""What a cache directory has no use for is refused clearly; names of every kind are taken."""

from __future__ import annotations

import errno
import os
import random
import shutil
import socket
import stat
from pathlib import Path

import pytest

from ..running import Mounted
from .kernel import fails, opened


def test_links(here: Path) -> None:
    (here / "a").write_bytes(b"data")
    with pytest.raises(PermissionError):
        os.symlink("a", here / "s")
    with pytest.raises(PermissionError):
        os.link(here / "a", here / "h")
    with fails(errno.EINVAL):
        os.readlink(here / "a")
    assert os.listdir(here) == ["a"]
    assert os.stat(here / "a").st_nlink == 1


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK])
def test_nodes(here: Path, kind: int) -> None:
    with pytest.raises(PermissionError):
        os.mknod(here / "n", kind | 0o600, os.makedev(1, 3))
    assert os.listdir(here) == []


def test_sockets(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as server, fails(errno.EPERM, errno.EADDRINUSE):
        server.bind("s")
    assert os.listdir(here) == []


def test_programs_that_copy_trees_see_what_failed(here: Path, tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/file").write_bytes(b"data")
    os.symlink("file", tmp_path / "tree/link")
    with pytest.raises(shutil.Error, match="Operation not permitted"):
        shutil.copytree(tmp_path / "tree", here / "tree", symlinks=True)
    assert (here / "tree/file").read_bytes() == b"data"
    shutil.copytree(tmp_path / "tree", here / "followed")
    assert (here / "followed/link").read_bytes() == b"data"


def test_long_names(here: Path) -> None:
    longest = "n" * 255
    (here / longest).write_bytes(b"data")
    os.rename(here / longest, here / ("m" * 255))
    (here / longest).mkdir()
    (here / longest / longest).touch()
    assert os.listdir(here / longest) == [longest]
    too_long = "n" * 256
    for call in (
        lambda: (here / too_long).touch(),
        lambda: (here / too_long).mkdir(),
        lambda: os.mknod(here / too_long),
        lambda: os.stat(here / too_long),
        lambda: os.unlink(here / too_long),
        lambda: os.rename(here / ("m" * 255), here / too_long),
    ):
        with fails(errno.ENAMETOOLONG):
            call()
    two_bytes_each = "é" * 127
    (here / two_bytes_each).touch()
    with fails(errno.ENAMETOOLONG):
        (here / (two_bytes_each + "é")).touch()


def test_long_paths(here: Path) -> None:
    """A path may be too long for one call; the tree may be that deep all the same."""
    fd = os.open(here, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(40):
        os.mkdir("d" * 200, dir_fd=fd)
        below = os.open("d" * 200, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
    with open("file", "wb", opener=lambda name, flags: os.open(name, flags, 0o600, dir_fd=fd)) as file:
        file.write(b"deep")
    assert os.stat("file", dir_fd=fd).st_size == 4
    os.close(fd)
    with fails(errno.ENAMETOOLONG):
        os.stat(here / "/".join(["d" * 200] * 40))
    shutil.rmtree(here)


def test_bytes_of_all_kinds_in_names(shared: Mounted, here: Path) -> None:
    base = os.fsencode(here)
    chance = random.Random(1)
    names = [bytes([byte]) for byte in range(1, 256) if byte not in b"/."]
    names += [
        b"...",
        b" ",
        b"a b",
        b"-rf",
        b"new\nline",
        b"\xff\xfe",
        b"caf\xc3\xa9",
        b"cafe\xcc\x81",
        b"A",
        b"a",
    ]
    names += [
        bytes(chance.choices([*range(1, 47), *range(48, 256)], k=chance.randrange(2, 255))) for _ in range(50)
    ]
    names = list(dict.fromkeys(names))
    for name in names:
        with opened(Path(os.fsdecode(base + b"/" + name)), os.O_CREAT | os.O_EXCL | os.O_WRONLY) as fd:
            os.write(fd, name)
    shared.remount()
    assert sorted(os.listdir(base)) == sorted(names)
    for name in names:
        with open(base + b"/" + name, "rb") as file:
            assert file.read() == name


def test_names_that_are_each_others_beginnings(here: Path) -> None:
    names = ["a" * length for length in range(1, 60)]
    for name in names:
        (here / name).write_text(name)
    for name in names[::2]:
        os.unlink(here / name)
    assert sorted(os.listdir(here)) == names[1::2]
    assert all((here / name).read_text() == name for name in names[1::2])
