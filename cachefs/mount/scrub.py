"""Scrubbing: every block is read again once in a while, so that damage is met while a copy may still exist.

A pass begins an age after the one before began, in order of block ids; where it
is is remembered in the index, so a restart goes on from there. It works in small
steps while nobody else uses the mount, with the disk's idle priority, takes a
tenth of the time at most, and marks the pages that it read as the first to leave
the page cache. What is damaged goes into quarantine.

The reading thread keeps its normal CPU priority: while it holds the interpreter
lock, the requests wait for it.
"""

import contextlib
import ctypes
import logging
import mmap
import platform
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import trio
import xxhash

from cachefs.sizes import format_size
from cachefs.states.pieces import Buffer
from cachefs.store import Damaged, Store, StoreFailed, StoreFull
from cachefs.store.records import BlockRow, int_key, int_of

log = logging.getLogger("cachefs.scrub")

STEP = 4 << 20
"""Bytes read at a time."""
QUIET = 2.0
"""Seconds without a request before it goes on."""
_SHARE = 9
"""Times as long as a step took it rests after it."""
_REMEMBER_EVERY = 60.0
_MADV_COLD = 20
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_IDLE = 3 << 13


@dataclass
class Position:
    """``next`` block id to read, 0 between passes; times in seconds since 1970, 0 for never."""

    next: int = 0
    begun: float = 0.0
    ended: float = 0.0


class Scrub:
    """The scrub of one mounted store; ``age`` in seconds, 0 for never."""

    def __init__(self, store: Store, age: float) -> None:
        self._store = store
        self._age = age
        self._position = Position()
        self._bytes = 0
        self._remembered = 0.0
        self._seen = (-1, -1)

    async def run(self) -> None:
        """Until cancelled."""
        if not self._age:
            return
        self._position = self._load()
        while True:
            try:
                await self._go_on()
            except (StoreFull, StoreFailed) as error:
                log.warning("the scrub could not be remembered: %s", error)
                await trio.sleep(_REMEMBER_EVERY)
            except Exception:  # it would end the mount
                log.exception("scrubbing failed")
                await trio.sleep(_REMEMBER_EVERY)

    def _load(self) -> Position:
        found = self._store.writer.remembered(b"scrub")
        try:
            return Position(**found) if found else Position(begun=time.time())
        except TypeError:
            return Position(begun=time.time())

    async def _go_on(self) -> None:
        """One step, or a wait for the next pass."""
        position = self._position
        if not position.next:
            wait = position.begun + self._age - time.time()
            if 0 < wait <= self._age:
                if not self._remembered:
                    await self._remember()
                await trio.sleep(min(wait, 3600))
                return
            position.next, position.begun, self._bytes = 1, time.time(), 0
            await self._remember()
        await self._wait_for_quiet()
        started = trio.current_time()
        following, size = await trio.to_thread.run_sync(self._step, position.next)
        self._bytes += size
        self._store.index.active.counters["scrubbed_bytes"] += size
        position.next = following
        if not following:
            position.ended = time.time()
            damaged = len(self._store.blocks.damaged)
            log.info("scrubbed %s; %d blocks are damaged", format_size(self._bytes), damaged)
        if not following or trio.current_time() > self._remembered + _REMEMBER_EVERY:
            await self._remember()
        await trio.sleep(max(0.01, _SHARE * (trio.current_time() - started)))

    async def _remember(self) -> None:
        self._remembered = trio.current_time()
        await trio.to_thread.run_sync(self._store.writer.remember, b"scrub", asdict(self._position))

    async def _wait_for_quiet(self) -> None:
        while True:
            counters = self._store.counters()
            now = counters["read_bytes"], counters["written_bytes"]
            if now == self._seen and not self._store.queued:
                return
            self._seen = now
            await trio.sleep(QUIET)

    # -- in a thread

    def _step(self, start: int) -> tuple[int, int]:
        """Verify about `STEP` bytes of blocks from id ``start`` on; the next id (0: none) and bytes read."""
        store = self._store
        chosen: list[tuple[int, BlockRow]] = []
        size = 0
        following = 0
        with store.index.env.begin(db=store.index.dbs["blocks"]) as txn:
            cursor = txn.cursor()
            more = cursor.set_range(int_key(start))
            while more:
                block = int_of(cursor.key())
                if size >= STEP:
                    following = block
                    break
                with contextlib.suppress(Damaged):
                    row = BlockRow.unpack(cursor.value())
                    chosen.append((block, row))
                    size += row.stored
                more = cursor.next()
        with _IdleDisk(), store.blocks.reader() as reader:
            for block, row in chosen:
                if reader.row(block) is None:
                    continue  # deleted meanwhile
                try:
                    raw = reader.raw(block, verify=False)
                    if xxhash.xxh3_128_digest(raw) != row.digest:
                        store.blocks.note_damage(block)
                    _cool(raw)
                except Damaged as error:  # noted as that by the reader, unless the disk cannot read it
                    log.error("scrubbing: %s", error)
        return following, size


class _IdleDisk:
    """Within it, the calling thread reads from the disk only when nobody else does."""

    def __init__(self) -> None:
        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        self._call = _IOPRIO_SET.get(platform.machine())

    def _set(self, priority: int) -> None:
        if self._call is not None:
            self._libc.syscall(self._call, 1, threading.get_native_id(), priority)

    def __enter__(self) -> None:
        self._set(_IOPRIO_IDLE)

    def __exit__(self, *error: object) -> None:
        self._set(0)


def _cool(raw: Buffer) -> None:
    """Let mapped pages be the first to leave the page cache. (Others may want them: they stay until then.)"""
    if isinstance(raw, memoryview) and len(raw) > mmap.PAGESIZE:
        start = int(np.frombuffer(raw, np.uint8).ctypes.data)
        aligned = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (start + len(raw) - aligned) // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(ctypes.c_void_p(aligned), ctypes.c_size_t(length), _MADV_COLD)
