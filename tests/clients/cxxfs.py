"""std::filesystem's calls (libstdc++), and the few that Python's os module has no name for."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

AT_FDCWD = -100
UTIME_OMIT = (1 << 30) - 2
RENAME_NOREPLACE = 1

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


def _check(result: int, path: Path) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))


def last_write_time(path: Path, ns: int) -> None:
    """last_write_time(path, time): utimensat() that leaves the access time alone."""
    times = (_Timespec * 2)(_Timespec(0, UTIME_OMIT), _Timespec(*divmod(ns, 10**9)))
    _check(_libc.utimensat(AT_FDCWD, os.fsencode(path), times, 0), path)


def renameat2(source: Path, target: Path, flags: int) -> None:
    _check(_libc.renameat2(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), flags), target)


def regular_files(directory: Path) -> Iterator[tuple[Path, int, int]]:
    """directory_iterator: readdir's d_type for the kind, a stat for the size, one for mtime.

    Gives (path, size, mtime in ns). Nothing is collected first, since callers delete while iterating; what a
    peer removed in between is passed over.
    """
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    size, mtime = os.stat(entry.path).st_size, os.stat(entry.path).st_mtime_ns
                    yield Path(entry.path), size, mtime


def exists(path: Path) -> bool:
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def remove(path: Path) -> bool:
    """remove(path): unlink, and rmdir if that turns out to be a directory; False when there was nothing."""
    try:
        os.unlink(path)
    except IsADirectoryError:
        os.rmdir(path)
    except FileNotFoundError:
        return False
    return True


def remove_all(path: Path) -> int:
    """remove_all(path): walk by directory descriptors and unlink each entry as readdir gives it."""
    count = _empty(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY))
    return count + remove(path)


def _empty(fd: int) -> int:
    count = 0
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY
                    count += _empty(os.open(entry.name, flags, dir_fd=fd))
                    os.rmdir(entry.name, dir_fd=fd)
                else:
                    os.unlink(entry.name, dir_fd=fd)
                count += 1
    finally:
        os.close(fd)
    return count


def fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
