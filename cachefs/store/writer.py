"""Everything that writes to LMDB: batches of blocks, commits of the tree, deletion of victims.

One lock serialises it; each method may be called from any thread and waits for
the disk. The order within a write is what makes a crash harmless:

1. payloads are committed to their volumes;
2. the index transaction names them, together with the tree's changes.

A crash between leaves payloads that no index row names; `sweep` deletes them at
the next start. Deleting goes the same way round: payloads first, then the rows
of what are victims anyway. A row without a payload is never part of a file, and
a lookup that meets one takes it for absent.
"""

import contextlib
import json
import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import lmdb

from cachefs.store import reopen
from cachefs.store.blocks import Blocks, Fresh
from cachefs.store.codec import Packer
from cachefs.store.errors import StoreFailed, StoreFull, is_full
from cachefs.store.index import Index, Layer
from cachefs.store.layout import Budget, footprint
from cachefs.store.payloads import Payloads
from cachefs.store.purge import Purger
from cachefs.store.records import BlockRow, Refs, be, int_key, of_be
from cachefs.store.volumes import Volumes

COUNTERS = (
    "entries", "logical_bytes", "row_bytes", "blocks", "stored_bytes", "compressed_bytes",
    "victim_bytes", "evicted_entries", "evicted_bytes", "corrupt_blocks", "torn_saves", "written_bytes",
    "new_block_bytes", "read_bytes", "scrubbed_bytes",
)  # fmt: skip

log = logging.getLogger("cachefs.writer")

_BLOCKS_A_WRITE = 512


