"""Opening LMDB's environments anew after the disk under them failed.

When the write of its meta page meets an I/O error, LMDB gives its environment up:
every transaction, of readers too, fails from then on (MDB_PANIC). On Linux that
follows any failed write, be the disk well again: the kernel tells of it once through
each open file, and LMDB writes its meta page through one of its own.

That is as well, since what the page cache has is not to be trusted then. Pages that
could not be written count as clean, and ext4 forgets that their blocks are marked as
never written: written again, with success, they read as zeros once they leave the
cache. So the files are closed, their pages dropped, and what the disk has is opened.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import lmdb

from cachefs.store.errors import StoreFailed
from cachefs.store.index import Index
from cachefs.store.volumes import Volume

UNKNOWN = "its last commit may be in the store or not"


def mend(index: Index, volumes: Iterable[Volume], attempt: int) -> None:
    """Open anew what LMDB gave up. Nobody may be writing.

    ``attempt`` is LMDB's number of an index transaction of which it is not known
    whether it was committed, or 0. Raises StoreFailed, OSError or lmdb.Error where it
    cannot be done, or not yet.
    """
    parts: list[Index | Volume] = [*volumes, index]
    for each in parts:
        if _is_given_up(each.env):
            if not _is_idle(each.env):
                raise StoreFailed("readers are still at work")
            each.env.close()
            drop_cached(each.path)
            each.open()
    if 0 < attempt <= index.env.info()["last_txnid"]:
        raise StoreFailed(UNKNOWN)  # what is pending is in it, and must not be counted twice


def _is_given_up(env: lmdb.Environment) -> bool:
    try:
        with env.begin():
            return False
    except lmdb.Error:  # MDB_PANIC; or closed, and the disk failed before it was open again
        return True


def _is_idle(env: lmdb.Environment) -> bool:
    """Whether no reader of this process is under way: closing would take the map from under it.

    In an environment that was given up no other can begin.
    """
    try:
        rows = [line.split() for line in env.readers().splitlines()]
    except lmdb.Error:
        return True
    return not any(row and row[0] == str(os.getpid()) and row[-1] != "-" for row in rows)


def drop_cached(path: Path) -> None:
    """Have the next reader of a closed environment get what the disk has. OSError while that fails."""
    file = os.open(path / "data.mdb", os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)
