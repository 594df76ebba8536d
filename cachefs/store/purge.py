"""Deleting: victims for the room they take, damaged blocks, and what a crash left behind.

Payloads go first, then the rows: a crash between leaves victims without payloads.
"""

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager

import lmdb

from cachefs.store.blocks import Blocks
from cachefs.store.index import Index
from cachefs.store.layout import footprint
from cachefs.store.records import BlockRow, Refs, be, int_key, int_of, of_be
from cachefs.store.volumes import Volumes

log = logging.getLogger("cachefs.purge")

Change = Callable[[], AbstractContextManager[tuple[lmdb.Transaction, Counter[str]]]]
"""A write transaction of the index, with the counters that hold once it is committed."""


class Purger:
    """Used by the one writer of a store, under its lock. Its methods raise lmdb.Error or OSError."""

    def __init__(self, index: Index, volumes: Volumes, blocks: Blocks, change: Change) -> None:
        self._index = index
        self._volumes = volumes
        self._blocks = blocks
        self._change = change
        self._from = 0
        """The turn of the victim to go next."""

    def purge(self, wanted: int) -> int:
        """Delete victims, oldest first, until about ``wanted`` bytes are free again; the bytes freed."""
        total = 0
        wrapped = False
        while total < wanted:
            chosen, total_now, ended = self._choose(wanted - total)
            if chosen:
                self._delete(chosen)
                total += total_now
            if ended:
                if wrapped or not self._from:
                    break
                wrapped, self._from = True, 0
        return total

    def drop_damaged(self) -> None:
        """Delete what lies in quarantine and is named by no file any more."""
        chosen: list[tuple[int, int, BlockRow]] = []
        with self._index.env.begin() as txn:
            for block in list(self._blocks.damaged):
                refs = txn.get(int_key(block), db=self._index.dbs["refs"])
                row = txn.get(int_key(block), db=self._index.dbs["blocks"])
                if refs is None or row is None:
                    continue
                number, turn = Refs.unpack(refs)
                with self._blocks.lock:
                    if number or self._blocks.held[block]:
                        continue
                    self._blocks.dying.add(block)
                chosen.append((turn, block, BlockRow.unpack(row)))
        try:
            if chosen:
                self._delete(chosen)
        except (lmdb.Error, OSError) as error:  # they stay victims
            log.warning("damaged blocks could not be deleted: %s", error)

    def _choose(self, wanted: int) -> tuple[list[tuple[int, int, BlockRow]], int, bool]:
        """Up to 256 victims (turn, id, row) from where the last purge stopped; marked as dying."""
        dbs = self._index.dbs
        chosen: list[tuple[int, int, BlockRow]] = []
        total = 0
        with self._index.env.begin() as txn:
            cursor = txn.cursor(dbs["victims"])
            more = cursor.set_range(be(self._from))
            for seen, (turn, key) in enumerate(cursor if more else ()):
                if total >= wanted or len(chosen) >= 256 or seen >= 20_000:
                    return chosen, total, False
                block = int_of(key)
                self._from = of_be(turn) + 1
                value = txn.get(key, db=dbs["blocks"])
                refs = txn.get(key, db=dbs["refs"])
                if refs is None or Refs.unpack(refs) != (0, of_be(turn)):
                    continue  # a damaged row: what it leads to may be part of a file
                with self._blocks.lock:
                    if self._blocks.held[block] or value is None:
                        continue
                    self._blocks.dying.add(block)
                row = BlockRow.unpack(value)
                chosen.append((of_be(turn), block, row))
                total += footprint(row.stored)
        return chosen, total, True

    def _delete(self, chosen: list[tuple[int, int, BlockRow]]) -> None:
        dbs = self._index.dbs
        withheld = 0

        def freeing(size: int) -> None:
            # Until the counters say so too, the freed bytes must not count twice as room, nor, while
            # the disk is waited for, not at all.
            nonlocal withheld
            withheld += size
            self._withhold(size)

        figures = [(v, v.used, v.blocks) for v in self._volumes.by_number.values()]
        try:
            by_volume: dict[int, list[tuple[int, BlockRow]]] = {}
            for _, block, row in chosen:
                by_volume.setdefault(row.volume, []).append((block, row))
            self._blocks.unverify_all(block for _, block, _ in chosen)
            for number, items in by_volume.items():
                if number in self._volumes.by_number:
                    self._volumes.by_number[number].delete(items, freeing)
            with self._change() as (txn, counters):
                for turn, block, row in chosen:
                    key = int_key(block)
                    txn.delete(be(turn), db=dbs["victims"])
                    txn.delete(key, db=dbs["refs"])
                    txn.delete(key, db=dbs["blocks"])
                    txn.delete(key, db=dbs["damaged"])
                    if txn.get(row.digest, db=dbs["digests"]) == key:
                        txn.delete(row.digest, db=dbs["digests"])
                    if row.head:
                        txn.delete(int_key(row.head), key, db=dbs["heads"])
                        txn.delete(int_key(row.tail), key, db=dbs["tails"])
                    counters["blocks"] -= 1
                    counters["victim_bytes"] -= footprint(row.stored)
            self._blocks.forget_damage(block for _, block, _ in chosen)
        except lmdb.Error:
            for volume, used, blocks in figures:
                volume.used, volume.blocks = used, blocks  # the rows are still there, to be deleted again
            raise
        finally:
            self._withhold(-withheld)
            with self._blocks.lock:
                self._blocks.dying.difference_update(block for _, block, _ in chosen)

    def _withhold(self, size: int) -> None:
        with self._blocks.lock:
            self._blocks.revived_bytes += size

    def sweep(self) -> int:
        """Delete payloads that a crash left without an index row, newest first; how many."""
        swept = 0
        with self._index.env.begin() as txn:
            for volume in self._volumes.by_number.values():
                stray: list[tuple[int, None]] = []
                with volume.env.begin(db=volume.db) as payloads:
                    cursor = payloads.cursor()
                    found = cursor.last()
                    while found and (number := int_of(cursor.key())):
                        value = txn.get(int_key(number), db=self._index.dbs["blocks"])
                        if value and BlockRow.unpack(value).volume == volume.number:
                            break
                        stray.append((number, None))
                        found = cursor.prev()
                if stray:
                    volume.delete(stray)
                    swept += len(stray)
        return swept
