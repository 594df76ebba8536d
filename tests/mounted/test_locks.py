"""flock(2) and fcntl(2) locks between processes."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from .kernel import fails, opened

_fork = multiprocessing.get_context("fork")
Lock = Callable[[int, int], None]
LOCKS = {"flock": fcntl.flock, "fcntl": fcntl.lockf}


def _hold(path: Path, lock: Lock, operation: int, pipe: Connection) -> None:
    with open(path, "r+b") as file:
        lock(file.fileno(), operation)
        pipe.send("locked")
        pipe.recv()


@contextmanager
def held(path: Path, lock: Lock, operation: int) -> Iterator[Connection]:
    """Another process holds the lock until it is told to end."""
    ours, theirs = _fork.Pipe()
    process = _fork.Process(target=_hold, args=(path, lock, operation, theirs), daemon=True)
    process.start()
    assert ours.poll(30)
    ours.recv()
    try:
        yield ours
    finally:
        process.kill()
        process.join(30)


@pytest.mark.parametrize("kind", LOCKS)
def test_one_writer_or_many_readers(here: Path, kind: str) -> None:
    lock = LOCKS[kind]
    (here / "l").write_bytes(b"x" * 100)
    with opened(here / "l", os.O_RDWR) as fd:
        with held(here / "l", lock, fcntl.LOCK_SH):
            lock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            lock(fd, fcntl.LOCK_UN)
            with fails(errno.EAGAIN, errno.EACCES):
                lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A lock goes with the process that held it, even one that was killed.
        lock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock(fd, fcntl.LOCK_UN)
        with held(here / "l", lock, fcntl.LOCK_EX), fails(errno.EAGAIN, errno.EACCES):
            lock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


@pytest.mark.parametrize("kind", LOCKS)
def test_waiting_for_a_lock(here: Path, kind: str) -> None:
    """It is given when the holder lets go, and the mount serves others meanwhile."""
    lock = LOCKS[kind]
    (here / "l").touch()
    with held(here / "l", lock, fcntl.LOCK_EX) as holder:
        ours, theirs = _fork.Pipe()
        waiting = _fork.Process(target=_hold, args=(here / "l", lock, fcntl.LOCK_EX, theirs), daemon=True)
        waiting.start()
        assert not ours.poll(0.2)
        (here / "other").write_bytes(b"served")
        assert (here / "other").read_bytes() == b"served"
        holder.send("end")
        assert ours.poll(30)
        waiting.kill()
        waiting.join(30)


def test_ranges(here: Path) -> None:
    (here / "l").write_bytes(b"x" * 100)
    ours, theirs = _fork.Pipe()

    def hold_range() -> None:
        with open(here / "l", "r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX, 10, 20)
            theirs.send(os.getpid())
            theirs.recv()

    process = _fork.Process(target=hold_range, daemon=True)
    process.start()
    pid = ours.recv()
    with opened(here / "l", os.O_RDWR) as fd:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 20, 0)
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 0, 30)
        for length, start in ((1, 29), (100, 0), (1, 20)):
            with fails(errno.EAGAIN, errno.EACCES):
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 25, 1, 0)
        kind, _, start, length, owner = struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_GETLK, asked))
        assert (kind, start, length, owner) == (fcntl.F_WRLCK, 20, 10, pid)
    process.kill()
    process.join(30)


def test_locks_on_descriptors_of_one_process(here: Path) -> None:
    """flock counts per open file."""
    (here / "l").touch()
    with opened(here / "l", os.O_RDONLY) as one, opened(here / "l", os.O_RDONLY) as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        with fails(errno.EAGAIN):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        copy = os.dup(one)
        fcntl.flock(copy, fcntl.LOCK_UN)
        os.close(copy)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
