"""An open store: the one writer's view of it, used by the daemon and by offline commands."""

import contextlib
import errno
import json
import logging
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import lmdb

from cachefs.errors import UserError
from cachefs.sizes import MIB, default_max_bytes, format_size
from cachefs.states.pieces import Buffer
from cachefs.store import assemble, clean, home, reopen, shrink
from cachefs.store.blocks import Blocks, Now
from cachefs.store.codec import Packer
from cachefs.store.errors import Damaged, StoreFull, StoreRefused
from cachefs.store.evict import Evictor, Member
from cachefs.store.index import Index
from cachefs.store.layout import Budget
from cachefs.store.place import Placer
from cachefs.store.recipe import Recipe
from cachefs.store.recompress import Recompressor
from cachefs.store.records import VolumeRow, be, int_of
from cachefs.store.replace import settle
from cachefs.store.tree import PIN, ROOT, Tree
from cachefs.store.volumes import OnDisk, Volumes
from cachefs.store.writer import Writer

log = logging.getLogger("cachefs.store")

INDEX_FULL = 0.50
"""Part of the index that may be used before victims and then units go for its sake. LMDB
writes a changed page anew, so a commit of a thousand digests may need as many pages again."""

_SMALL_WRITES = json.dumps({"small_writes": True}).encode()

INDEX_LIMIT = 0.60
"""Part of the index beyond which nothing new is taken: no names, attributes or recipes.
What eviction frees must be committed, too, and that takes pages."""

_BLOCK_ENTRIES = 256
"""Bytes that a block takes in the index's tables, about."""

_PENDING_LIMIT = 16 * MIB
"""Bytes of the tree's changes that may wait in memory for their commit."""

_LOOK_EVERY = 0.2
"""Seconds between looks at how full the disk and the index are."""


