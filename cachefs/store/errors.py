"""What can go wrong below the tree; the kernel side turns these into errno."""

from cachefs.errors import UserError


class StoreFull(Exception):
    """No room is left for new bytes, even after everything evictable has gone (ENOSPC)."""


class Damaged(Exception):
    """A block's bytes are missing or differ from its digest (EIO)."""


class StoreRefused(UserError):
    """The store cannot be opened as asked; the message says what to do."""
