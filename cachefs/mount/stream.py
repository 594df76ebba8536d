"""A save in progress: bytes written in order, cut and placed behind the writer's back.

`Stream.put` queues the kernel's buffer and returns. When the queue is full, a worker
thread cuts, hashes and compares a share of what has gathered and, when a batch of new
blocks is full, has it written; the writer waits meanwhile. What is queued when the file is
closed follows behind: a state that fits into the queue is saved at the transport's speed.

That the two take turns is on purpose. Both need the interpreter, and handing it
back and forth for each request took longer than the work: a save of 80 MB went at
0.9 GB/s side by side, at 1.3 by turns (medians of six, 2 cores).
"""

import errno
import logging
from collections import deque

import trio

from cachefs.mount.upkeep import Upkeep
from cachefs.states import Cutter, Report
from cachefs.store import Store, StoreFailed, StoreFull, recipe
from cachefs.store.place import Placer

log = logging.getLogger("cachefs.stream")

INLINE_LIMIT = 64 << 10
"""Up to this many bytes are placed at once, in the event loop: a thread costs more."""
TURN = 24 << 20
"""Bytes placed while the writer waits; fewer make more turns, more make longer waits."""
_PAGE = 4096
CREDIT = 2 << 20
"""Most bytes reserved at a time, so that a small write need not ask the store for room."""


