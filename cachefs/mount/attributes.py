"""Inode records as the kernel wants them."""

import pyfuse3

from cachefs.store.records import Inode

TIMEOUT = 60.0
"""Seconds the kernel may keep names and attributes. All changes go through it, and
evictions are announced to it."""

BLKSIZE = 64 << 10
"""st_blksize: stdio then writes 8 KiB at a time, its most, instead of 4."""


def entry(ino: int, inode: Inode, size: int | None = None) -> pyfuse3.EntryAttributes:
    """Attributes of an inode; ``size`` overrides the record's."""
    attributes = pyfuse3.EntryAttributes()
    size = inode.size if size is None else size
    attributes.st_ino = ino
    attributes.generation = 0
    attributes.entry_timeout = TIMEOUT
    attributes.attr_timeout = TIMEOUT
    attributes.st_mode = inode.mode
    attributes.st_nlink = inode.nlink
    attributes.st_uid = inode.uid
    attributes.st_gid = inode.gid
    attributes.st_rdev = 0
    attributes.st_size = size
    attributes.st_blksize = BLKSIZE
    attributes.st_blocks = (size + 511) // 512
    attributes.st_atime_ns = inode.atime
    attributes.st_mtime_ns = inode.mtime
    attributes.st_ctime_ns = inode.ctime
    attributes.st_birthtime_ns = inode.birth
    return attributes
