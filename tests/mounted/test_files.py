"""Opening, writing, seeking and cutting files, as any filesystem does it."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
from pathlib import Path

import pytest

from ..running import Mounted
from .kernel import fails, opened, read_all

NEW = os.O_CREAT | os.O_EXCL


def test_exclusive_creation(here: Path) -> None:
    with opened(here / "a", os.O_WRONLY | NEW) as fd:
        os.write(fd, b"first")
    with fails(errno.EEXIST):
        os.open(here / "a", os.O_WRONLY | NEW)
    (here / "d").mkdir()
    with fails(errno.EEXIST):
        os.open(here / "d", os.O_WRONLY | NEW)
    assert (here / "a").read_bytes() == b"first"


def test_exclusive_creation_has_one_winner(here: Path) -> None:
    winners: list[int] = []
    barrier = threading.Barrier(8)

    def race(number: int) -> None:
        barrier.wait()
        for round_ in range(20):
            try:
                os.close(os.open(here / str(round_), os.O_WRONLY | NEW))
            except FileExistsError:
                continue
            winners.append(round_)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(winners) == list(range(20))


def test_what_cannot_be_opened(here: Path) -> None:
    (here / "file").write_bytes(b"")
    (here / "dir").mkdir()
    with fails(errno.ENOENT):
        os.open(here / "nothing", os.O_RDONLY)
    with fails(errno.ENOTDIR):
        os.open(here / "file/below", os.O_RDONLY)
    with fails(errno.ENOTDIR):
        os.open(here / "file", os.O_RDONLY | os.O_DIRECTORY)
    with fails(errno.EISDIR):
        os.open(here / "dir", os.O_RDWR)
    with opened(here / "file", os.O_RDONLY) as fd, fails(errno.EBADF):
        os.write(fd, b"x")
    with opened(here / "file", os.O_WRONLY) as fd, fails(errno.EBADF):
        os.read(fd, 1)


@pytest.mark.parametrize("size", [5, 100_000, 3_000_000])
@pytest.mark.parametrize("access", [os.O_WRONLY, os.O_RDWR])
def test_truncating_open(here: Path, access: int, size: int) -> None:
    (here / "a").write_bytes(random.Random(1).randbytes(size))
    with opened(here / "a", access | os.O_TRUNC) as fd:
        assert os.fstat(fd).st_size == 0
        os.write(fd, b"new")
        assert os.stat(here / "a").st_size == 3
    assert (here / "a").read_bytes() == b"new"


def test_appends_go_to_the_end(here: Path) -> None:
    """Of the file as it is at that moment, whoever made it longer."""
    with (
        opened(here / "a", os.O_WRONLY | os.O_CREAT | os.O_APPEND) as one,
        opened(here / "a", os.O_RDWR | os.O_APPEND) as other,
    ):
        expected = b""
        for number in range(200):
            line = b"%d\n" % number * (number % 7 * 100 + 1)
            os.lseek(one, 0, os.SEEK_SET)
            os.write(one if number % 2 else other, line)
            expected += line
        assert os.pread(other, len(expected) + 1, 0) == expected
    assert (here / "a").read_bytes() == expected


def test_appends_at_once_do_not_mix(here: Path) -> None:
    def append(letter: bytes) -> None:
        with opened(here / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND) as fd:
            for _ in range(50):
                os.write(fd, letter * 5_000 + b"\n")

    threads = [threading.Thread(target=append, args=(bytes([65 + n]),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = (here / "log").read_bytes().splitlines()
    assert sorted(lines) == sorted(bytes([65 + n]) * 5_000 for n in range(4) for _ in range(50))


@pytest.mark.parametrize("access", [os.O_WRONLY, os.O_RDWR])
def test_seeking_back_to_write_a_header(here: Path, access: int) -> None:
    body = random.Random(2).randbytes(5_000_000)
    with opened(here / "a", access | os.O_CREAT) as fd:
        os.write(fd, b"?" * 48)
        for start in range(0, len(body), 1 << 20):
            os.write(fd, body[start : start + (1 << 20)])
        os.lseek(fd, 0, os.SEEK_SET)
        os.write(fd, b"H" * 48)
        os.lseek(fd, 0, os.SEEK_END)
        os.write(fd, b"tail")
    assert (here / "a").read_bytes() == b"H" * 48 + body + b"tail"


def test_sparse_files(here: Path, shared: Mounted) -> None:
    """Holes read as zeros and take no room."""
    with opened(here / "a", os.O_RDWR | os.O_CREAT) as fd:
        os.pwrite(fd, b"end", 60 << 30)
        os.pwrite(fd, b"middle", 1 << 30)
        assert os.fstat(fd).st_size == (60 << 30) + 3
        assert os.pread(fd, 10, (1 << 30) - 2) == b"\0\0middle\0\0"
    with opened(here / "a", os.O_RDONLY) as fd:
        assert os.pread(fd, 1 << 20, 0) == bytes(1 << 20)
        assert os.pread(fd, 10, (1 << 30) - 2) == b"\0\0middle\0\0"
        assert os.pread(fd, 100, (60 << 30) - 2) == b"\0\0end"
        assert os.pread(fd, 100, 61 << 30) == b""
    (here / "b").touch()
    os.truncate(here / "b", 1 << 40)
    assert os.stat(here / "b").st_size == 1 << 40
    assert sum(f.stat().st_blocks * 512 for f in shared.store.rglob("*.mdb")) < 64 << 20
    (here / "a").unlink()
    (here / "b").unlink()


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("size", [10, 70_000, 2_500_000])
def test_truncating_down_and_up(here: Path, by_name: bool, size: int) -> None:
    data = random.Random(size).randbytes(size)
    path = here / "a"
    path.write_bytes(data)
    with opened(path, os.O_RDWR) as fd:
        for length in (size - 1, size // 2, size // 2 + 5, size * 2, 3, 3, 0, 4096):
            data = data[:length].ljust(length, b"\0")
            if by_name:
                os.truncate(path, length)
            else:
                os.ftruncate(fd, length)
            assert os.fstat(fd).st_size == length
            assert read_all(fd) == data
    assert path.read_bytes() == data


def test_cutting_what_is_still_being_written(here: Path) -> None:
    data = random.Random(3).randbytes(3_000_000)
    with opened(here / "a", os.O_WRONLY | os.O_CREAT) as fd:
        os.write(fd, data)
        os.ftruncate(fd, 1_000_001)
        os.write(fd, b"after the gap")  # the descriptor's place has not moved
    assert (here / "a").read_bytes() == data[:1_000_001] + bytes(1_999_999) + b"after the gap"


def test_writing_beyond_the_end(here: Path) -> None:
    with opened(here / "a", os.O_WRONLY | os.O_CREAT) as fd:
        os.write(fd, b"start")
        os.pwrite(fd, b"far", 1_000_000)
        os.pwrite(fd, b"near", 10)
    data = (here / "a").read_bytes()
    assert data == b"start".ljust(10, b"\0") + b"near" + bytes(1_000_000 - 14) + b"far"


def test_random_writes_are_read_back(here: Path) -> None:
    """Against the same calls on bytes in memory."""
    chance = random.Random(4)
    model = bytearray()
    with opened(here / "a", os.O_RDWR | os.O_CREAT) as fd:
        for _ in range(400):
            offset, length = chance.randrange(300_000), chance.randrange(1, 40_000)
            match chance.randrange(5):
                case 0:
                    os.ftruncate(fd, offset)
                    model = model[:offset].ljust(offset, b"\0")
                case 1:
                    assert os.pread(fd, length, offset) == model[offset : offset + length]
                case 2:
                    os.fsync(fd)
                case _:
                    data = chance.randbytes(length)
                    os.pwrite(fd, data, offset)
                    model = model.ljust(offset, b"\0")
                    model[offset : offset + length] = data
        assert os.fstat(fd).st_size == len(model)
    assert (here / "a").read_bytes() == model


def test_too_large(here: Path) -> None:
    """128 TiB is the end of a file; a process's own limit holds too."""
    end = 1 << 47
    with opened(here / "a", os.O_WRONLY | os.O_CREAT) as fd:
        os.write(fd, b"small")
        with fails(errno.EFBIG):
            os.pwrite(fd, b"xx", end - 1)
        with fails(errno.EFBIG):
            os.ftruncate(fd, end + 1)
        with fails(errno.EINVAL):
            os.ftruncate(fd, -1)
    with fails(errno.EFBIG):
        os.truncate(here / "a", end + 1)
    assert (here / "a").read_bytes() == b"small"
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            import resource

            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
            with opened(here / "a", os.O_WRONLY) as fd, fails(errno.EFBIG):
                os.pwrite(fd, b"x", 100)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_copies_inside_the_mount(here: Path) -> None:
    data = random.Random(5).randbytes(2_000_000)
    (here / "a").write_bytes(data)
    with opened(here / "a", os.O_RDONLY) as source, opened(here / "b", os.O_WRONLY | os.O_CREAT) as target:
        left = len(data)
        while left:
            done = os.copy_file_range(source, target, left)
            assert done > 0
            left -= done
    with opened(here / "a", os.O_RDONLY) as source, opened(here / "c", os.O_WRONLY | os.O_CREAT) as target:
        left = len(data)
        while left:
            left -= os.sendfile(target, source, None, left)
    assert (here / "b").read_bytes() == (here / "c").read_bytes() == data


def test_room_asked_for_ahead(here: Path) -> None:
    """posix_fallocate makes the file longer; what it held stays."""
    with opened(here / "a", os.O_RDWR | os.O_CREAT) as fd:
        os.write(fd, b"data")
        os.posix_fallocate(fd, 0, 100_000)
        assert os.fstat(fd).st_size == 100_000
        assert os.pread(fd, 6, 0) == b"data\0\0"
