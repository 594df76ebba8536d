"""What goes on beside the requests: commits, eviction ahead of need, room for writers.

Runs in the event loop; the disk is waited for in threads. One commit at a time;
whoever needs one waits for the next to end.
"""

import errno
import logging
from collections.abc import Callable

import trio

from cachefs.mount.allocator import give_back, prime
from cachefs.mount.scrub import Scrub
from cachefs.store import Store, StoreFailed, StoreFull
from cachefs.store.evict import Member

log = logging.getLogger("cachefs.upkeep")

COMMIT_EVERY = 1.0
"""Seconds between commits of what nobody synced."""

_GIVE_BACK_EVERY = 300
"""Seconds without a commit after which, and then again, freed memory is given back."""
_UNITS_A_COMMIT = 2048
_DIRECTORIES = 1024
"""Directories remembered whose files are synced when they are written."""

Evicted = Callable[[Member], None]


class Upkeep:
    """Commits, evicts and scrubs for one mounted store. ``evicted`` is told of every file that went."""

    def __init__(self, store: Store, evicted: Evicted, scrub_age: float = 0) -> None:
        self._store = store
        self._scrub = Scrub(store, scrub_age)
        self._evicted = evicted
        self._committing = trio.Lock()
        self._making = trio.Lock()
        self.placing = trio.Lock()
        """Held by the stream that is placing; first come, first served."""
        self.recutting = trio.Lock()
        """Held by who cuts a whole file again: many at once would take memory, and be no faster."""
        self._wake = trio.Event()
        self._complained = False
        self._behind: set[trio.Event] = set()
        self._synced: set[int] = set()
        self._lost: dict[int, int] = {}
        self._untold = 0

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._commit_now_and_then)
            nursery.start_soon(self._evict_ahead)
            nursery.start_soon(self._scrub.run)
            await trio.to_thread.run_sync(prime, self._store.budget.queue)

    # -- commits

    def note_sync(self, directory: int) -> None:
        """Remember that who writes files in this directory syncs them."""
        if len(self._synced) >= _DIRECTORIES:
            self._synced.clear()
        self._synced.add(directory)

    def are_synced(self, directory: int) -> bool:
        return directory in self._synced

    def follow(self) -> trio.Event:
        """Note that something goes on that a client was told is done; `followed` ends it."""
        done = trio.Event()
        self._behind.add(done)
        return done

    def followed(self, done: trio.Event) -> None:
        self._behind.remove(done)
        done.set()

    def note_untold(self, error: int) -> None:
        """Something failed whose close had been answered: the next sync says so."""
        self._untold = error

    def note_lost(self, ino: int, error: int) -> None:
        """A file lacks bytes that its writer believes to be stored: it must not replace another."""
        self._lost[ino] = error

    def lost(self, ino: int) -> int:
        """The errno of what a file lost, 0 if nothing."""
        return self._lost.get(ino, 0)

    def forget_lost(self, ino: int) -> None:
        self._lost.pop(ino, None)

    async def settle(self) -> None:
        """Make durable all that clients were told is done. Raises StoreFull or StoreFailed."""
        for done in list(self._behind):
            await done.wait()
        await self.commit()

    async def sync(self) -> None:
        """The same for a client that builds on it: OSError, too, once where some of it is lost."""
        await self.settle()
        error, self._untold = self._untold, 0
        if error:
            raise OSError(error, "a file that was closed before could not be stored")

    async def commit(self) -> None:
        """Make all that is in the tree durable. Raises StoreFull or StoreFailed."""
        store = self._store
        async with self._committing:
            layer = store.index.freeze()
            if layer is None:
                return
            committed = False
            try:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(store.writer.commit, layer)
                committed = True
            finally:
                store.index.thaw(committed=committed)
            for holds in layer.holds:
                store.blocks.release(holds)

    async def _commit_now_and_then(self) -> None:
        idle = 0
        while True:
            await trio.sleep(COMMIT_EVERY)
            idle += 1
            if idle % _GIVE_BACK_EVERY == 0:
                await trio.to_thread.run_sync(give_back)
            try:
                if self._store.writer.failed:
                    await trio.to_thread.run_sync(self._store.writer.probe)
                if self._store.index.active:
                    idle = 0
                    await self.commit()
                    if self._store.index_full():
                        self.wake()
                elif self._store.blocks.pool.by_id or self._store.blocks.noted:
                    await trio.to_thread.run_sync(self._store.writer.write_out)
                self._complained = False
            except StoreFull as error:
                if not self._complained:
                    log.error("cannot commit, will go on trying: %s", error)
                self._complained = True
                self.wake()
            except StoreFailed:
                log.debug("cannot commit, will go on trying")
            except Exception:  # it would end the mount
                log.exception("cannot commit, will go on trying")

    # -- room

    def is_low(self) -> bool:
        return self._store.room() < self._store.low_water // 2

    def wake(self) -> None:
        """Let eviction look for work."""
        self._wake.set()

    def attainable(self) -> int:
        """Bytes that could be written if everything evictable went."""
        return self._store.attainable()

    async def make_room(self, size: int) -> None:
        """Reserve ``size`` bytes, evicting what it takes. OSError(ENOSPC) when that is not enough.

        StoreFailed when the disk is broken.
        """
        store = self._store
        while not store.reserve(size):
            async with self._making:
                if store.reserve(size):
                    return
                evicted = await self._evict(size + size // 8 + store.low_water - store.room())
                # Even with nothing to evict the commit may have freed what was just unlinked.
                if not evicted and not store.reserve(size):
                    raise OSError(errno.ENOSPC, "no space left")
                if not evicted:
                    return

    async def make_index_room(self, size: int) -> None:
        """Wait until the index can take ``size`` bytes more, evicting what it takes.

        OSError(ENOSPC) when that is not enough.
        """
        store = self._store
        while not store.index_takes(size):
            async with self._making:
                await self.commit()
                store.look_again()
                if store.index_takes(size):
                    return
                if await trio.to_thread.run_sync(store.writer.purge, store.low_water):
                    continue
                if not await self._evict(store.low_water // 4, empty=True):
                    raise OSError(errno.ENOSPC, "the index is full")

    async def _evict(self, wanted: int, *, empty: bool = False) -> bool:
        """Evict units of about ``wanted`` bytes and commit; False if none could go or the disk refused."""
        units: list[list[Member]] = []
        while lot := self._store.evict(wanted, empty=empty):
            units += lot
            for member in (member for unit in lot for member in unit):
                self._evicted(member)
                wanted -= member.inode.size
            if wanted <= 0 or len(units) >= _UNITS_A_COMMIT:
                break
            await trio.lowlevel.checkpoint()
        try:
            await self.commit()
        except StoreFull as error:
            log.error("eviction could not be committed: %s", error)
            return False
        if units:
            log.info("evicted %d units", len(units))
        return bool(units)

    async def _evict_ahead(self) -> None:
        while True:
            with trio.move_on_after(5):
                await self._wake.wait()
            self._wake = trio.Event()
            if self._store.writer.failed:
                continue
            try:
                if not await self._evict_while_low():
                    await trio.sleep(COMMIT_EVERY)  # each write would have everything looked through again
            except StoreFailed:
                await trio.sleep(COMMIT_EVERY)
            except Exception:  # it would end the mount
                log.exception("evicting failed")
                await trio.sleep(COMMIT_EVERY)

    async def _evict_while_low(self) -> bool:
        """False if it stays low, because nothing may go."""
        store = self._store
        while True:
            # Victims take room in the index, too; files need only go if that is not enough.
            full = await trio.to_thread.run_sync(store.index_full)
            if full:
                if await trio.to_thread.run_sync(store.writer.purge, store.low_water):
                    continue
            elif not self.is_low():
                break
            async with self._making:
                short = max(store.low_water - store.room(), store.low_water // 4)
                if not await self._evict(short, empty=full):
                    return False
        # Victims are deleted here rather than when a writer's batch waits for their space.
        spare = min(2 * store.budget.batch, store.low_water)
        if store.volumes.free < spare:
            await trio.to_thread.run_sync(store.writer.purge, spare - store.volumes.free)
        return True
