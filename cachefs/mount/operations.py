"""The FUSE handlers: each checks its arguments, calls the tree or an open file, and answers.

pyfuse3 ends the whole mount when a handler raises anything but FUSEError, so
every handler runs inside `guarded`, which turns OSError into its errno and
everything else into a logged EIO.

All handlers run in the event loop. Between two awaits nothing else changes the
tree, so handlers that do not await are atomic.
"""

import errno
import logging
import os
import stat
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pyfuse3
import trio
from pyfuse3 import FUSEError

from cachefs.config import MountConfig
from cachefs.mount.attributes import entry
from cachefs.mount.content import Content
from cachefs.mount.guard import guarded
from cachefs.mount.handle import REQUEST, Handle
from cachefs.mount.mountpoint import COMMIT
from cachefs.mount.processes import process_of, was_killed
from cachefs.mount.recompress import Idle
from cachefs.mount.upkeep import Upkeep
from cachefs.store import Store, StoreFailed, StoreFull
from cachefs.store.evict import Member
from cachefs.store.records import Inode
from cachefs.store.tree import NAME_MAX, PIN, Tree, clock, private

log = logging.getLogger("cachefs.operations")

ENTRY_BYTES = 512
"""Room in the index for a name and its inode, or for the name of an attribute."""
_COMMIT = COMMIT.encode()
DIRECT_FROM = 1 << 20
"""States of at least this many bytes are read past the page cache, at twice its speed."""


