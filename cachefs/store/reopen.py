"""Opening an LMDB environment anew after the disk under it failed.

When the write of its meta page meets an I/O error, LMDB gives its environment up:
every transaction, of readers too, fails from then on (MDB_PANIC). On Linux that
follows any failed write, be the disk well again: the kernel tells of it once through
each open file, and LMDB writes its meta page through one of its own.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import lmdb

from cachefs.store.errors import StoreFailed
from cachefs.store.index import Index
from cachefs.store.volumes import Volume

UNKNOWN = "the store does not tell whether its last commit is in it"


def mend(index: Index, volumes: Iterable[Volume], attempt: int) -> None:
    """Open anew what LMDB gave up. Nobody may be writing.

    ``attempt`` is LMDB's number of an index transaction of which it is not known
    whether it was committed, or 0. Raises StoreFailed or OSError where it cannot be
    done, or not yet.
    """
    for volume in volumes:
        if is_given_up(volume.env):
            _prepare(volume.env, volume.path)
            volume.reopen()
    if is_given_up(index.env):
        _prepare(index.env, index.path)
        if 0 < attempt <= index.env.info()["last_txnid"]:
            # What is pending is in it already, and must not be counted twice.
            raise StoreFailed(UNKNOWN)
        index.reopen()


def _prepare(env: lmdb.Environment, path: Path) -> None:
    if not is_idle(env):
        raise StoreFailed("readers are still at work")
    settle(path, env.stat()["psize"])


def is_given_up(env: lmdb.Environment) -> bool:
    try:
        with env.begin():
            return False
    except lmdb.PanicError:
        return True


def is_idle(env: lmdb.Environment) -> bool:
    """Whether no reader of this process is under way: closing would take the map from under it.

    In an environment that was given up no other can begin.
    """
    me = str(os.getpid())
    rows = (line.split() for line in env.readers().splitlines())
    return not any(row and row[0] == me and row[-1] != "-" for row in rows)


def settle(path: Path, page_size: int) -> None:
    """Bring the two meta pages on the disk to what the page cache has. OSError while the disk fails.

    After the error the cache has the older one again, the disk maybe the newer. The
    next transaction writes over what only the newer one needs; were the power cut
    then, neither would be whole.
    """
    file = os.open(path / "data.mdb", os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(file, os.pread(file, 2 * page_size, 0), 0)
        os.fsync(file)
    finally:
        os.close(file)
