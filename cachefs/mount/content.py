"""What an open file holds: its committed recipe, and what was written since.

One `Content` an inode, shared by all its handles. Bytes written at the end go
through a `Stream`; bytes written anywhere else into an `Overlay`, which is
folded into the recipe as plain blocks when it grows or somebody needs it done.

The tree keeps the version of before until `persist`. So an in-place overwrite
that is never finished, because the client or the daemon was killed, leaves the
old version: `base`, when the new one turns out to be torn. Only what was fsynced
stays, torn or not: the client was told that it would.
"""

import errno
import json
import logging

import trio

from cachefs.mount import versions
from cachefs.mount.overlay import Overlay
from cachefs.mount.stream import Stream
from cachefs.mount.upkeep import Upkeep
from cachefs.mount.versions import Version
from cachefs.states.pieces import Buffer
from cachefs.store import Damaged, Now, Store, StoreFailed, StoreFull, recipe
from cachefs.store.recipe import MAX_SIZE, Recipe
from cachefs.store.tree import clock

log = logging.getLogger("cachefs.content")

_FOLD_AT = 16 << 20
_REFEED = 64 << 10
_IN_THREAD = 64 << 10
_TELLING = 1 << 20
"""Bytes of rows from which a state tells how its server writes."""
_RUN_ENTRIES = 384
"""Bytes in the index for a run that is placed: its block's entries and records."""
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
        self._recipe = store.tree.recipe(ino)
        self._row_bytes = inode.row_bytes
        self._about = store.tree.about(ino)
        self._overlay = Overlay()
        self._weight = 0
        self._stream: Stream | None = None
        self._base: Version | None = None
        self._base_holds: list[int] = []
        self._holds: list[int] = []
        self._failed = 0
        self._folded = 0
        self._dirty = False
        self._torn = False
        self._killed = False
        self._answered = False
        """A close was answered before all was placed."""
        self._kept = Recipe()
        """What the tree has of the file while its stream goes on (its last chunk goes through it again)."""
        self._refused = -1
        """Where a write was refused and not made good since; what came before it is not the whole."""
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
        return self._row_bytes > 0

    @property
    def is_streamed(self) -> bool:
        """Whether it is a state that was written in order, so that its readers read it so, too.

        Who wrote it through a mapping will map it again, and the kernel refuses to
        share a mapping of a file that is open for direct I/O.
        """
        return self.is_state and bool(json.loads(self._about or b"{}").get("in_order", True))

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
            or self._failed
            or self._store.writer.failed
            or self._refused >= 0
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
                    self._refused = offset
                raise
            if offset <= self._refused < offset + size:
                self._refused = -1
            return size

    async def _write_locked(self, offset: int, data: bytes) -> int:
        if offset + len(data) > MAX_SIZE:
            raise OSError(errno.EFBIG, "file too large")
        self._check_failed()
        if self._stream is None and offset == self.size and not self._overlay:
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
            await self._append(self._stream, data)
            return len(data)
        await self._settle()
        await self._upkeep.make_room(len(data))
        self._store.queued -= len(data)
        self._overlay.write(offset, data)
        self.size = max(self.size, offset + len(data))
        self._touch()
        if self._weigh() > self._fold_at:
            await self._fold()
        return len(data)

    def _weigh(self) -> int:
        """Bytes of memory that the overlay takes; the store is told."""
        self._store.scattered += self._overlay.cost - self._weight
        self._weight = self._overlay.cost
        return self._weight

    @property
    def _fold_at(self) -> int:
        """The weight that an overlay may have; many share about twice what one may have."""
        most = min(_FOLD_AT, self._store.budget.index // 4)
        return max(most // 16, min(most, 2 * most - self._store.scattered))

    async def _append(self, stream: Stream, data: bytes) -> None:
        if not stream.has_credit(len(data)) and not stream.reserve(len(data)):
            await stream.drain()  # what waits counts twice while it is placed, and may be shared
            if not stream.reserve(len(data)):
                await self._upkeep.make_room(len(data))
                stream.reserved(len(data))
        await self._take_in(stream, data)

    async def _take_in(self, stream: Stream, data: bytes) -> None:
        """Queue ``data``, for which room is reserved."""
        if self._upkeep.is_low():
            self._upkeep.wake()
        self._touch()
        stream.put(data)
        self.size = stream.end
        await stream.wait_for_space()
        if stream.failed:
            self._fail(stream.failed)
        missing = stream.missing()
        if missing and missing > self._upkeep.attainable():
            # Better now than when everything else has been evicted for its sake.
            log.warning("inode %d: a state of %d more bytes does not fit the store", self._ino, missing)
            self._fail(errno.ENOSPC)

    def _touch(self) -> None:
        self.version += 1
        self._dirty = True
        self._torn = False
        self.mtime = self.ctime = clock()

    def _fail(self, error: int) -> None:
        self._failed = error
        self._check_failed()

    def _check_failed(self) -> None:
        if self._failed:
            raise OSError(self._failed, "not stored")
        if self._store.writer.failed:
            raise StoreFailed(self._store.writer.failed)

    async def _start_stream(self) -> None:
        """A stream from the end; a short last chunk goes through it again, so that appends do not crumble."""
        start = self._recipe.size
        again: Buffer = b""
        if start and not self.is_state:
            last = next(self._recipe.extents(start - 1, start))
            if last.length < _REFEED and last.kind != recipe.BAND:
                again = await self._fetch(self._recipe, last.start, last.length)
                await self._upkeep.make_room(len(again))
                start = last.start
        hurry = self._upkeep.are_synced(self._store.tree.get(self._ino).parent)
        self._kept = self._recipe
        self._recipe = self._recipe.cut(start)
        self._stream = Stream(self._store, self._nursery, self._upkeep.placing, start, hurry=hurry)
        if again:
            self._stream.reserved(len(again))
            self._stream.put(bytes(again))

    async def _settle(self) -> None:
        """End the stream; the recipe then covers the whole file but for the overlay."""
        stream = self._stream
        if stream is None:
            return
        await stream.finish()
        self._collect(stream)
        self._stream = None  # not before: who reads meanwhile must wait for what is being placed
        if stream.start == 0:
            self._row_bytes, self._about = stream.row_bytes, versions.about(stream)
            if stream.row_bytes > _TELLING:
                self._store.note_writes(small=stream.small_writes)
        else:
            self._row_bytes += stream.row_bytes
        if stream.failed:
            if self._recipe.size < self._kept.size:
                self._recipe = self._kept
            self.size = self._recipe.size
            self._fail(stream.failed)

    def _collect(self, stream: Stream) -> None:
        self._recipe = self._recipe.append(stream.take())
        self._holds += stream.take_holds()

    async def _fold(self) -> None:
        """Place the overlay's bytes as plain blocks."""
        runs = self._overlay.runs()  # which stay until they are placed: for readers, and if they cannot be
        if not runs:
            return
        edits: list[tuple[int, int, recipe.Records]] = []
        await self._index_room(_RUN_ENTRIES * len(runs))

        def place() -> None:
            placer = self._store.placer()
            try:
                for start, data in runs:
                    placer.place_bytes(bytes(data))
                    edits.append((start, start + len(data), placer.take()))
                    self._store.write_behind()
            finally:
                self._holds.extend(placer.take_holds())

        try:
            await trio.to_thread.run_sync(place)
        except StoreFull:
            self._fail(errno.ENOSPC)
        self._folded += sum(len(data) for _, data in runs)
        self._recipe = self._recipe.replace(edits)
        self._overlay = Overlay()
        self._weigh()

    async def _index_room(self, size: int) -> None:
        try:
            await self._upkeep.make_index_room(size)
        except (OSError, StoreFull):
            self._fail(errno.ENOSPC)

    async def truncate(self, size: int) -> None:
        """Make the file ``size`` bytes long."""
        if size > MAX_SIZE:
            raise OSError(errno.EFBIG, "file too large")
        async with self._lock:
            if size == 0:
                await self._empty()
            else:
                await self._settle()
                self._overlay.cut(size, max(size, self.size))
                self._weigh()
                if size > self._recipe.size and self._overlay:
                    await self._fold()
                self._recipe = self._recipe.cut(size)
            self.size = size
            self._touch()

    async def _empty(self) -> None:
        self._upkeep.forget_lost(self._ino)
        inode = self._store.tree.get(self._ino)
        if self._base is None and inode.size and inode.nlink:
            kept = self._store.tree.recipe(self._ino)
            about = self._store.tree.about(self._ino)
            self._base = Version(kept, inode.row_bytes, about, inode.mtime)
        if self._stream is not None:
            await self._stream.abandon()
            self._holds += self._stream.take_holds()
            self._stream = None
        self._overlay = Overlay()
        self._weigh()
        self._recipe = Recipe()
        self._row_bytes, self._about, self._failed, self._folded = 0, None, 0, 0
        self._refused = -1

    # -- reading

    def read_now(self, offset: int, into: memoryview) -> tuple[Now, int]:
        """Fill ``into`` from ``offset`` on if that needs no waiting: how that went, and bytes read."""
        if self._stream is not None or self._overlay:
            return Now.OTHERWISE, 0
        into = into[: max(0, self._recipe.size - offset)]
        now = self._store.read_cached(self._recipe, offset, into)
        if now is Now.DONE:
            self._store.index.active.counters["read_bytes"] += len(into)
        return now, len(into)

    async def will_need(self, start: int, stop: int) -> None:
        """Have the disk read bytes start … stop, which somebody is about to ask for."""
        try:
            await trio.to_thread.run_sync(self._store.will_need, self._recipe, start, stop)
        except Exception:  # in a task of its own it would end the mount; the read itself will tell
            log.debug("the disk could not be told", exc_info=True)

    async def read(self, offset: int, size: int) -> Buffer:
        """Bytes offset … offset + size, fewer at the end; OSError(EIO) if a block is damaged."""
        if self._stream is None and not self._overlay:
            return await self._fetch(self._recipe, offset, size)
        async with self._lock:
            tail = b""
            if self._stream is not None:
                await self._stream.drain()
                self._collect(self._stream)
                tail = self._stream.held_bytes()
            stop = min(offset + size, self.size)
            if offset >= stop:
                return b""
            out = bytearray(stop - offset)
            found = await self._fetch(self._recipe, offset, stop - offset)
            out[: len(found)] = found
            at = max(offset, self._recipe.size)
            if tail and at < stop:
                part = tail[at - self._recipe.size : stop - self._recipe.size]
                out[at - offset : at - offset + len(part)] = part
            self._overlay.patch(offset, out)
            return out

    async def _fetch(self, source: Recipe, offset: int, size: int) -> Buffer:
        self._store.index.active.counters["read_bytes"] += max(0, min(size, source.size - offset))
        try:
            if size <= _IN_THREAD:
                return self._store.read(source, offset, size)
            return await trio.to_thread.run_sync(self._store.read, source, offset, size)
        except Damaged as error:
            log.error("inode %d at %d: %s", self._ino, offset, error)
            raise OSError(errno.EIO, "damaged") from None

    # -- into the tree

    async def flush(self, *, killed: bool = False) -> None:
        """A close: take everything in, report what failed, make it the tree's version.

        Room for what is queued is reserved, so unless that is too much for the memory
        of the daemon, it is taken in behind the client's back.

        ``killed``: a signal ended the process, and the close is the kernel's. A torn
        save over an older version is then left for `release` to judge.
        """
        self._killed = self._killed or killed
        stream = self._stream
        if (
            stream is None
            or stream.failed
            or self._failed
            or self._overlay
            or self._refused >= 0
            or self._lock.locked()
            or self._store.queued > self._store.budget.queue
        ):
            await self._flush()
        else:
            self._answered = True
            self._nursery.start_soon(self._flush_behind, self._upkeep.follow())

    async def _flush_behind(self, done: trio.Event) -> None:
        end = self.size
        try:
            await self._flush()
        except OSError as error:  # `release` meets it again
            if self._stream is not None or self._is_lost(end):
                self._upkeep.note_untold(error.errno or errno.EIO)
            log.error("inode %d: %s", self._ino, error)
        except Exception:  # in a task of its own it would end the mount
            log.exception("inode %d: closing failed", self._ino)
        finally:
            self._upkeep.followed(done)

    def _is_lost(self, end: int) -> bool:
        """After a failure: whether bytes before ``end`` are missing, or the old version comes back."""
        return self._recipe.size < end or self._base is not None

    async def _flush(self) -> None:
        async with self._lock:
            if not self._dirty:
                return
            if self._stream is not None:
                await self._stream.drain()
                if self._stream.failed and self._base is not None:
                    self._fail(self._stream.failed)  # `release` brings the old version back
                if versions.is_torn(self._stream, self._base, self.size) and not self._stream.failed:
                    if self._base is None or not self._killed:
                        await self._persist()
                    return
            stream = self._stream
            await self._settle()
            self._torn = versions.is_torn(stream, self._base, self.size)
            if self._torn and self._killed and self._base is not None:
                return  # only its end told so
            await self._persist()

    async def sync(self) -> Version | None:
        """Make what was written so far the tree's version, to be committed next.

        The version that a torn save would bring back still.
        """
        async with self._lock:
            if self._dirty:
                self._check_failed()
                await self._persist()
            return self._base

    async def fsync(self) -> None:
        """Make what was written so far durable. Raises OSError or StoreFull.

        Whoever is told so may build on it: from here on a torn save goes back to
        nothing older.
        """
        if self._stream is not None:
            self._upkeep.note_sync(self._store.tree.get(self._ino).parent)
        base = await self.sync()
        await self._upkeep.sync()
        if base is not None and base is self._base:
            self._store.blocks.release(self._base_holds)
            self._base, self._base_holds = None, []

    async def release(self, *, keep_torn: bool, killed: bool = False) -> bool:
        """The last writer has gone. True if the file is not what was written: some of it
        was refused, or the old version was put back in place of a torn one.

        A state that ends too early counts as torn only if its writer was killed: who
        closes a file like that means it, as llama.cpp's own test of damaged states does.
        """
        async with self._lock:
            killed = killed or self._killed
            end = self.size
            failed, torn = bool(self._failed) or self._refused >= 0, self._torn
            stream = self._stream
            try:
                try:
                    await self._settle()
                except OSError:
                    failed = True
                if self._failed and self._answered and self._is_lost(end):
                    self._upkeep.note_untold(self._failed)
                    if self._base is None or keep_torn:
                        self._upkeep.note_lost(self._ino, self._failed)
                torn = torn or versions.is_torn(stream, self._base, self.size)
                if (failed or (torn and killed)) and self._base is not None and not keep_torn:
                    self._restore_base()
                    return True
                if self._folded > self._recipe.size // 2 and self._folded > 1 << 20:
                    async with self._upkeep.recutting:
                        await self._recut()
                    self._dirty = True
                if self._dirty:
                    await self._persist()
                return failed
            finally:
                self._store.blocks.release(self._base_holds)
                self._base_holds = []
                self._base = None
                self._failed = 0
                self._torn = self._killed = self._answered = False
                self._refused = -1

    def _restore_base(self) -> None:
        base = self._base
        assert base is not None
        log.warning("inode %d: the save was torn; its previous version is kept", self._ino)
        self._store.index.active.counters["torn_saves"] += 1
        self._recipe, self._row_bytes, self._about = base.recipe, base.row_bytes, base.about
        self._overlay = Overlay()
        self._weigh()
        self.version += 1
        self.size, self.mtime = base.recipe.size, base.mtime
        # They may be victims by now, and must stay until this version is committed.
        self._holds += self._base_holds
        self._base_holds = []
        self._to_tree(self._recipe)

    async def _persist(self) -> None:
        """Write recipe, size and times into the tree's pending layer."""
        await self._fold()
        current = self._recipe
        if self._stream is not None:
            await self._stream.drain()
            if self._stream.failed:
                self._fail(self._stream.failed)
            self._collect(self._stream)
            current = self._recipe
            held = self._stream.held_bytes()
            if held:
                placer = self._store.placer()
                placer.place_bytes(held)
                current = current.append(placer.take())
                self._holds += placer.take_holds()
            self._kept = current
        grown = len(current) - len(self._store.tree.recipe(self._ino))
        if grown > 0:
            await self._index_room(_RECORD_BYTES * grown)
        if self._base is not None and not self._base_holds:
            # The tree is about to let go of its blocks, and `release` may want them back.
            ids = self._base.recipe.blocks()[0].tolist()
            self._base_holds = [block for block in ids if self._store.blocks.hold(block)]
        self._to_tree(current)

    def _to_tree(self, current: Recipe) -> None:
        tree = self._store.tree
        tree.set_content(self._ino, current, self._row_bytes, self._about)
        tree.change(self._ino, mtime=self.mtime, ctime=max(self.ctime, tree.get(self._ino).ctime))
        tree.touch(self._ino)
        self._store.index.active.holds.append(self._holds)
        self._holds = []
        # What a stream holds back is to be cut yet, and only its end says what the file is.
        self._dirty = self._stream is not None

    async def _recut(self) -> None:
        """Cut a file that was written out of order along its rows, as if it had come in order."""
        stream = Stream(self._store, self._nursery, self._upkeep.placing, 0)
        source = self._recipe
        for start in range(0, source.size, 4 << 20):
            try:
                data = bytes(await self._fetch(source, start, 4 << 20))
            except OSError:
                await stream.abandon()
                self._holds += stream.take_holds()
                return
            if not stream.has_credit(len(data)) and not stream.reserve(len(data)):
                await stream.abandon()
                self._holds += stream.take_holds()
                return
            stream.put(data)
            await stream.wait_for_space()
        await stream.finish()
        self._holds += stream.take_holds()
        if not stream.failed:
            self._recipe = Recipe(stream.take())
            self._row_bytes, self._about = stream.row_bytes, versions.about(stream, in_order=False)
        self._folded = 0

    async def drop(self) -> None:
        """Let go of everything; the content is not used any more."""
        if self._stream is not None:
            await self._stream.abandon()
            self._holds += self._stream.take_holds()
            self._stream = None
        self._store.blocks.release(self._holds + self._base_holds)
        self._holds, self._base_holds = [], []
        self._overlay = Overlay()
        self._weigh()
        self._dirty = False