class CacheFS(pyfuse3.Operations):
    """A mounted store. `running` must be entered before `pyfuse3.main`."""

    supports_dot_lookup = True

    def __init__(self, store: Store, config: MountConfig) -> None:
        super().__init__()
        self._store = store
        self._tree: Tree = store.tree
        self._config = config
        self._upkeep = Upkeep(store, self._evicted, config.scrub_seconds)
        self._nursery: trio.Nursery
        self._contents: dict[int, Content] = {}
        self._handles: dict[int, Handle] = {}
        self._dirs: dict[int, int] = {}
        self._lookups: Counter[int] = Counter()
        self._replaced: set[int] = set()
        self._next_fh = 1
        self._answer = memoryview(bytearray(REQUEST))
        store.busy = self._contents.__contains__
        self.enable_writeback_cache = config.writeback == "on" or (
            config.writeback == "auto" and store.small_writes
        )
        if self.enable_writeback_cache:
            log.info("the kernel gathers small writes (--writeback)")
        recompressor = store.compress(config.compress, config.compress_level)
        self._idle = Idle(store, recompressor) if recompressor is not None else None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the background tasks; at the end take everything in and commit it."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._upkeep.run)
            if self._idle is not None:
                self._nursery.start_soon(self._idle.run)
            try:
                yield
            finally:
                with trio.CancelScope(shield=True):
                    await self._finish()
                self._nursery.cancel_scope.cancel()

    async def _finish(self) -> None:
        for content in list(self._contents.values()):
            try:
                await content.release(keep_torn=self._config.keep_torn, killed=True)
            except Exception as error:
                log.error("a file that was still open is lost: %s", error)
        for ino in [ino for ino in self._tree.orphans() if ino not in self._contents]:
            self._tree.release_orphan(ino)
        try:
            await self._upkeep.commit()
        except (StoreFull, StoreFailed) as error:
            log.error("the last changes could not be committed: %s", error)

    @property
    def is_failed(self) -> bool:
        """Whether the disk under the store is broken."""
        return bool(self._store.writer.failed)

    # -- what the kernel knows

    def _used(self) -> None:
        if self._idle is not None:
            self._idle.client()

    def _evicted(self, member: Member) -> None:
        pyfuse3.invalidate_entry_async(member.parent, member.name, member.ino, True)

    def _attributes(self, ino: int, inode: Inode | None = None) -> pyfuse3.EntryAttributes:
        content = self._contents.get(ino)
        inode = inode or self._tree.get(ino)
        if content is None:
            return entry(ino, inode)
        times = inode._replace(mtime=content.mtime, ctime=max(inode.ctime, content.ctime))
        return entry(ino, times, content.size)

    def _entered(self, ino: int, inode: Inode | None = None) -> pyfuse3.EntryAttributes:
        self._lookups[ino] += 1
        return self._attributes(ino, inode)

    def _forget_orphan(self, ino: int) -> None:
        """Drop an unlinked file's content once nobody has it open, the inode once the kernel forgot it.

        What was replaced keeps its content until then, milliseconds later: who was about to open
        it finds one version or the other, however fast they follow on each other.
        """
        if self._upkeep.lost(ino) and not self._tree.get(ino).nlink:
            self._upkeep.forget_lost(ino)
        if ino in self._contents:
            return
        if not self._lookups[ino]:
            self._replaced.discard(ino)
            self._tree.release_orphan(ino)
        elif ino not in self._replaced:
            self._tree.empty_orphan(ino)

    @guarded
    async def lookup(
        self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        if name == b".":
            return self._entered(parent_inode)
        if name == b"..":
            return self._entered(self._tree.get(parent_inode).parent)
        if len(name) > NAME_MAX:
            raise FUSEError(errno.ENAMETOOLONG)
        await self._closed(self._tree.require(parent_inode, name).ino)
        return self._entered(self._tree.require(parent_inode, name).ino)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for ino, count in inode_list:
            self._lookups[ino] -= count
            if self._lookups[ino] <= 0:
                del self._lookups[ino]
                try:
                    self._forget_orphan(ino)
                except Exception:
                    log.exception("forget failed")

    @guarded
    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:
        await self._closed(inode)
        return self._attributes(inode)

    @guarded
    async def setattr(self, inode: int, attr: pyfuse3.EntryAttributes, fields: pyfuse3.SetattrFields,
                      fh: int | None, ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:  # fmt: skip
        old = self._tree.get(inode)
        if fields.update_size:
            await self._truncate(inode, attr.st_size)
            old = self._tree.get(inode)
        changes: dict[str, int] = {"ctime": clock()}
        if fields.update_mode:
            changes["mode"] = stat.S_IFMT(old.mode) | private(attr.st_mode & 0o7777)
        if fields.update_uid:
            changes["uid"] = attr.st_uid
        if fields.update_gid:
            changes["gid"] = attr.st_gid
        if fields.update_atime:
            changes["atime"] = attr.st_atime_ns
        if fields.update_mtime:
            changes["mtime"] = attr.st_mtime_ns
            if inode in self._contents:
                self._contents[inode].mtime = attr.st_mtime_ns
        self._tree.change(inode, **changes)
        if fields.update_mtime or fields.update_atime:
            # Clients mark use by setting times, now or given; order by what they set.
            self._tree.set_use(
                inode, min(time.time_ns(), max(changes.get("mtime", 0), changes.get("atime", 0)))
            )
        return self._attributes(inode)

    async def _truncate(self, ino: int, size: int) -> None:
        if stat.S_ISDIR(self._tree.get(ino).mode):
            raise FUSEError(errno.EISDIR)
        await self._closed(ino)
        self._check_linked(ino)
        content = self._content(ino)
        content.writers += 1
        try:
            await content.truncate(size)
        finally:
            await self._close(ino, content, wrote=True)

    # -- names

    @guarded
    async def mknod(self, parent_inode: int, name: bytes, mode: int, rdev: int,
                    ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:  # fmt: skip
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            raise FUSEError(errno.EPERM)
        return self._entered(*await self._create(parent_inode, name, stat.S_IFREG | stat.S_IMODE(mode), ctx))

    async def _create(
        self, parent: int, name: bytes, mode: int, ctx: pyfuse3.RequestContext
    ) -> tuple[int, Inode]:
        await self._upkeep.make_index_room(ENTRY_BYTES)
        return self._tree.create(parent, name, mode, ctx.uid, ctx.gid)

    @guarded
    async def mkdir(self, parent_inode: int, name: bytes, mode: int,
                    ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:  # fmt: skip
        return self._entered(*await self._create(parent_inode, name, stat.S_IFDIR | stat.S_IMODE(mode), ctx))

    @guarded
    async def unlink(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._forget_orphan(self._tree.unlink(parent_inode, name))

    @guarded
    async def rmdir(self, parent_inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._forget_orphan(self._tree.rmdir(parent_inode, name))

    @guarded
    async def rename(self, parent_inode_old: int, name_old: bytes, parent_inode_new: int, name_new: bytes,
                     flags: int, ctx: pyfuse3.RequestContext) -> None:  # fmt: skip
        if flags & ~(pyfuse3.RENAME_EXCHANGE | pyfuse3.RENAME_NOREPLACE):
            raise FUSEError(errno.EINVAL)
        moved = [self._tree.require(parent_inode_old, name_old).ino]
        if flags & pyfuse3.RENAME_EXCHANGE:
            moved.append(self._tree.require(parent_inode_new, name_new).ino)
        for ino in moved:
            if error := self._upkeep.lost(ino):
                raise FUSEError(error)  # not over a file that is whole
            if ino in self._contents:
                # Without this a crash could keep the new name and lose the content.
                await self._contents[ino].sync()
        replaced = self._tree.rename(
            parent_inode_old,
            name_old,
            parent_inode_new,
            name_new,
            replace=not flags & pyfuse3.RENAME_NOREPLACE,
            exchange=bool(flags & pyfuse3.RENAME_EXCHANGE),
        )
        if replaced is not None:
            self._replaced.add(replaced)
            self._forget_orphan(replaced)

    @guarded
    async def symlink(self, parent_inode: int, name: bytes, target: bytes,
                      ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:  # fmt: skip
        raise FUSEError(errno.EPERM)

    @guarded
    async def link(self, inode: int, new_parent_inode: int, new_name: bytes,
                   ctx: pyfuse3.RequestContext) -> pyfuse3.EntryAttributes:  # fmt: skip
        raise FUSEError(errno.EPERM)

    # -- directories

    @guarded
    async def opendir(self, inode: int, ctx: pyfuse3.RequestContext) -> int:
        if not stat.S_ISDIR(self._tree.get(inode).mode):
            raise FUSEError(errno.ENOTDIR)
        fh = self._fh()
        self._dirs[fh] = inode
        return fh

    @guarded
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        ino = self._dirs[fh]
        for number, name in ((1, b"."), (2, b"..")):
            if start_id < number:
                at = ino if number == 1 else self._tree.get(ino).parent
                if not pyfuse3.readdir_reply(token, name, self._attributes(at), number):
                    return
        for child in self._tree.children(ino, max(2, start_id)):
            try:
                attributes = self._attributes(child.ino)
            except OSError:  # a damaged row keeps no client from the others; `cachefs ls` names it
                continue
            if not pyfuse3.readdir_reply(token, child.name, attributes, child.cookie):
                return
            self._lookups[child.ino] += 1

    @guarded
    async def releasedir(self, fh: int) -> None:
        del self._dirs[fh]

    @guarded
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await self._upkeep.sync()

    # -- files

    def _fh(self) -> int:
        self._next_fh += 1
        return self._next_fh

    def _content(self, ino: int) -> Content:
        """The content of an inode, with one handle more."""
        content = self._contents.get(ino)
        if content is None:
            content = self._contents[ino] = Content(self._store, self._upkeep, self._nursery, ino)
        content.handles += 1
        return content

    def _check_linked(self, ino: int) -> None:
        """ESTALE for a file that was replaced or removed since it was looked up, and whose content is gone.

        The kernel then looks the name up again, and finds what is there now.
        """
        if ino not in self._contents and ino not in self._replaced and not self._tree.get(ino).nlink:
            raise FUSEError(errno.ESTALE)

    def _open(self, ino: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        self._used()
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        content = self._content(ino)
        content.writers += writes
        fh = self._fh()
        self._handles[fh] = Handle(self._nursery, ino, content, writes, process_of(ctx.pid) if writes else 0)
        if flags & os.O_ACCMODE == os.O_RDONLY:
            direct = content.size >= DIRECT_FROM and content.is_streamed
            # Past the cache a reader would not see what a writer has in it.
            direct = direct and not (content.writers and self.enable_writeback_cache)
        else:
            direct = flags & os.O_ACCMODE == os.O_WRONLY and not self.enable_writeback_cache
        return pyfuse3.FileInfo(fh=fh, direct_io=direct, keep_cache=True)

    @guarded
    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        await self._closed(inode)
        self._check_linked(inode)
        info = self._open(inode, flags, ctx)
        if flags & os.O_TRUNC:
            # libfuse asks for FUSE_ATOMIC_O_TRUNC, so the kernel sends no setattr of its own.
            handle = self._handles[info.fh]
            try:
                await handle.content.truncate(0)
            except BaseException:
                del self._handles[info.fh]  # the kernel will not release what it was not given
                await self._close(inode, handle.content, wrote=handle.writes)
                raise
        self._tree.touch(inode)
        return info

    @guarded
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: pyfuse3.RequestContext
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        ino, inode = await self._create(parent_inode, name, stat.S_IFREG | stat.S_IMODE(mode), ctx)
        return self._open(ino, flags, ctx), self._entered(ino, inode)

    @guarded
    async def read(self, fh: int, off: int, size: int) -> Any:
        self._used()
        return await self._handles[fh].read(off, size, self._answer)

    @guarded
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        self._used()
        content = self._handles[fh].content
        size = len(buf)
        if not content.append_now(off, buf):
            size = await content.write(off, buf)
        self._store.index.active.counters["written_bytes"] += size
        return size

    @guarded
    async def flush(self, fh: int) -> None:
        handle = self._handles[fh]
        if handle.writes:
            await handle.content.flush(killed=was_killed(handle.opener))
            if self.is_failed:
                raise FUSEError(errno.EIO)  # taken in, but it may never reach the disk

    @guarded
    async def release(self, fh: int) -> None:
        handle = self._handles.pop(fh)
        await self._close(handle.ino, handle.content, wrote=handle.writes)

    async def _closed(self, ino: int) -> None:
        """Wait for a close that is deciding which version of a file stays."""
        while (content := self._contents.get(ino)) is not None and content.closing is not None:
            await content.closing.wait()

    async def _close(self, ino: int, content: Content, *, wrote: bool) -> None:
        try:
            if wrote:
                content.writers -= 1
                if not content.writers:
                    await self._decide(ino, content)
        finally:
            content.handles -= 1
            if not content.handles:
                del self._contents[ino]
                await content.drop()
                self._forget_orphan(ino)

    async def _decide(self, ino: int, content: Content) -> None:
        content.closing = trio.Event()
        try:
            if await content.release(keep_torn=self._config.keep_torn):
                await trio.to_thread.run_sync(pyfuse3.invalidate_inode, ino)
                if self.enable_writeback_cache:
                    self._renew(ino)
        finally:
            content.closing.set()
            content.closing = None

    def _renew(self, ino: int) -> None:
        """Give a file's name to a new inode with the same content.

        A kernel that gathers writes knows a file's size better than we do, and would go
        on showing that of a save which failed.
        """
        old = self._tree.get(ino)
        if not old.nlink:
            return
        name = self._tree.name_of(old)
        error = self._upkeep.lost(ino)
        self._forget_orphan(self._tree.renew(ino))
        if error:
            self._upkeep.note_lost(self._tree.require(old.parent, name).ino, error)
        pyfuse3.invalidate_entry_async(old.parent, name, ino, True)

    @guarded
    async def fsync(self, fh: int, datasync: bool) -> None:
        await self._handles[fh].content.fsync()

    # -- the filesystem

    @guarded
    async def statfs(self, ctx: pyfuse3.RequestContext) -> pyfuse3.StatvfsData:
        data = pyfuse3.StatvfsData()
        capacity = self._store.volumes.capacity
        taken = sum(self._taken(ino, content) for ino, content in self._contents.items())
        free = max(self._store.room(), self._store.attainable() - taken) * 16 // 17  # as `Store.reserve`
        data.f_bsize = data.f_frsize = 4096
        data.f_blocks = self._store.max_bytes // 4096
        data.f_bfree = data.f_bavail = max(0, min(free, capacity)) // 4096
        files = self._store.counters()["entries"]
        data.f_files = files + (1 << 20)
        data.f_ffree = data.f_favail = 1 << 20
        data.f_namemax = NAME_MAX
        return data

    def _taken(self, ino: int, content: Content) -> int:
        """Bytes of an open file that cannot be evicted, but for those that its pin keeps anyway."""
        if ino not in self._tree.pinned:
            return content.size
        return max(0, content.size - self._tree.get(ino).size)

    # -- extended attributes

    def _check_xattr(self, name: bytes) -> None:
        if not name.startswith(b"user.") or (self.enable_writeback_cache and name != PIN):
            raise FUSEError(errno.EOPNOTSUPP)

    @guarded
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: pyfuse3.RequestContext) -> None:
        if name == _COMMIT:
            await self._upkeep.settle()
            return
        self._check_xattr(name)
        await self._upkeep.make_index_room(ENTRY_BYTES + len(value))
        self._tree.set_xattr(inode, name, value)

    @guarded
    async def getxattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> bytes:
        if self.enable_writeback_cache:
            # Else the kernel asks for security.capability before every write, and could as well write.
            raise FUSEError(errno.ENOSYS)
        value = self._tree.xattr(inode, name)
        if value is None:
            raise FUSEError(pyfuse3.ENOATTR)
        return value

    @guarded
    async def listxattr(self, inode: int, ctx: pyfuse3.RequestContext) -> list[bytes]:
        return [] if self.enable_writeback_cache else self._tree.xattrs(inode)

    @guarded
    async def removexattr(self, inode: int, name: bytes, ctx: pyfuse3.RequestContext) -> None:
        self._check_xattr(name)
        self._tree.remove_xattr(inode, name)
