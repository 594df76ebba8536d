#!/usr/bin/env python3
"""A filesystem that stores nothing and reads as zeros: what pyfuse3 and the kernel take for themselves.

emptyfs.py MOUNTPOINT
"""

import errno
import os
import stat
import sys
import time
from typing import Any

import pyfuse3
import trio
from pyfuse3 import FUSEError

ROOT = pyfuse3.ROOT_INODE
ZEROS = memoryview(bytes(1 << 20))


class Empty(pyfuse3.Operations):
    """One directory; of its files only names and sizes are kept."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[bytes, int] = {}
        self._sizes: dict[int, int] = {}
        self._next = ROOT + 1

    def _attributes(self, inode: int) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = stat.S_IFDIR | 0o700 if inode == ROOT else stat.S_IFREG | 0o600
        entry.st_size = self._sizes.get(inode, 0)
        entry.st_uid, entry.st_gid = os.getuid(), os.getgid()
        entry.st_mtime_ns = entry.st_ctime_ns = entry.st_atime_ns = time.time_ns()
        return entry

    async def lookup(self, parent_inode: int, name: bytes, ctx: Any) -> pyfuse3.EntryAttributes:
        if name not in self._names:
            raise FUSEError(errno.ENOENT)
        return self._attributes(self._names[name])

    async def getattr(self, inode: int, ctx: Any) -> pyfuse3.EntryAttributes:
        return self._attributes(inode)

    async def setattr(
        self, inode: int, attr: Any, fields: Any, fh: int | None, ctx: Any
    ) -> pyfuse3.EntryAttributes:
        if fields.update_size:
            self._sizes[inode] = attr.st_size
        return self._attributes(inode)

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: Any
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        inode = self._names.setdefault(name, self._next)
        self._next = max(self._next, inode + 1)
        self._sizes[inode] = 0
        return pyfuse3.FileInfo(fh=inode, direct_io=True), self._attributes(inode)

    async def open(self, inode: int, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        if flags & os.O_TRUNC:
            self._sizes[inode] = 0
        return pyfuse3.FileInfo(fh=inode, direct_io=True)

    async def read(self, fh: int, off: int, size: int) -> Any:
        return ZEROS[: max(0, min(size, self._sizes[fh] - off))]

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        self._sizes[fh] = max(self._sizes[fh], off + len(buf))
        return len(buf)

    async def rename(
        self, parent_old: int, name_old: bytes, parent_new: int, name_new: bytes, flags: int, ctx: Any
    ) -> None:
        self._names[name_new] = self._names.pop(name_old)

    async def unlink(self, parent_inode: int, name: bytes, ctx: Any) -> None:
        self._sizes.pop(self._names.pop(name), None)

    async def fsync(self, fh: int, datasync: bool) -> None:
        pass

    async def flush(self, fh: int) -> None:
        pass

    async def release(self, fh: int) -> None:
        pass


def main() -> None:
    """Serve until unmounted."""
    pyfuse3.init(Empty(), sys.argv[1], {"fsname=emptyfs", "subtype=emptyfs"})
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main()
