"""Reading a recipe's bytes for the clients of a mount: at once, or in a thread where that would be long."""

import errno
import logging

import trio

from cachefs.states.pieces import Buffer
from cachefs.store import Damaged, Now, Store
from cachefs.store.recipe import Recipe

log = logging.getLogger("cachefs.fetch")

_IN_THREAD = 64 << 10


class Fetcher:
    """Reads recipes of one inode."""

    def __init__(self, store: Store, ino: int) -> None:
        self._store = store
        self._ino = ino

    def fetch_now(self, source: Recipe, offset: int, into: memoryview) -> tuple[Now, int]:
        """Fill ``into`` from ``offset`` on if that needs no waiting: how that went, and bytes read."""
        into = into[: max(0, source.size - offset)]
        now = self._store.read_cached(source, offset, into)
        if now is Now.DONE:
            self._store.index.active.counters["read_bytes"] += len(into)
        return now, len(into)

    async def fetch(self, source: Recipe, offset: int, size: int) -> Buffer:
        """Bytes offset … offset + size, fewer at the end; OSError(EIO) if a block is damaged."""
        self._store.index.active.counters["read_bytes"] += max(0, min(size, source.size - offset))
        try:
            if size <= _IN_THREAD:
                return self._store.read(source, offset, size)
            return await trio.to_thread.run_sync(self._store.read, source, offset, size)
        except Damaged as error:
            log.error("inode %d at %d: %s", self._ino, offset, error)
            raise OSError(errno.EIO, "damaged") from None

    async def fetch_with(self, source: Recipe, tail: bytes, offset: int, stop: int) -> bytearray:
        """`fetch` offset … stop of ``source`` with ``tail`` behind it, zeros where that ends."""
        out = bytearray(stop - offset)
        found = await self.fetch(source, offset, stop - offset)
        out[: len(found)] = found
        at = max(offset, source.size)
        if tail and at < stop:
            part = tail[at - source.size : stop - source.size]
            out[at - offset : at - offset + len(part)] = part
        return out

    async def will_need(self, source: Recipe, start: int, stop: int) -> None:
        """Have the disk read bytes start … stop, which somebody is about to ask for."""
        try:
            await trio.to_thread.run_sync(self._store.will_need, source, start, stop)
        except Exception:  # in a task of its own it would end the mount; the read itself will tell
            log.debug("the disk could not be told", exc_info=True)
