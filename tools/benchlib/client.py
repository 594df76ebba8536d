"""A client's calls, timed."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .statefile import Call, State, big_calls, stdio_calls

Saver = Callable[[Path, State], float]

STEP = 8 << 20
READ = 4 << 20
_buffer = bytearray(0)


def save(path: Path, state: State, calls: Sequence[Call]) -> float:
    """Open, write and close, as llama-server does; seconds."""
    start = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        _write(fd, state, calls)
    finally:
        os.close(fd)
    return time.perf_counter() - start


def stdio_save(path: Path, state: State) -> float:
    """`save` in the calls of stdio, with the buffer it would choose there; seconds."""
    path.touch()
    calls = stdio_calls(state.pieces, min(path.stat().st_blksize, 8192))
    path.unlink()
    return save(path, state, calls)


def plain_save(path: Path, state: State) -> float:
    """Open, write in large calls, close; seconds."""
    return save(path, state, big_calls(state.size, STEP))


def safe_save(path: Path, state: State) -> float:
    """Write a temporary file in large calls, fsync it, rename it; seconds."""
    new = path.with_name(path.name + ".tmp")
    start = time.perf_counter()
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        _write(fd, state, big_calls(state.size, STEP))
        os.fsync(fd)
    finally:
        os.close(fd)
    new.rename(path)
    return time.perf_counter() - start


def _write(fd: int, state: State, calls: Sequence[Call]) -> None:
    for offset, size in calls:
        view = state.data[offset : offset + size]
        while view:
            view = view[os.write(fd, view) :]


def restore(path: Path) -> float:
    """Read a file as llama.cpp does, its last block first, then in order; seconds."""
    global _buffer
    if len(_buffer) < READ:
        _buffer = bytearray(READ)
    view = memoryview(_buffer)
    start = time.perf_counter()
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        os.pread(fd, 4096, size - size % 4096)
        done = 0
        while done < size:
            count = os.readv(fd, [view])
            if not count:
                raise EOFError(f"{path}: {size - done} bytes short")
            done += count
    finally:
        os.close(fd)
    return time.perf_counter() - start


def same_as(path: Path, state: State) -> bool:
    """Whether a file holds these bytes."""
    at = 0
    with path.open("rb", buffering=0) as file:
        while data := file.read(STEP):
            if data != state.data[at : at + len(data)]:
                return False
            at += len(data)
    return at == state.size
