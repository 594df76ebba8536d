"""Small helpers for tests that talk to the kernel."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def opened(path: Path, flags: int, mode: int = 0o600) -> Iterator[int]:
    """A file descriptor for as long as the block runs."""
    fd = os.open(path, flags, mode)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def fails(*numbers: int) -> Iterator[None]:
    """The block must raise OSError with one of these errnos."""
    with pytest.raises(OSError) as caught:  # noqa: PT011, the errno is looked at below
        yield
    got = caught.value.errno or 0
    assert got in numbers, f"{errno.errorcode.get(got)}, not {[errno.errorcode[n] for n in numbers]}"


def read_all(fd: int) -> bytes:
    """The whole file, from its start, whatever the descriptor's place."""
    out = bytearray()
    while part := os.pread(fd, 1 << 20, len(out)):
        out += part
    return bytes(out)


def elsewhere(code: str, *arguments: object) -> str:
    """What ``code`` prints, run by another process with ``sys`` and ``os`` at hand."""
    done = subprocess.run(
        [sys.executable, "-c", f"import os, sys\n{code}", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def put(path: Path, data: bytes) -> None:
    """Write ``data`` over the beginning of a file, 1 MiB at a time, and have it durable."""
    with opened(path, os.O_WRONLY | os.O_CREAT) as fd:
        for start in range(0, len(data), 1 << 20):
            os.write(fd, data[start : start + (1 << 20)])
        os.fsync(fd)


def can_put(path: Path, data: bytes) -> bool:
    """Whether `put` succeeds; what could be written of it stays either way."""
    try:
        put(path, data)
    except OSError:
        return False
    return True


def sync_directory(path: Path) -> None:
    """Make the names in it durable."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)
