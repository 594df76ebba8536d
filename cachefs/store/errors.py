"""What can go wrong below the tree; the kernel side turns these into errno."""

import errno
import os
from pathlib import Path

import lmdb

from cachefs.errors import UserError
from cachefs.sizes import MIB

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_FULL_BELOW = MIB


class StoreFull(Exception):
    """No room is left for new bytes, even after everything evictable has gone (ENOSPC)."""


class StoreFailed(OSError):
    """The disk under the store reports an error, so that nothing can be written (EIO)."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EIO, reason)


class Damaged(Exception):
    """A block's bytes are missing or differ from its digest (EIO)."""


class StoreRefused(UserError):
    """The store cannot be opened as asked; the message says what to do."""


def is_full(error: Exception, path: Path) -> bool:
    """Whether a write below ``path`` failed for want of space, not because the disk is broken.

    LMDB answers EIO to a write that came out short, as the last one on a disk that
    fills up does.
    """
    if isinstance(error, StoreFull | lmdb.MapFullError | lmdb.DiskError):
        return True
    number = error.errno if isinstance(error, OSError) else getattr(error, "code", 0)
    if number in _NO_SPACE:
        return True
    if number != errno.EIO or isinstance(error, StoreFailed):
        return False
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _FULL_BELOW
