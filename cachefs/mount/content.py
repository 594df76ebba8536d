"""What an open file holds: its committed recipe, and what was written since.

One `Content` an inode, shared by all its handles. Bytes written at the end go
through a `Stream`; bytes written anywhere else are `Scattered`, and folded into
the recipe as plain blocks when they grow or somebody needs it done.

The tree keeps the version of before until `persist`. So an in-place overwrite
that is never finished, because the client or the daemon was killed, leaves the
old version: `Save.base`, when the new one turns out to be torn. Only what was fsynced
stays, torn or not: the client was told that it would.
"""

import errno
import logging

import trio

from cachefs.mount.fetch import Fetcher
from cachefs.mount.save import Save
from cachefs.mount.scattered import Scattered, recut
from cachefs.mount.stream import Stream
from cachefs.mount.upkeep import Upkeep
from cachefs.mount.versions import Draft, Version
from cachefs.states.pieces import Buffer
from cachefs.store import Now, Store, StoreFull, recipe
from cachefs.store.recipe import MAX_SIZE, Recipe
from cachefs.store.tree import clock

log = logging.getLogger("cachefs.content")

_REFEED = 64 << 10
_TELLING = 1 << 20
"""Bytes of rows from which a state tells how its server writes."""
_RECORD_BYTES = 24


