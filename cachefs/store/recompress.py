"""Packing blocks that were stored raw, later: a few at a time, while nobody needs the store.

Victims are left alone: they are to go. A block that saves too little is marked as KEPT
and not tried again.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from cachefs.sizes import MIB
from cachefs.store.blocks import Blocks
from cachefs.store.codec import Packer
from cachefs.store.errors import Damaged
from cachefs.store.records import KEPT, RAW, BlockRow, Refs, int_key, int_of
from cachefs.store.replace import Packed, replace
from cachefs.store.writer import Writer

log = logging.getLogger("cachefs.recompress")

_CODEC_AT = 18
"""Where in a packed `BlockRow` its codec lies."""
_SCAN = 4_000
"""Rows looked at in one snapshot, about 4 ms."""
_AGAIN = 600.0
"""Seconds until blocks that were victims are looked at again."""


@dataclass(slots=True)
class Progress:
    """What a step did: raw bytes tried and packed, footprints saved. ``ended``: nothing is left for now."""

    tried: int = 0
    packed: int = 0
    saved: int = 0
    ended: bool = False


class Recompressor:
    """Goes through a store's blocks in the order of their ids. Used by one thread at a time."""

    def __init__(self, blocks: Blocks, writer: Writer, packer: Packer, executor: Executor) -> None:
        """``executor`` does what holds the write lock: the thread that packs may be one of low priority."""
        self._blocks = blocks
        self._writer = writer
        self._packer = packer
        self._executor = executor
        self._batch = max(MIB // 4, min(4 * MIB, writer.budget.batch // 4))
        self._at = 0
        self._passed_over = False
        self._ended_at = 0.0

    def step(self, stop: Callable[[], bool]) -> Progress:
        """Pack the next few blocks, at most 4 MiB raw; given up when ``stop`` says so between two of them.

        Raises StoreFull where the disk or a volume has no room for that.
        """
        start = self._at
        found, end = self._find()
        held = [block for block, _ in found if self._blocks.hold(block)]
        progress = Progress(ended=end)
        packed: list[Packed] = []
        try:
            # The snapshot must be younger than the holds, or a purge in between goes unseen.
            for block in held:
                if stop():
                    self._at = start
                    return Progress()
                self._pack(block, packed, progress)
            if packed:
                progress.saved = self._executor.submit(replace, self._writer, packed).result()
        except BaseException:
            self._at = start
            raise
        finally:
            self._blocks.release(held)
        return progress

    def _find(self) -> tuple[list[tuple[int, int]], bool]:
        """(block, raw bytes) of the next batch that files need and nobody tried; whether that was all."""
        index = self._writer.index
        if self._passed_over and self._ended_at and time.monotonic() > self._ended_at + _AGAIN:
            self._at, self._passed_over, self._ended_at = 0, False, 0.0
        found: list[tuple[int, int]] = []
        size = 0
        with index.env.begin(db=index.dbs["blocks"]) as txn:
            cursor = txn.cursor()
            more = cursor.set_range(int_key(self._at + 1))
            for seen, (key, value) in enumerate(cursor if more else ()):
                if size >= self._batch or seen >= _SCAN:
                    return found, False
                self._at = int_of(key)
                if value[_CODEC_AT] != RAW:
                    continue
                refs = txn.get(key, db=index.dbs["refs"])
                if refs is None or not Refs.unpack(refs).number:
                    self._passed_over = True
                    continue
                row = BlockRow.unpack(value)
                found.append((self._at, row.raw))
                size += row.raw
        self._ended_at = self._ended_at or time.monotonic()
        return found, True

    def _pack(self, block: int, packed: list[Packed], progress: Progress) -> None:
        with self._blocks.reader() as reader:
            row = reader.row(block)
            if row is None or row.codec != RAW or not row.volume:
                return
            try:
                raw = reader.raw(block)
            except Damaged:
                return
            codec, payload = self._packer.pack(raw, row.kind, row.width)
        progress.tried += row.raw
        if codec == KEPT:
            packed.append(Packed(block, row, KEPT, b""))
        else:
            progress.packed += row.raw
            packed.append(Packed(block, row, codec, payload))