class Writer:
    """The one writer of an open store."""

    def __init__(self, index: Index, volumes: Volumes, blocks: Blocks, budget: Budget) -> None:
        self.index = index
        self.volumes = volumes
        self.blocks = blocks
        self.budget = budget
        self.lock = threading.RLock()
        self.counters: Counter[str] = Counter()
        self.met_failure = False
        """Since the store was opened."""
        self.failed = ""
        """Why nothing can be written until `probe` succeeds: the disk's error; empty while all is well."""
        self._attempt = 0
        """LMDB's number of an index transaction that was begun and is not known to be committed."""
        self._noting: dict[int, int] = {}
        self._purger = Purger(index, volumes, blocks, self._change)
        self._payloads = Payloads(volumes, budget, self._purger.purge)
        with index.env.begin() as txn:
            stored = txn.get(b"counters", db=index.dbs["meta"])
            cursor = txn.cursor(index.dbs["victims"])
            self._turn = of_be(cursor.key()) + 1 if cursor.last() else 1
        if stored:
            self.counters.update(json.loads(stored))
        self.packer: Packer | None = None
        """Packs every block before it is written, instead of later (`recompress`)."""

    # -- failing

    def _refused(self, error: Exception) -> StoreFull | StoreFailed:
        """What a failed write means; a broken disk is logged when it is first met."""
        if is_full(error, self.index.path):
            # A `cachefs ls` or `check` that was killed keeps all pages given up since from being used again.
            for env in (self.index.env, *(v.env for v in self.volumes.by_number.values())):
                with contextlib.suppress(lmdb.Error):
                    env.reader_check()
            return StoreFull(str(error))
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        if not self.failed:
            log.error("the store cannot be written (%s): clients get I/O errors; look after the disk", reason)
        elif reason == reopen.UNKNOWN != self.failed:
            log.error("%s: unmount it and mount it again", reason)
        if not self.failed or reason == reopen.UNKNOWN:
            self.failed = reason
        self.met_failure = True
        return StoreFailed(reason)

    def probe(self) -> None:
        """After a failure: find out whether the disk takes writes again. Raises StoreFull or StoreFailed."""
        with self.lock:
            try:
                self.blocks.forget_verified()
                reopen.mend(self.index, self.volumes.by_number.values(), self._attempt)
                self.blocks.forget_verified()  # what was read from pages that are gone now
                for volume in self.volumes.by_number.values():
                    volume.delete([])
                with self._transaction() as txn:
                    self._meta(txn, self.counters, self._payloads.unnamed.values())
            except (lmdb.Error, OSError) as error:
                raise self._refused(error) from error
            if self.failed:
                log.warning("the store can be written again")
            self.failed = ""

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[lmdb.Transaction]:
        """A write transaction of the index."""
        with self.index.env.begin(write=True) as txn:
            self._attempt = txn.id()
            yield txn
        self._attempt = 0

    @contextlib.contextmanager
    def _change(self) -> Iterator[tuple[lmdb.Transaction, Counter[str]]]:
        """A write transaction beside what is pending, with the counters that hold once it is committed."""
        counters = Counter(self.counters)
        with self._transaction() as txn:
            yield txn, counters
            self._meta(txn, counters, self._payloads.unnamed.values())
        self.counters = counters
        self._remember_noted()

    # -- writing

    @property
    def unnamed_bytes(self) -> int:
        """Footprints of the blocks that are in the pool still, and in a volume already."""
        return self._payloads.unnamed_bytes

    def write_out(self) -> None:
        """Write a batch of the pool's oldest blocks, which stay victims until a recipe names them.

        Raises StoreFull when they do not fit even after every victim has gone, StoreFailed
        when the disk is broken.
        """
        self._write(None)
        with self.lock:
            self._purger.drop_damaged()

    def commit(self, layer: Layer) -> None:
        """Write the pool's blocks and a frozen layer, durably and as one moment.

        Raises StoreFull or StoreFailed; then it is still pending.
        """
        with self.lock:
            # Blocks of many small files first, by and by: a transaction that touches every page
            # of the digests needs as many free pages again.
            with contextlib.suppress(StoreFull):  # the layer may be the eviction that makes room
                while len(self.blocks.pool.by_id) > _BLOCKS_A_WRITE or self._too_much_to_pack():
                    self._write(None)
            self._write(layer)
            self._purger.drop_damaged()

    def _too_much_to_pack(self) -> bool:
        """Whether the pool's packed payloads, beside the raw ones, would take more memory than a batch."""
        return self.packer is not None and self.blocks.pool.footprint > self.budget.batch

    def _write(self, layer: Layer | None) -> None:
        with self.lock:
            fresh = self._take(layer)
            if self.packer is not None:
                self.blocks.pack(fresh, self.packer)
            if not fresh and layer is None and not self._payloads.unnamed and not self.blocks.noted:
                return
            if self.failed:
                self.probe()
            try:
                self._payloads.take_back()
                placed = self._payloads_or_none(fresh, layer)
                counters = Counter(self.counters)
                with self._transaction() as txn:
                    needed, victims = self._name(txn, placed, layer, counters)
                    if layer is not None:
                        self._tree(txn, layer)
                        counters.update(layer.counters)
                    self._meta(txn, counters)
            except (lmdb.Error, OSError) as error:
                raise self._refused(error) from error
            self._payloads.settle()
            self._remember_noted()
            # Revived before they count as victims: nobody must see them as room for a moment.
            for block, stored in victims.items():
                self.blocks.revive(block, stored)
            self.counters = counters
            written = dict(placed)
            with self.blocks.lock:
                for each in fresh:
                    if each.id in written:
                        self.blocks.pool.remove(each)
            self.blocks.referenced(needed)

    def _take(self, layer: Layer | None) -> list[Fresh]:
        """The blocks to write: all for a commit, else a batch. What nobody wants any more is dropped."""
        fresh: list[Fresh] = []
        size = 0
        with self.blocks.lock:
            for block in list(self.blocks.pool.by_id.values()):
                if not self.blocks.held[block.id] and (layer is None or layer.refs[block.id] <= 0):
                    self.blocks.pool.remove(block)
                    continue
                fresh.append(block)
                size += footprint(block.row.stored)
                if layer is None and (size >= self.budget.batch or len(fresh) >= _BLOCKS_A_WRITE):
                    break
        return fresh

    def _payloads_or_none(self, fresh: list[Fresh], layer: Layer | None) -> list[tuple[int, BlockRow]]:
        """Put the payloads; where there is no room, let a layer that needs none of them pass.

        It may be the eviction that makes the room.
        """
        try:
            return self._payloads.put(fresh)
        except StoreFull:
            if layer is None or any(block.id in layer.refs for block in fresh):
                raise
            self._payloads.take_back()
            return []

    def _name(self, txn: lmdb.Transaction, placed: list[tuple[int, BlockRow]], layer: Layer | None,
              counters: Counter[str]) -> tuple[set[int], dict[int, int]]:  # fmt: skip
        """Index rows for new blocks, and reference counts.

        Of the blocks concerned: those that files need now, and those that became victims
        with their stored bytes.
        """
        dbs = self.index.dbs
        deltas = Counter(layer.refs) if layer is not None else Counter()
        rows = dict(placed)
        needed: set[int] = set()
        victims: dict[int, int] = {}
        for block, row in placed:
            key = int_key(block)
            txn.put(key, row.pack(), db=dbs["blocks"])
            txn.put(row.digest, key, db=dbs["digests"])
            if row.head:
                txn.put(int_key(row.head), key, db=dbs["heads"])
                txn.put(int_key(row.tail), key, db=dbs["tails"])
            counters["blocks"] += 1
            counters["new_block_bytes"] += row.raw
            counters["compressed_bytes"] += footprint(row.stored)
            counters["stored_bytes"] += row.raw
            count = deltas.pop(block, 0)
            txn.put(key, Refs(max(0, count), 0).pack(), db=dbs["refs"])
            if count > 0:
                needed.add(block)
            else:
                victims[block] = row.stored
                self._to_victim(txn, block, row, counters)
        for block, delta in deltas.items():
            if not delta:
                continue
            key = int_key(block)
            old = txn.get(key, db=dbs["refs"])
            value = rows.get(block) or txn.get(key, db=dbs["blocks"])
            if old is None or value is None:
                if delta > 0:
                    log.error("block %d is named by a file, but does not exist", block)
                continue
            row = value if isinstance(value, BlockRow) else BlockRow.unpack(value)
            was = Refs.unpack(old)
            count = max(0, was.number + delta)
            if count and not was.number:
                txn.delete(be(was.turn), db=dbs["victims"])
                counters["victim_bytes"] -= footprint(row.stored)
                counters["compressed_bytes"] += footprint(row.stored)
                counters["stored_bytes"] += row.raw
            txn.put(key, Refs(count, 0).pack(), db=dbs["refs"])
            if count:
                needed.add(block)
            elif was.number:
                victims[block] = row.stored
                self._to_victim(txn, block, row, counters)
        return needed, victims

    def _to_victim(self, txn: lmdb.Transaction, block: int, row: BlockRow, counters: Counter[str]) -> None:
        key = int_key(block)
        txn.put(key, Refs(0, self._turn).pack(), db=self.index.dbs["refs"])
        txn.put(be(self._turn), key, db=self.index.dbs["victims"])
        self._turn += 1
        counters["victim_bytes"] += footprint(row.stored)
        counters["compressed_bytes"] -= footprint(row.stored)
        counters["stored_bytes"] -= row.raw

    def _tree(self, txn: lmdb.Transaction, layer: Layer) -> None:
        for name, entries in layer.tables.items():
            db = self.index.dbs[name]
            for key, value in entries.items():
                if value is None:
                    txn.delete(key, db=db)
                else:
                    txn.put(key, self.index.to_disk(name, key, value), db=db)

    def _meta(
        self, txn: lmdb.Transaction, counters: Counter[str], unnamed: Collection[BlockRow] = ()
    ) -> None:
        """``unnamed`` payloads are left out of the volumes' figures: after a crash `sweep` deletes them."""
        with self.blocks.lock:
            self._noting = dict(self.blocks.noted)
        for block, when in self._noting.items():
            if txn.get(int_key(block), db=self.index.dbs["blocks"]) is not None:
                txn.put(int_key(block), be(when), db=self.index.dbs["damaged"])
        counters["corrupt_blocks"] = txn.stat(self.index.dbs["damaged"])["entries"]
        txn.put(b"counters", json.dumps(counters).encode(), db=self.index.dbs["meta"])
        for number, volume in self.volumes.by_number.items():
            mine = [row for row in unnamed if row.volume == number]
            used = volume.used - sum(footprint(row.stored) for row in mine)
            row = volume.row._replace(used=used, blocks=volume.blocks - len(mine))
            txn.put(int_key(number), row.pack(), db=self.index.dbs["volumes"])

    def restate(self, changes: list[tuple[int, BlockRow, BlockRow]]) -> int:
        """Commit other rows (block, old, new) for blocks that files need; the footprints saved, in bytes.

        What the new rows name is in the volumes already. Raises lmdb.Error; then nothing changed.
        """
        total = 0
        with self.lock:
            used = {volume: volume.used for volume in self.volumes.by_number.values()}
            counters = Counter(self.counters)
            try:
                with self.index.env.begin(write=True) as txn:
                    for block, old, new in changes:
                        txn.put(int_key(block), new.pack(), db=self.index.dbs["blocks"])
                        saved = footprint(old.stored) - footprint(new.stored)
                        self.volumes.by_number[new.volume].used -= saved
                        total += saved
                    counters["compressed_bytes"] -= total
                    self._meta(txn, counters, self._payloads.unnamed.values())
            except (lmdb.Error, OSError):
                for volume, before in used.items():
                    volume.used = before
                raise
            self.counters = counters
        return total

    def remember(self, key: bytes, document: object) -> None:
        """Keep something as JSON in the index, durably. Raises StoreFull or StoreFailed."""
        with self.lock:
            try:
                with self._transaction() as txn:
                    txn.put(key, json.dumps(document).encode(), db=self.index.dbs["meta"])
            except (lmdb.Error, OSError) as error:
                raise self._refused(error) from error

    def remembered(self, key: bytes) -> Any:
        """What `remember` kept, None if nothing or if it cannot be read."""
        value = self.index.committed("meta", key)
        try:
            return json.loads(value) if value else None
        except ValueError:
            return None

    def _remember_noted(self) -> None:
        """The damage that the last transaction wrote down is no news any more."""
        with self.blocks.lock:
            for block in self._noting:
                self.blocks.noted.pop(block, None)

    # -- deleting

    def purge(self, wanted: int) -> int:
        """Delete victims, oldest first, until about ``wanted`` bytes are free again; the bytes freed.

        Raises StoreFull when the disk is too full even for that, StoreFailed when it is broken.
        """
        with self.lock:
            if self.failed:
                self.probe()
            try:
                return self._purger.purge(wanted)
            except (lmdb.Error, OSError) as error:
                raise self._refused(error) from error

    def sweep(self) -> int:
        """Delete payloads that a crash left without an index row, newest first; how many."""
        with self.lock:
            return self._purger.sweep()
