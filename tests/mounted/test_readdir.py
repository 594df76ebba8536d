"""Listing directories while they change."""

from __future__ import annotations

import ctypes
import os
import random
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ..running import Mounted

_libc = ctypes.CDLL(None, use_errno=True)
_libc.opendir.restype = ctypes.c_void_p
_libc.readdir.restype = ctypes.c_void_p
_libc.telldir.restype = ctypes.c_long


class _Dirent(ctypes.Structure):
    _fields_ = [
        ("ino", ctypes.c_uint64),
        ("off", ctypes.c_int64),
        ("reclen", ctypes.c_uint16),
        ("type", ctypes.c_uint8),
        ("name", ctypes.c_char * 256),
    ]


class Directory:
    """opendir(3) and what goes with it."""

    def __init__(self, path: Path) -> None:
        self._at = ctypes.c_void_p(_libc.opendir(os.fsencode(path)))
        assert self._at.value

    def close(self) -> None:
        _libc.closedir(self._at)

    def next(self) -> tuple[str, int, int] | None:
        """(name, type, inode number), or None at the end."""
        found = _libc.readdir(self._at)
        if not found:
            return None
        entry = ctypes.cast(found, ctypes.POINTER(_Dirent)).contents
        return os.fsdecode(entry.name), entry.type << 12, entry.ino

    def names(self, most: int = 1 << 30) -> list[str]:
        """The next names, those of the directory itself and its parent left out."""
        out: list[str] = []
        while len(out) < most and (entry := self.next()) is not None:
            if entry[0] not in (".", ".."):
                out.append(entry[0])
        return out

    def tell(self) -> int:
        return int(_libc.telldir(self._at))

    def seek(self, place: int) -> None:
        _libc.seekdir(self._at, ctypes.c_long(place))

    def rewind(self) -> None:
        _libc.rewinddir(self._at)


@contextmanager
def listing(path: Path) -> Iterator[Directory]:
    directory = Directory(path)
    try:
        yield directory
    finally:
        directory.close()


@pytest.fixture(scope="module")
def crowd(shared: Mounted) -> Path:
    """A directory of 10,000 entries. Tests put back what they take."""
    path = shared.path / "crowd"
    path.mkdir()
    for number in range(9_900):
        os.mknod(path / f"file-{number:05d}")
    for number in range(100):
        (path / f"dir-{number:03d}").mkdir()
    return path


def test_types_numbers_and_dots(here: Path) -> None:
    (here / "file").touch()
    (here / "dir").mkdir()
    (here / "dir/below").touch()
    with listing(here) as directory:
        found = {}
        while (entry := directory.next()) is not None:
            assert entry[0] not in found
            found[entry[0]] = entry[1:]
    assert found == {
        name: (stat.S_IFMT(os.stat(here / name).st_mode), os.stat(here / name).st_ino)
        for name in (".", "..", "file", "dir")
    }
    assert found["file"][0] == stat.S_IFREG
    with listing(here / "dir") as directory:
        dots = dict(iter(lambda: (directory.next() or (None,))[0::2], (None,)))
    assert dots[".."] == os.stat(here).st_ino


def test_ten_thousand_entries(crowd: Path) -> None:
    names = os.listdir(crowd)
    assert len(names) == len(set(names)) == 10_000
    with os.scandir(crowd) as entries:
        kinds = Counter(entry.is_dir(follow_symlinks=False) for entry in entries)
    assert kinds == {True: 100, False: 9_900}


def test_going_back_to_a_place(crowd: Path) -> None:
    """telldir and seekdir, from every part of a long listing, also with another descriptor."""
    with listing(crowd) as directory:
        places, names = [], []
        while (entry := directory.next()) is not None:
            names.append(entry[0])
            places.append(directory.tell())
        for number in random.Random(1).sample(range(len(names) - 1), 50):
            directory.seek(places[number])
            assert directory.next()[0] == names[number + 1]  # type: ignore[index]
        with listing(crowd) as other:
            other.next()
            other.seek(places[5_000])
            assert other.next()[0] == names[5_001]  # type: ignore[index]
        directory.rewind()
        assert [directory.next()[0] for _ in range(20)] == names[:20]  # type: ignore[index]


def test_rewinding_shows_what_is_new(here: Path) -> None:
    (here / "a").touch()
    with listing(here) as directory:
        assert directory.names() == ["a"]
        (here / "b").touch()
        directory.rewind()
        assert directory.names() == ["a", "b"]


def test_removing_what_is_listed(here: Path) -> None:
    """As rm -r does it: no name is skipped because others go."""
    for number in range(1_500):
        os.mknod(here / str(number))
    seen = []
    with listing(here) as directory:
        while names := directory.names(100):
            seen += names
            for name in names:
                os.unlink(here / name)
    assert sorted(seen, key=int) == [str(number) for number in range(1_500)]
    assert os.listdir(here) == []


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_changes_meanwhile(here: Path, seed: int) -> None:
    """What stays through the whole listing shows exactly once; nothing shows twice under one name."""
    chance = random.Random(seed)
    staying = [f"stay-{number}" for number in range(400)]
    others = [f"other-{number}" for number in range(400)]
    for name in chance.sample(staying + others, 800):
        os.mknod(here / name)
    made = 0
    seen: list[str] = []
    with listing(here) as directory:
        while names := directory.names(chance.randrange(1, 30)):
            seen += names
            for _ in range(10):
                made += 1
                match chance.randrange(4):
                    case 0 if others:
                        os.unlink(here / others.pop(chance.randrange(len(others))))
                    case 1 if len(seen) < 700:
                        os.mknod(here / f"new-{made}")
                    case 2 if others:  # to a new name
                        os.rename(here / others.pop(chance.randrange(len(others))), here / f"moved-{made}")
                    case 3:  # as saves are put in place: the name stays
                        os.mknod(here / f"tmp-{made}")
                        os.rename(here / f"tmp-{made}", here / chance.choice(staying))
                    case _:
                        pass
    counted = Counter(seen)
    assert {name: number for name, number in counted.items() if number > 1} == {}
    assert {name for name in staying if not counted[name]} == set()


def test_a_file_that_is_renamed_meanwhile_is_not_missed(here: Path) -> None:
    """Within its directory it shows once, under its old or its new name."""
    for number in range(500):
        os.mknod(here / f"old-{number}")
    seen: list[str] = []
    with listing(here) as directory:
        seen += directory.names(200)
        for number in range(500):
            os.rename(here / f"old-{number}", here / f"new-{number}")
        seen += directory.names()
    assert sorted(int(name.split("-")[1]) for name in seen) == list(range(500))


def test_cookies_stay_over_a_remount(shared: Mounted, here: Path) -> None:
    for number in range(300):
        os.mknod(here / str(number))
    with listing(here) as directory:
        first = directory.names(100)
        place = directory.tell()
        rest = directory.names()
    shared.remount()
    with listing(here) as directory:
        directory.next()
        directory.seek(place)
        assert directory.names() == rest
    assert len({*first, *rest}) == 300