class Content:
    """See the module. Methods that wait for the lock are async; only one writer's call runs at a time."""

    def __init__(self, store: Store, upkeep: Upkeep, nursery: trio.Nursery, ino: int) -> None:
        self._store = store
        self._upkeep = upkeep
        self._nursery = nursery
        self._lock = trio.Lock()
        self._ino = ino
        inode = store.tree.get(ino)
        self._draft = Draft(store, ino)
        self._scattered = Scattered(store)
        self._stream: Stream | None = None
        self._fetcher = Fetcher(store, ino)
        self._save = Save(store, ino)
        self._dirty = False
        self._kept = Recipe()
        """What the tree has of the file while its stream goes on (its last chunk goes through it again)."""
        self.version = 0
        self.size = inode.size
        self.mtime = inode.mtime
        self.ctime = inode.ctime
        self.handles = 0
        self.writers = 0
        self.closing: trio.Event | None = None
        """Set while the last writer's close decides which version stays; who looks then must wait."""

    @property
    def is_state(self) -> bool:
        """Whether the file was recognised as a KV state."""
        return self._draft.row_bytes > 0

    @property
    def is_streamed(self) -> bool:
        """Whether it is a state that was written in order, so that its readers read it so, too.

        Who wrote it through a mapping will map it again, and the kernel refuses to
        share a mapping of a file that is open for direct I/O.
        """
        return self.is_state and self._draft.is_in_order

    @property
    def is_dirty(self) -> bool:
        return self._dirty

    # -- writing

    def append_now(self, offset: int, data: bytes) -> bool:
        """Take ``data`` in if that needs no waiting: the next bytes of a save in full flow."""
        stream = self._stream
        if (
            stream is None
            or offset != stream.end
            or stream.failed
            or self._save.has_gap
            or self._store.writer.failed
            or not stream.has_credit(len(data))
            or self._lock.locked()
        ):
            return False
        stream.put(data)
        self.size = stream.end
        self._touch()
        return True

    async def write(self, offset: int, data: bytes) -> int:
        """Take ``data`` in; OSError(ENOSPC) when it cannot be stored."""
        async with self._lock:
            try:
                size = await self._write_locked(offset, data)
            except OSError as error:
                if error.errno != errno.EFBIG:  # that one says nothing of the bytes before it
                    self._save.note_refused(offset)
                raise
            self._save.note_taken(offset, size)
            return size

    async def _write_locked(self, offset: int, data: bytes) -> int:
        if offset + len(data) > MAX_SIZE:
            raise OSError(errno.EFBIG, "file too large")
        self._save.check()
        if self._stream is None and offset == self.size and not self._scattered:
            await self._start_stream()
        stream = self._stream
        if (
            stream is not None
            and offset < stream.end <= offset + len(data)
            and stream.retract(offset, len(data))
        ):
            await self._take_in(stream, data)
            return len(data)
        if self._stream is not None and offset == self._stream.end:
            await self._stream.make_room(len(data))
            await self._take_in(self._stream, data)
            return len(data)
        await self._settle()
        await self._upkeep.make_room(len(data))
        self._store.queued -= len(data)
        self._scattered.write(offset, data)
        self.size = max(self.size, offset + len(data))
        self._touch()
        if self._scattered.is_heavy:
            await self._fold()
        return len(data)

    async def _take_in(self, stream: Stream, data: bytes) -> None:
        """Queue ``data``, for which room is reserved."""
        if self._upkeep.is_low():
            self._upkeep.wake()
        self._touch()
        stream.put(data)
        self.size = stream.end
        await stream.wait_for_space()
        if stream.failed:
            self._save.fail(stream.failed)
        missing = stream.missing()
        if missing and missing > self._upkeep.attainable():
            # Better now than when everything else has been evicted for its sake.
            log.warning("inode %d: a state of %d more bytes does not fit the store", self._ino, missing)
            self._save.fail(errno.ENOSPC)

    def _touch(self) -> None:
        self.version += 1
        self._dirty = True
        self._save.torn = False
        self.mtime = self.ctime = clock()

    async def _start_stream(self) -> None:
        """A stream from the end; a short last chunk goes through it again, so that appends do not crumble."""
        start = self._draft.recipe.size
        again: Buffer = b""
        if start and not self.is_state:
            last = next(self._draft.recipe.extents(start - 1, start))
            if last.length < _REFEED and last.kind != recipe.BAND:
                again = await self._fetcher.fetch(self._draft.recipe, last.start, last.length)
                await self._upkeep.make_room(len(again))
                start = last.start
        hurry = self._upkeep.are_synced(self._store.tree.get(self._ino).parent)
        self._kept = self._draft.recipe
        self._draft.recipe = self._draft.recipe.cut(start)
        self._stream = Stream(self._store, self._upkeep, self._nursery, start, hurry=hurry)
        if again:
            self._stream.reserved(len(again))
            self._stream.put(bytes(again))

    async def _settle(self) -> None:
        """End the stream; the recipe then covers the whole file but for the overlay."""
        stream = self._stream
        if stream is None:
            return
        await stream.finish()
        self._draft.collect(stream)
        self._stream = None  # not before: who reads meanwhile must wait for what is being placed
        if stream.start == 0:
            self._draft.describe(stream)
            if stream.row_bytes > _TELLING:
                self._store.note_writes(small=stream.small_writes)
        else:
            self._draft.row_bytes += stream.row_bytes
        if stream.failed:
            if self._draft.recipe.size < self._kept.size:
                self._draft.recipe = self._kept
            self.size = self._draft.recipe.size
            self._save.fail(stream.failed)

    async def _fold(self) -> None:
        """Place what was written out of order as plain blocks."""
        if not self._scattered:
            return
        await self._index_room(self._scattered.index_bytes)
        try:
            edits = await self._scattered.place()
        except StoreFull:
            self._save.fail(errno.ENOSPC)
        finally:
            self._draft.holds += self._scattered.take_holds()
        self._draft.recipe = self._draft.recipe.replace(edits)
        self._scattered.clear()

    async def _index_room(self, size: int) -> None:
        try:
            await self._upkeep.make_index_room(size)
        except (OSError, StoreFull):
            self._save.fail(errno.ENOSPC)

    async def truncate(self, size: int) -> None:
        """Make the file ``size`` bytes long."""
        if size > MAX_SIZE:
            raise OSError(errno.EFBIG, "file too large")
        async with self._lock:
            if size == 0:
                await self._empty()
            else:
                await self._settle()
                self._scattered.cut(size, max(size, self.size))
                if size > self._draft.recipe.size and self._scattered:
                    await self._fold()
                self._draft.recipe = self._draft.recipe.cut(size)
            self.size = size
            self._touch()

    async def _empty(self) -> None:
        self._upkeep.forget_lost(self._ino)
        self._save.start_over()
        if self._stream is not None:
            await self._stream.abandon()
            self._draft.holds += self._stream.take_holds()
            self._stream = None
        self._scattered.clear()
        self._scattered.placed = 0
        self._draft.empty()

    # -- reading

    def read_now(self, offset: int, into: memoryview) -> tuple[Now, int]:
        """Fill ``into`` from ``offset`` on if that needs no waiting: how that went, and bytes read."""
        if self._stream is not None or self._scattered:
            return Now.OTHERWISE, 0
        return self._fetcher.fetch_now(self._draft.recipe, offset, into)

    async def will_need(self, start: int, stop: int) -> None:
        """Have the disk read bytes start … stop, which somebody is about to ask for."""
        await self._fetcher.will_need(self._draft.recipe, start, stop)

    async def read(self, offset: int, size: int) -> Buffer:
        """Bytes offset … offset + size, fewer at the end; OSError(EIO) if a block is damaged."""
        if self._stream is None and not self._scattered:
            return await self._fetcher.fetch(self._draft.recipe, offset, size)
        async with self._lock:
            tail = b""
            if self._stream is not None:
                await self._stream.drain()
                self._draft.collect(self._stream)
                tail = self._stream.held_bytes()
            stop = min(offset + size, self.size)
            if offset >= stop:
                return b""
            out = await self._fetcher.fetch_with(self._draft.recipe, tail, offset, stop)
            self._scattered.patch(offset, out)
            return out

    # -- into the tree

    async def flush(self, *, killed: bool = False) -> None:
        """A close: take everything in, report what failed, make it the tree's version.

        Room for what is queued is reserved, so unless that is too much for the memory
        of the daemon, it is taken in behind the client's back.

        ``killed``: a signal ended the process, and the close is the kernel's. A torn
        save over an older version is then left for `release` to judge.
        """
        self._save.killed = self._save.killed or killed
        stream = self._stream
        if (
            stream is None
            or stream.failed
            or self._save.has_gap
            or self._scattered
            or self._lock.locked()
            or self._store.queued > self._store.budget.queue
        ):
            await self._flush()
        else:
            self._save.answered = True
            self._nursery.start_soon(self._flush_behind, self._upkeep.follow())

    async def _flush_behind(self, done: trio.Event) -> None:
        end = self.size
        try:
            await self._flush()
        except OSError as error:  # `release` meets it again
            if self._stream is not None or self._save.is_lost(self._draft.recipe.size, end):
                self._upkeep.note_untold(error.errno or errno.EIO)
            log.error("inode %d: %s", self._ino, error)
        except Exception:  # in a task of its own it would end the mount
            log.exception("inode %d: closing failed", self._ino)
        finally:
            self._upkeep.followed(done)

    async def _flush(self) -> None:
        async with self._lock:
            if not self._dirty:
                return
            if self._stream is not None:
                await self._stream.drain()
                if self._stream.failed and self._save.base is not None:
                    self._save.fail(self._stream.failed)  # `release` brings the old version back
                if self._save.is_torn(self._stream, self.size) and not self._stream.failed:
                    if self._save.base is None or not self._save.killed:
                        await self._persist()
                    return
            stream = self._stream
            await self._settle()
            self._save.torn = self._save.is_torn(stream, self.size)
            if self._save.torn and self._save.killed and self._save.base is not None:
                return  # only its end told so
            await self._persist()

    async def sync(self) -> Version | None:
        """Make what was written so far the tree's version, to be committed next.

        The version that a torn save would bring back still.
        """
        async with self._lock:
            if self._dirty:
                self._save.check()
                await self._persist()
            return self._save.base

    async def fsync(self) -> None:
        """Make what was written so far durable. Raises OSError or StoreFull.

        Whoever is told so may build on it: from here on a torn save goes back to
        nothing older.
        """
        if self._stream is not None:
            self._upkeep.note_sync(self._store.tree.get(self._ino).parent)
        base = await self.sync()
        await self._upkeep.sync()
        if base is not None and base is self._save.base:
            self._save.give_up_base()

    async def release(self, *, keep_torn: bool, killed: bool = False) -> bool:
        """The last writer has gone. True if the file is not what was written: some of it
        was refused, or the old version was put back in place of a torn one.

        A state that ends too early counts as torn only if its writer was killed: who
        closes a file like that means it, as llama.cpp's own test of damaged states does.
        """
        async with self._lock:
            save = self._save
            killed = killed or save.killed
            end = self.size
            failed, torn = save.has_gap, save.torn
            stream = self._stream
            try:
                try:
                    await self._settle()
                except OSError:
                    failed = True
                if save.failed and save.answered and save.is_lost(self._draft.recipe.size, end):
                    self._upkeep.note_untold(save.failed)
                    if save.base is None or keep_torn:
                        self._upkeep.note_lost(self._ino, save.failed)
                torn = torn or save.is_torn(stream, self.size)
                if (failed or (torn and killed)) and save.base is not None and not keep_torn:
                    self._restore(save.base)
                    return True
                if self._scattered.prevails(self._draft.recipe.size):
                    async with self._upkeep.recutting:
                        await self._recut()
                    self._dirty = True
                if self._dirty:
                    await self._persist()
                return failed
            finally:
                save.give_up_base()
                self._save = Save(self._store, self._ino)

    def _restore(self, base: Version) -> None:
        log.warning("inode %d: the save was torn; its previous version is kept", self._ino)
        self._store.index.active.counters["torn_saves"] += 1
        self._draft.go_back(base)
        self._scattered.clear()
        self.version += 1
        self.size, self.mtime = base.recipe.size, base.mtime
        # They may be victims by now, and must stay until this version is committed.
        self._draft.holds += self._save.take_holds()
        self._to_tree(self._draft.recipe)

    async def _persist(self) -> None:
        """Write recipe, size and times into the tree's pending layer."""
        await self._fold()
        current = self._draft.recipe
        if self._stream is not None:
            await self._stream.drain()
            if self._stream.failed:
                self._save.fail(self._stream.failed)
            self._draft.collect(self._stream)
            current = self._draft.recipe
            held = self._stream.held_bytes()
            if held:
                placer = self._store.placer()
                placer.place_bytes(held)
                current = current.append(placer.take())
                self._draft.holds += placer.take_holds()
            self._kept = current
        grown = len(current) - len(self._store.tree.recipe(self._ino))
        if grown > 0:
            await self._index_room(_RECORD_BYTES * grown)
        self._save.hold_base()
        self._to_tree(current)

    def _to_tree(self, current: Recipe) -> None:
        self._draft.to_tree(current, self.mtime, self.ctime)
        # What a stream holds back is to be cut yet, and only its end says what the file is.
        self._dirty = self._stream is not None

    async def _recut(self) -> None:
        stream = Stream(self._store, self._upkeep, self._nursery, 0)
        ended = await recut(stream, self._draft.recipe, self._fetcher.fetch)
        self._draft.holds += stream.take_holds()
        if not ended:
            return
        if not stream.failed:
            self._draft.recipe = Recipe(stream.take())
            self._draft.describe(stream, in_order=False)
        self._scattered.placed = 0

    async def drop(self) -> None:
        """Let go of everything; the content is not used any more."""
        if self._stream is not None:
            await self._stream.abandon()
            self._draft.holds += self._stream.take_holds()
            self._stream = None
        self._store.blocks.release(self._draft.take_holds() + self._save.take_holds())
        self._scattered.clear()
        self._dirty = False