class Stream:
    """Bytes ``start`` … ``end`` of a file, on their way into blocks.

    ``hurry``: the writer will wait for the disk at the end, so what there is may as well be
    on its way to it. `Upkeep.placing` is held by whoever places: of two saves with a common
    beginning, the second must find the blocks of the first.

    ``failed`` is the errno of what could not be stored, 0 if all is well; nothing is taken
    after that.
    """

    def __init__(
        self, store: Store, upkeep: Upkeep, nursery: trio.Nursery, start: int, *, hurry: bool = False
    ) -> None:
        self._store = store
        self._upkeep = upkeep
        self._nursery = nursery
        self._cutter = Cutter()
        self._placer: Placer = store.placer()
        self._step = min(CREDIT, store.budget.queue // 4)
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._hurry = hurry
        self._credit = 0  # bytes reserved and not taken yet
        self._placed = 0  # bytes placed whose reservation was given back
        self._working = False
        self._moved = trio.Event()
        self.start = start
        self.end = start
        self.failed = 0

    # -- what the cutter says

    @property
    def torn(self) -> bool:
        return self._cutter.torn

    @property
    def row_bytes(self) -> int:
        return self._cutter.row_bytes

    @property
    def report(self) -> Report:
        return self._cutter.report

    @property
    def small_writes(self) -> bool:
        """Whether it is a state that llama.cpp writes value by value: one with transposed V."""
        return any(s.kind == "VT" for module in self.report.modules for s in module.sections)

    def held_bytes(self) -> bytes:
        """What the cutter holds back, at the stream's end; the queue must be empty."""
        return self._cutter.held_bytes()

    def missing(self) -> int:
        """New bytes that the state's headers promise still to come, by the share that was new so far."""
        promised = self._cutter.promised - (self.end - self.start)
        placed = self._placer.placed_bytes
        share = self._placer.new_bytes / placed if placed > 1 << 20 else 0.0
        return int(max(0, promised) * share)

    # -- taking bytes in

    @property
    def _limit(self) -> int:
        """Bytes that may wait here; many writers share about twice what one may have."""
        most = self._store.budget.queue
        if self._hurry:
            most = min(most, TURN)
        return max(most // 64, min(most, 2 * most - self._store.queued))

    def retract(self, offset: int, size: int) -> bool:
        """Take back the bytes from ``offset`` on, for ``size`` others that reach at least as far.

        Only the last few of those queued; False if they are gone, or there is no room for
        the others. The kernel writes a page of its cache that is not full yet, and later
        once more.
        """
        back = self.end - offset
        if not self._queue or not 0 <= back <= min(_PAGE, size, len(self._queue[-1])):
            return False
        if self._credit < size and not self.reserve(size):
            return False
        self._queue[-1] = self._queue[-1][: len(self._queue[-1]) - back]
        self._queued -= back
        self._credit += back
        self.end -= back
        return True

    def has_credit(self, size: int) -> bool:
        """Whether ``size`` bytes can be taken at once: room is reserved and the queue has space."""
        return self._credit >= size and self._queued <= self._limit

    def reserve(self, size: int) -> bool:
        """Reserve room for ``size`` bytes and, if there is some, for what is likely to follow.

        That is as much as came so far: thousands of small files that stay open must not hold the whole store.
        """
        for wish in (max(size, min(self._step, self.end - self.start)), size):
            if self._store.reserve(wish):
                self._credit += wish
                return True
        return False

    def reserved(self, size: int) -> None:
        """Note ``size`` bytes that were reserved for this stream."""
        self._credit += size

    async def make_room(self, size: int) -> None:
        """Reserve room for ``size`` bytes, evicting what it takes; raises as `Upkeep.make_room`."""
        if not self.has_credit(size) and not self.reserve(size):
            await self.drain()  # what waits counts twice while it is placed, and may be shared
            if not self.reserve(size):
                await self._upkeep.make_room(size)
                self.reserved(size)

    def put(self, data: bytes) -> None:
        """Queue ``data``, for which room was reserved."""
        self._queue.append(data)
        self._queued += len(data)
        self._credit -= len(data)
        self.end += len(data)
        if self._queued >= self._limit and not self._working:
            self._working = True
            self._nursery.start_soon(self._work)

    async def wait_for_space(self) -> None:
        """Until the queue is no longer full."""
        while self._queued > self._limit and not self.failed:
            if not self._working:  # the limit fell
                self._working = True
                self._nursery.start_soon(self._work)
            await self._moved.wait()

    async def _work(self) -> None:
        try:
            while self._queue and self._queued > max(0, self._limit - TURN):
                batch = self._take(TURN)
                await self._place_in_thread(batch)
                self._progress(batch)
        except Exception:  # it would end the mount
            log.exception("a save failed")
            self.failed = errno.EIO
        finally:
            self._working = False
            self._signal()

    def _take(self, most: int) -> list[bytes]:
        batch: list[bytes] = []
        while self._queue and most > 0:
            batch.append(self._queue.popleft())
            most -= len(batch[-1])
        return batch

    def _progress(self, batch: list[bytes]) -> None:
        self._queued -= sum(map(len, batch))
        self._account()
        self._signal()

    def _account(self) -> None:
        """Give back the reservation of what is placed by now: it counts as part of the pool."""
        placed = self._placer.placed_bytes - self._placed
        self._placed += placed
        self._store.queued -= placed

    def _signal(self) -> None:
        self._moved.set()
        self._moved = trio.Event()

    async def _place_in_thread(self, batch: list[bytes]) -> None:
        async with self._upkeep.placing:
            await trio.to_thread.run_sync(self._place, batch)

    def _place(self, batch: list[bytes]) -> None:
        if self.failed:
            return
        try:
            for data in batch:
                for piece in self._cutter.feed(data):
                    self._placer.place(piece)
                self._store.write_behind()
        except StoreFull as error:
            log.error("a save failed: %s", error)
            self.failed = errno.ENOSPC
        except StoreFailed:  # which is in the log once, for all saves
            self.failed = errno.EIO
        except Exception:  # in a task of its own it would end the mount
            log.exception("a save failed")
            self.failed = errno.EIO

    async def drain(self) -> None:
        """Wait until everything queued has gone through the cutter."""
        while self._working:
            await self._moved.wait()
        while self._queue:
            batch = self._take(TURN)
            if sum(map(len, batch)) <= INLINE_LIMIT:
                self._place(batch)
            else:
                await self._place_in_thread(batch)
            self._progress(batch)
        self._store.queued -= self._credit  # an idle writer keeps nothing from the others
        self._credit = 0

    async def finish(self) -> None:
        """Drain, and place what the cutter held back."""
        await self.drain()
        if not self.failed:
            try:
                for piece in self._cutter.finish():
                    self._placer.place(piece)
            except StoreFull:
                self.failed = errno.ENOSPC
            except Exception:
                log.exception("a save failed at its end")
                self.failed = errno.EIO
        self.close()

    async def abandon(self) -> None:
        """Stop; what was queued is thrown away."""
        self.failed = errno.ECANCELED
        await self.drain()
        self.close()

    def close(self) -> None:
        """Give back what is still reserved."""
        self._account()
        self._store.queued -= self._credit + self.end - self.start - self._placed
        self._credit, self._placed = 0, self.end - self.start

    def take(self) -> recipe.Records:
        """The records placed since the last call; nobody may be working."""
        return self._placer.take()

    def take_holds(self) -> list[int]:
        return self._placer.take_holds()