class Store:
    """A store opened for writing.

    The tree, and everything that changes it, belongs to one thread (the event
    loop's); `Writer`, `Blocks` and `read` may be used from any.
    """

    def __init__(self, path: Path, lock: home.Lock, budget: Budget, index: Index, volumes: Volumes) -> None:
        self.path = path
        self.max_bytes = budget.max_bytes
        self.budget = budget
        self.shrunk = 0
        """Logical bytes evicted at the start because the maximum was lowered."""
        self._lock = lock
        self._walked = 0.0
        self.index = index
        self.volumes = volumes
        self.blocks = Blocks(index, volumes)
        self.writer = Writer(index, volumes, self.blocks, budget)
        self.tree = Tree(index)
        self.busy: Callable[[int], bool] = _never
        self.evictor = Evictor(self.tree, lambda ino: self.busy(ino))
        self._behind = threading.Lock()
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="write-behind")
        self._batch: Future[None] | None = None
        self._on_disk: OnDisk | None = None
        self._look_again = 0.0
        self._index_used = 0.0
        self._look_at_index = 0.0
        self._pinned_bytes = 0
        self._pins_seen = -1
        self._look_at_pins = 0.0
        self.queued = 0
        """Bytes accepted from clients and not placed yet."""
        self.scattered = 0
        """Bytes of memory that hold what was written out of order, in all open files."""

    # -- opening and closing

    @classmethod
    def open(cls, path: Path, max_bytes: int | None = None, *, mountpoint: str = "") -> "Store":
        """Open a store, made if ``path`` is empty or missing; ``max_bytes`` None: as it was.

        Raises UserError in one line: not a store, another user's, written by a newer
        version, in use, no room on the disk.
        """
        path = path.absolute()
        made = home.prepare(path)
        lock = home.Lock(path, mountpoint)
        try:
            return cls._open(path, lock, max_bytes)
        except lmdb.Error as error:
            lock.release()
            hint = "the disk is full" if "space" in str(error).lower() else str(error)
            raise StoreRefused(f"{path}: cannot be opened: {hint}") from None
        except OSError as error:
            lock.release()
            reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror
            if error.errno == errno.EIO:
                reason = f"{reason}; 'cachefs check --deep --repair {path}' saves what can be saved"
            raise StoreRefused(f"{path}: cannot be {'made' if made else 'opened'}: {reason}") from None
        except StoreFull as error:
            lock.release()
            raise StoreRefused(f"{path}: cannot be opened: no room in it: {error}") from None
        except (Damaged, ValueError) as error:
            lock.release()
            raise StoreRefused(
                f"{path}: the index is damaged ({error}); 'cachefs check --deep --repair {path}' "
                "saves what can be saved"
            ) from None
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _open(cls, path: Path, lock: home.Lock, max_bytes: int | None) -> "Store":
        walked = clean.require_sound(path)
        clean.forget(path)
        home.upgrade(path)
        remembered = _remembered(path)
        bound = max_bytes or remembered or default_max_bytes(path)
        disk = os.statvfs(path)
        budget = Budget.of(bound, disk.f_bavail * disk.f_frsize + home.disk_bytes(path))
        (path / "index").mkdir(mode=0o700, exist_ok=True)
        shrink.compact_index(path / "index", budget.index)
        (path / "volumes").mkdir(mode=0o700, exist_ok=True)
        with contextlib.ExitStack() as undo:
            index = Index(path / "index", budget.index)
            undo.callback(index.close)
            with index.snapshot() as txn:
                rows = {int_of(k): VolumeRow.unpack(value) for k, value in txn.cursor(index.dbs["volumes"])}
            volumes = Volumes(path / "volumes", budget, shrink.fit_maps(path / "volumes", budget, rows))
            undo.callback(volumes.close)
            store = cls(path, lock, budget, index, volumes)
            store._walked = walked
            store._start()
            undo.pop_all()
        return store

    def _start(self) -> None:
        for volume in self.volumes.by_number.values():
            with contextlib.suppress(lmdb.Error):  # the disk is full: later then
                settle(volume, self.index)
        if swept := self.writer.sweep():
            log.info("deleted %d blocks that a crash had left unfinished", swept)
        for ino in self.tree.orphans():
            with contextlib.suppress(OSError):  # its row is damaged
                self.tree.release_orphan(ino)
        self.commit()
        if shrink.excess(self.writer) > 0:
            self._shrink()
        with self.index.env.begin(write=True) as txn:
            txn.put(b"max_bytes", json.dumps(self.max_bytes).encode(), db=self.index.dbs["meta"])

    def _shrink(self) -> None:
        log.info("more is stored than the maximum of %s allows: evicting", format_size(self.max_bytes))
        allowed = shrink.live_bytes_allowed(self.writer)
        too_much = StoreRefused(
            f"{self.path}: what is pinned in it does not fit into {format_size(self.max_bytes)}; "
            "unpin something, or give a larger --max-size"
        )
        if shrink.pinned_bytes(self.writer, self.tree) > allowed:
            raise too_much
        while self.volumes.used > allowed:
            if not self.writer.purge(self.volumes.used - allowed):
                evicted = self.evict(self.volumes.used - allowed)
                if not evicted:
                    break
                self.shrunk += sum(m.inode.size for unit in evicted for m in unit)
                self.commit()
        try:
            shrink.drop_volumes(self.writer)
        except StoreFull:
            raise too_much from None
        log.info("evicted %s to get below the maximum", format_size(self.shrunk))

    def compress(self, mode: str, level: int) -> Recompressor | None:
        """Choose when blocks are compressed (`MountConfig.compress`); what does it later, for ``idle``."""
        self.blocks.pack_chunks = mode != "off"
        packer = Packer(level)
        self.writer.packer = packer if mode == "always" else None
        return Recompressor(self.blocks, self.writer, packer, self._writing) if mode == "idle" else None

    def close(self) -> None:
        """Commit what is pending and let go of the store."""
        try:
            self._writing.shutdown()
            self.commit()
        finally:
            self.volumes.close()
            self.index.close()
            if self.writer.failed:
                self._drop_cached()
            elif not self.writer.met_failure and not self.blocks.met_damage:
                clean.mark(self.path, self._walked)
            self._lock.release()

    def _drop_cached(self) -> None:
        """After the disk failed, have the next opener see what it has; see `reopen`."""
        for path in (self.index.path, *(v.path for v in self.volumes.by_number.values())):
            with contextlib.suppress(OSError):
                reopen.drop_cached(path)

    # -- committing, from one thread

    def commit(self) -> None:
        """Write everything pending, durably. Raises StoreFull."""
        layer = self.index.freeze()
        if layer is None:
            self.writer.write_out()
            return
        committed = False
        try:
            self.writer.commit(layer)
            committed = True
        finally:
            self.index.thaw(committed=committed)
        for holds in layer.holds:
            self.blocks.release(holds)

    def write_behind(self) -> None:
        """Have a batch written out when one has gathered; raises StoreFull. Called by placing threads.

        A thread of its own writes while placing goes on. Placing waits for it only when
        the pool is full: a save of that size goes at the speed of memory.
        """
        pool, batch = self.blocks.pool, self.budget.batch
        while pool.footprint >= batch:
            with self._behind:
                if self._batch is not None and self._batch.done() and self._batch.exception() is not None:
                    self._batch = None  # that was an earlier save's, maybe long ago: try again
                if self._batch is None:
                    self._batch = self._writing.submit(self.writer.write_out)
                pending = self._batch
                if pending.done() or pool.footprint >= self.budget.pool:
                    try:
                        pending.result()
                    finally:
                        self._batch = None
                    continue
            return

    # -- room

    def room(self) -> int:
        """Bytes that can be written at once, without evicting a file.

        A margin is left out, so that commits of evictions always have room.
        """
        counters = self.writer.counters
        purgeable = counters["victim_bytes"] - self.blocks.revived_bytes
        pending = self.blocks.pool.footprint - self.writer.unnamed_bytes + self._queued_footprint()
        return min(self.volumes.free, self._disk_room()) + max(0, purgeable) - pending - self._margin

    def attainable(self) -> int:
        """Bytes that could be written if everything evictable went."""
        capacity = min(self.volumes.capacity, self.volumes.used + self._disk_room())
        return capacity - self._margin - self.unevictable_bytes()

    @property
    def _margin(self) -> int:
        return min(self.budget.batch, self.volumes.capacity // 16)

    def _disk_room(self) -> int:
        """Bytes that fit before the disk is full: free pages of the volumes, and the disk's own."""
        now = time.monotonic()
        if self._on_disk is None or now >= self._look_again:
            self._look_again = now + _LOOK_EVERY
            self._on_disk = self.volumes.on_disk()
        return self.volumes.disk_room(self._on_disk)

    def _queued_footprint(self) -> int:
        # Row groups of 128 to 256 KiB waste at most half a page each; small ones more.
        return self.queued + self.queued // 16

    def reserve(self, size: int) -> bool:
        """Take ``size`` bytes into account before they are queued; False if there is no room now."""
        if self.room() < size + size // 16:
            return False
        self.queued += size
        return True

    @property
    def low_water(self) -> int:
        """Eviction starts when less room than this is left, in bytes."""
        return min(4 * self.budget.batch, self.volumes.capacity // 8)

    def index_full(self) -> bool:
        return self.index.used() > INDEX_FULL

    def index_takes(self, size: int) -> bool:
        """Whether ``size`` bytes more of names, attributes or records can be pending in the index.

        They count twice: keys and values fill their pages by half to two thirds.
        """
        pending = self.index.pending
        if pending and pending + size > _PENDING_LIMIT:
            return False
        now = time.monotonic()
        if now >= self._look_at_index:
            self._look_at_index = now + _LOOK_EVERY
            self._index_used = self.index.used()
        pending += _BLOCK_ENTRIES * len(self.blocks.pool.by_id)
        return self._index_used + 2 * (pending + size) / self.budget.index <= INDEX_LIMIT

    def look_again(self) -> None:
        """Forget what the disk and the index looked like."""
        self._look_again = self._look_at_index = 0.0

    def evict(self, wanted: int, *, empty: bool = False) -> list[list[Member]]:
        """Evict units of about ``wanted`` logical bytes; they free space with the next commit.

        ``empty``: those of no bytes at all will do, for the room they take in the index.
        """
        units = self.evictor.choose(max(1, wanted), empty=empty)
        for unit in units:
            self.evictor.evict(unit)
        return units

    def unevictable_bytes(self) -> int:
        """Logical bytes of pinned units, an upper bound of what eviction must leave for their sake.

        Every statfs asks. Looking at thousands of units takes longer than a request may: how sidecars
        grew meanwhile shows a little later, a change of the pinned files at once.
        """
        started = time.monotonic()
        pins = self.tree.pin_changes
        if pins != self._pins_seen or started >= self._look_at_pins:
            self._pinned_bytes, self._pins_seen = self._pinned_units_bytes(), pins
            ended = time.monotonic()
            self._look_at_pins = ended + max(_LOOK_EVERY, 20 * (ended - started))
        return self._pinned_bytes

    def _pinned_units_bytes(self) -> int:
        members: dict[int, int] = {}
        for ino in self.tree.pinned:
            with contextlib.suppress(OSError):
                inode = self.tree.get(ino)
                unit = self.evictor.unit(inode.parent, self.tree.name_of(inode))
                members |= {member.ino: member.inode.size for member in unit}
        return sum(members.values())

    # -- content

    @property
    def small_writes(self) -> bool:
        """Whether the last state was saved in tens of thousands of small writes."""
        return self.tree.about(ROOT) == _SMALL_WRITES

    def note_writes(self, *, small: bool) -> None:
        if small != self.small_writes:
            self.index.put("about", be(ROOT), _SMALL_WRITES if small else b"{}")

    def placer(self) -> Placer:
        return Placer(self.blocks)

    def read(self, recipe: Recipe, start: int, size: int) -> Buffer:
        """See `assemble.read`."""
        return assemble.read(self.blocks, recipe, start, size)

    def read_cached(self, recipe: Recipe, start: int, into: memoryview) -> Now:
        """See `assemble.read_cached`."""
        return assemble.read_cached(self.blocks, recipe, start, into)

    def will_need(self, recipe: Recipe, start: int, stop: int) -> None:
        """See `assemble.will_need`."""
        assemble.will_need(self.blocks, recipe, start, stop)

    # -- offline commands

    def resolve(self, name: str) -> tuple[int, bytes, int]:
        """(parent, name, inode number) of a path in the store. Raises UserError."""
        parts = [part for part in name.encode(errors="surrogateescape").split(b"/") if part]
        parent = ROOT
        found = None
        for i, part in enumerate(parts):
            found = self.tree.lookup(parent, part)
            if found is None:
                break
            if i < len(parts) - 1:
                parent = found.ino
        if not parts or found is None:
            raise UserError(f"{name}: no such entry in {self.path}; 'cachefs ls {self.path}' lists them")
        return parent, parts[-1], found.ino

    def pin(self, name: str, on: bool) -> None:
        """Pin or unpin an entry of an unmounted store. Raises UserError."""
        _, _, ino = self.resolve(name)
        if on:
            self.tree.set_xattr(ino, PIN, b"1")
        elif self.tree.xattr(ino, PIN) is not None:
            self.tree.remove_xattr(ino, PIN)
        self.commit()

    def remove(self, name: str) -> None:
        """Remove a file of an unmounted store. Raises UserError."""
        parent, last, ino = self.resolve(name)
        try:
            self.tree.unlink(parent, last)
        except IsADirectoryError:
            raise UserError(f"{name}: is a directory; name the files in it") from None
        self.tree.release_orphan(ino)
        self.commit()

    def remove_all(self) -> None:
        """Remove every file of an unmounted store, and leave nothing of them in its files.

        Directories stay. Raises StoreRefused where damaged rows are in the way; then nothing was changed.
        """
        try:
            inodes = {ino: self.tree.get(ino) for _, ino in self.tree.walk()}
            names = {ino: self.tree.name_of(inode) for ino, inode in inodes.items()}
        except OSError as error:
            raise StoreRefused(
                f"{self.path}: {error.strerror}; 'cachefs check --deep --repair {self.path}', then once more"
            ) from None
        for ino, inode in inodes.items():
            if stat.S_ISREG(inode.mode):
                self.tree.unlink(inode.parent, names[ino])
                self.tree.release_orphan(ino)
        self.commit()
        shrink.empty(self.writer)
        self.index.close()
        try:
            shrink.rewrite_index(self.index.path, self.budget.index)
        finally:
            self.index.open()

    def counters(self) -> Counter[str]:
        """Statistics as of now, pending changes included."""
        total = Counter(self.writer.counters)
        total.update(self.index.active.counters)
        if self.index.frozen is not None:
            total.update(self.index.frozen.counters)
        return total


def _never(ino: int) -> bool:
    return False


def _remembered(path: Path) -> int | None:
    """The maximum that an existing store had."""
    data = path / "index" / "data.mdb"
    if not data.exists() or not data.stat().st_size:  # empty: a crash while the store was made
        return None
    with lmdb.open(str(path / "index"), readonly=True, max_dbs=64) as env:
        try:
            meta = env.open_db(b"meta", create=False)
        except lmdb.NotFoundError:
            return None
        with env.begin() as txn:
            value = txn.get(b"max_bytes", db=meta)
    return int(json.loads(value)) if value else None
