"""Blocks: found by digest or row key, read back and verified, gathered in memory until written.

A new block gets its id at once and waits in the `Pool` until a batch is written
out; it can be found and read there meanwhile.

A block that no committed recipe names is a *victim* and may be deleted at any
time. Who uses a block before its recipe is committed must therefore *hold* it.
`Blocks.hold` fails for a block that is being deleted; a block held before a
snapshot is taken, and seen in that snapshot, stays.

Called from any thread.
"""

import enum
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import lmdb
import numpy as np
import numpy.typing as npt
import xxhash

from cachefs.states.pieces import Buffer
from cachefs.store import codec
from cachefs.store.decoded import Decoded
from cachefs.store.errors import Damaged
from cachefs.store.index import Index
from cachefs.store.layout import footprint
from cachefs.store.records import CHUNK, KEPT, PLANES, RAW, BlockRow, Refs, int_key, int_of
from cachefs.store.volumes import Volume, Volumes

log = logging.getLogger("cachefs.blocks")

CANDIDATES = 4
_WHOLE = 256 << 10
"""Raw bytes of the largest block that is verified without a thread."""
_LOOKS = 3
"""How often a block is looked for: it may leave the pool, and then get another payload, meanwhile."""
_REMEMBERED = 1 << 18
"""Blocks remembered to be verified, about 100 bytes each."""


class Now(enum.Enum):
    """How a read ended that must not wait."""

    DONE = "done"
    COLD = "the disk would have to be waited for"
    OTHERWISE = "it cannot be had by a mere copy"


class Place(NamedTuple):
    """Where the raw bytes of a block lie as they are: from ``hint`` of a volume's file, ``raw`` bytes."""

    volume: Volume
    hint: int
    raw: int


@dataclass(slots=True)
class Fresh:
    """A block that is not on disk yet; ``row.volume`` is still 0."""

    id: int
    row: BlockRow
    raw: Buffer
    payload: Buffer


class Pool:
    """Fresh blocks, by id and by everything they can be found by. Guarded by its owner's lock."""

    def __init__(self) -> None:
        self.by_id: dict[int, Fresh] = {}
        self.digests: dict[bytes, int] = {}
        self.heads: dict[int, list[int]] = {}
        self.tails: dict[int, list[int]] = {}
        self.footprint = 0

    def add(self, block: Fresh) -> None:
        self.by_id[block.id] = block
        self.digests.setdefault(block.row.digest, block.id)
        if block.row.head:
            self.heads.setdefault(block.row.head, []).append(block.id)
            self.tails.setdefault(block.row.tail, []).append(block.id)
        self.footprint += footprint(block.row.stored)

    def remove(self, block: Fresh) -> None:
        if self.by_id.pop(block.id, None) is None:
            return
        self.footprint -= footprint(block.row.stored)
        for table, key in ((self.heads, block.row.head), (self.tails, block.row.tail)):
            if key:
                table[key].remove(block.id)
                if not table[key]:
                    del table[key]
        if self.digests.get(block.row.digest) == block.id:
            del self.digests[block.row.digest]


class Blocks:
    """Every block of a store."""

    def __init__(self, index: Index, volumes: Volumes) -> None:
        self.index = index
        self.volumes = volumes
        self.lock = threading.Lock()
        self.pool = Pool()
        self.held: Counter[int] = Counter()
        self.dying: set[int] = set()
        self.revived: dict[int, int] = {}
        """Held victims, with their footprints: counted as victims on disk, but not to be had."""
        self.revived_bytes = 0
        self.noted: dict[int, int] = {}
        """Damaged blocks that are not written down yet, with when they were found (ns since 1970)."""
        self._whole = memoryview(bytearray(_WHOLE))
        self._verified: dict[int, Place | None] = {}
        self.decoded = Decoded()
        self.pack_chunks = True
        with index.env.begin() as txn:
            # Should a damaged row be the last of one table: no id may be given out twice.
            tables = [txn.cursor(index.dbs[name]) for name in ("blocks", "refs")]
            self._next = max((int_of(cursor.key()) for cursor in tables if cursor.last()), default=0) + 1
            known = txn.cursor(index.dbs["damaged"]).iternext(values=False) if "damaged" in index.dbs else ()
            self.damaged = {int_of(key) for key in known}
            """Blocks in quarantine: shared with no new save, and gone with the last file that names them."""
        self.met_damage = False
        """Since the store was opened."""

    # -- holding

    def hold(self, block: int) -> bool:
        """Keep a block from being deleted; False if that is under way."""
        with self.lock:
            if block in self.dying:
                return False
            self.held[block] += 1
            return True

    def release(self, ids: Iterable[int]) -> None:
        with self.lock:
            for block in ids:
                if self.held[block] <= 1:
                    del self.held[block]
                    self._unrevive(block)
                else:
                    self.held[block] -= 1

    def _unrevive(self, block: int) -> None:
        self.revived_bytes -= self.revived.pop(block, 0)

    def revive(self, block: int, stored: int) -> None:
        """Note that a held block is a victim on disk."""
        with self.lock:
            if self.held[block] and block not in self.revived:
                self.revived[block] = footprint(stored)
                self.revived_bytes += self.revived[block]

    def referenced(self, ids: Iterable[int]) -> None:
        """Note that blocks are no victims any more."""
        with self.lock:
            for block in ids:
                self._unrevive(block)

    # -- finding

    def by_digest(self, digest: bytes) -> int | None:
        with self.lock:
            found = self.pool.digests.get(digest)
        if found is None:
            value = self.index.committed("digests", digest)
            found = int_of(value) if value else None
        return None if found in self.damaged else found

    def by_row(self, key: int, *, tail: bool) -> list[int]:
        """Up to `CANDIDATES` blocks whose first (last) row or column has this key, the newest first.

        Rows that depend on one token alone (V of the first layer) begin many blocks.
        """
        with self.lock:
            fresh = (self.pool.tails if tail else self.pool.heads).get(key, [])
            found = fresh[: -CANDIDATES - 1 : -1]
        with self.index.env.begin(db=self.index.dbs["tails" if tail else "heads"]) as txn:
            cursor = txn.cursor()
            if cursor.set_key(int_key(key)):
                more = cursor.last_dup()
                while more and len(found) < CANDIDATES:
                    if (block := int_of(cursor.value())) not in self.damaged:
                        found.append(block)
                    more = cursor.prev_dup()
        return found

    @contextmanager
    def reader(self) -> Iterator["BlockReader"]:
        """Raw bytes of blocks; what it gives out is valid inside the with block only."""
        with ExitStack() as stack:
            yield BlockReader(self, stack)

    # -- adding

    def add(self, raw: Buffer, digest: bytes, kind: int = CHUNK, width: int = 0, rows: int = 0,
            head: int = 0, tail: int = 0) -> int:  # fmt: skip
        """Take a new block into the pool, held once; its id."""
        if isinstance(raw, memoryview) and len(raw) < 1 << 17:
            raw = bytes(raw)  # a short view would keep the writer's whole buffer alive
        packed, payload = codec.encode(raw) if kind == CHUNK and self.pack_chunks else (RAW, raw)
        with self.lock:
            number = self._next
            self._next += 1
            row = BlockRow(digest, 0, packed, kind, len(raw), len(payload), width, rows, 0, head, tail, 0)
            self.pool.add(Fresh(number, row, raw, payload))
            self.held[number] += 1
        return number

    def pack(self, fresh: Iterable[Fresh], packer: codec.Packer) -> None:
        """Pack blocks that are not on disk yet and were not tried."""
        for block in fresh:
            if block.row.codec != RAW:
                continue
            packed, payload = packer.pack(block.raw, block.row.kind, block.row.width)
            with self.lock:
                self.pool.footprint += footprint(len(payload)) - footprint(block.row.stored)
                block.row = block.row._replace(codec=packed, stored=len(payload))
                block.payload = payload

    # -- reading what was read before

    def is_verified(self, block: int) -> bool:
        return block in self._verified

    def set_verified(self, block: int, place: Place | None = None) -> None:
        if len(self._verified) >= _REMEMBERED:
            self._verified.clear()
        self._verified[block] = place

    def set_place(self, block: int, place: Place) -> None:
        """`set_verified`, unless a newer row names another payload by now.

        `unverify` comes after that row and before the old payload's pages are free, so no
        place is ever remembered that may hold something else.
        """
        with self.lock:
            value = self.index.committed("blocks", int_key(block))
            if block in self.dying:  # the row goes after the payload
                return
            if value is not None and self.place(BlockRow.unpack(value)) == place:
                self.set_verified(block, place)

    def place(self, row: BlockRow) -> Place | None:
        """Where the raw bytes lie as they are, if they do."""
        volume = self.volumes.by_number.get(row.volume)
        if volume is None or not row.hint or row.codec not in (RAW, KEPT):
            return None
        return Place(volume, row.hint, row.raw)

    def is_there(self, block: int, place: Place) -> bool:
        """Whether the block was verified in just that place."""
        return self._verified.get(block) == place

    def copy_cached(self, block: int, start: int, into: memoryview) -> Now:
        """Copy a block's raw bytes from ``start`` on into all of ``into``, if that needs no waiting.

        For the event loop's thread: it verifies in a buffer of its own.
        """
        place = self._verified.get(block)
        if place is None:
            with self.lock:
                fresh = self.pool.by_id.get(block)
            if fresh is None:
                return self._verify_cached(block, start, into)
            into[:] = memoryview(fresh.raw)[start : start + len(into)]
            return Now.DONE
        if start + len(into) > place.raw:
            return Now.OTHERWISE
        if not place.volume.pread(into, place.hint + start, wait=False):
            return Now.COLD
        # It may have got another payload meanwhile.
        return Now.DONE if self.is_there(block, place) else Now.OTHERWISE

    def _verify_cached(self, block: int, start: int, into: memoryview) -> Now:
        value = self.index.committed("blocks", int_key(block))
        row = BlockRow.unpack(value) if value else None
        place = self.place(row) if row is not None and row.raw <= len(self._whole) else None
        if row is None or place is None or start + len(into) > row.raw:
            return Now.OTHERWISE
        whole = into if len(into) == row.raw else self._whole[: row.raw]
        if not place.volume.pread(whole, row.hint, wait=False):
            return Now.COLD
        if xxhash.xxh3_128_digest(whole) != row.digest:
            return Now.OTHERWISE
        self.set_place(block, place)
        if whole is not into:
            into[:] = whole[start : start + len(into)]
        return Now.DONE if self.is_there(block, place) else Now.OTHERWISE

    def forget_verified(self) -> None:
        """Have each block checked again when it is read next."""
        self._verified.clear()

    def unverify_all(self, blocks: Iterable[int]) -> None:
        """Before the payloads of dying blocks are deleted: their pages will be others'."""
        with self.lock:
            for block in blocks:
                self._verified.pop(block, None)

    def unverify(self, block: int) -> None:
        """Forget where a block was verified: a committed row names another payload now."""
        with self.lock:
            self._verified.pop(block, None)

    def note_damage(self, block: int) -> None:
        """Put a block into quarantine; the writer's next transaction remembers it."""
        with self.lock:
            if block not in self.damaged:
                log.error("block %d is damaged: no new save will share it", block)
                self.damaged.add(block)
                self.met_damage = True
                self.noted[block] = time.time_ns()
                self._verified.pop(block, None)

    def forget_damage(self, blocks: Iterable[int]) -> None:
        """Of blocks that do not exist any more."""
        with self.lock:
            self.damaged.difference_update(blocks)


class BlockReader:
    """See `Blocks.reader`."""

    def __init__(self, blocks: Blocks, stack: ExitStack) -> None:
        self._blocks = blocks
        self._stack = stack
        self._index: lmdb.Transaction | None = None
        self._volumes: dict[int, lmdb.Transaction] = {}

    def _txn(self) -> lmdb.Transaction:
        if self._index is None:
            self._index = self._stack.enter_context(self._blocks.index.env.begin())
        return self._index

    def row(self, block: int) -> BlockRow | None:
        """The block's record, or None if there is no such block."""
        with self._blocks.lock:
            fresh = self._blocks.pool.by_id.get(block)
        if fresh is not None:
            return fresh.row
        value = self._txn().get(int_key(block), db=self._blocks.index.dbs["blocks"])
        return BlockRow.unpack(value) if value else None

    def refs(self, block: int) -> Refs:
        value = self._txn().get(int_key(block), db=self._blocks.index.dbs["refs"])
        return Refs.unpack(value) if value else Refs(0, 0)

    def _payload(self, block: int, row: BlockRow) -> Buffer | None:
        """Raises Damaged where the disk cannot read it, no reason for quarantine: it may come back."""
        volume = self._blocks.volumes.by_number.get(row.volume)
        if volume is None:
            return None
        if row.hint and not volume.is_readable(row.hint, row.stored):
            raise Damaged(f"block {block} cannot be read from the disk")
        txn = self._volumes.get(row.volume)
        if txn is None:
            txn = self._stack.enter_context(volume.env.begin(db=volume.db, buffers=True))
            self._volumes[row.volume] = txn
        return volume.get(txn, block, row.parts)

    def raw(self, block: int, *, verify: bool = True) -> Buffer:
        """A block's raw bytes. ``verify``: check them against the digest, once a mount.

        Raises Damaged when they are missing or wrong.
        """
        if (found := self._blocks.decoded.get(block)) is not None:
            return found
        for look in range(_LOOKS):
            with self._blocks.lock:
                fresh = self._blocks.pool.by_id.get(block)
            if fresh is not None:
                return fresh.raw
            row = self.row(block)
            payload = self._payload(block, row) if row is not None else None
            if row is not None and payload is not None:
                try:
                    return self._decode(block, row, payload, verify=verify)
                except codec.Broken:
                    if look == _LOOKS - 1:
                        self._blocks.note_damage(block)
                        raise Damaged(f"block {block} differs from its digest") from None
            # Left the pool for the disk, or got another payload, between the two looks: newer
            # snapshots have it. The old ones stay open, buffers given out earlier point into them.
            self._index, self._volumes = None, {}
        if self.refs(block).number:  # a crash may have left a victim's row without its payload
            self._blocks.note_damage(block)
        raise Damaged(f"block {block} is missing")

    def copy(self, block: int, start: int, into: memoryview) -> None:
        """Copy a block's raw bytes from ``start`` on into all of ``into``. Raises Damaged."""
        if not self._copy_located(block, start, into):
            raw = memoryview(self.raw(block))
            if len(raw) < start + len(into):
                raise Damaged(f"block {block} is shorter than its slice")
            into[:] = raw[start : start + len(into)]

    def _copy_located(self, block: int, start: int, into: memoryview) -> bool:
        """`copy` from where the payload was last seen; False where that is not to be trusted."""
        row = self.row(block)
        place = self._blocks.place(row) if row is not None else None
        if row is None or place is None or start + len(into) > row.raw:
            return False
        if self._blocks.is_there(block, place):
            found = place.volume.pread(into, row.hint + start)
            return found and self._blocks.is_there(block, place)
        whole = into if len(into) == row.raw else memoryview(bytearray(row.raw))
        if not place.volume.pread(whole, row.hint) or xxhash.xxh3_128_digest(whole) != row.digest:
            return False
        self._blocks.set_place(block, place)
        if whole is not into:
            into[:] = whole[start : start + len(into)]
        return True

    def unpack(self, wanted: Iterable[tuple[int, memoryview]]) -> set[int]:
        """Fill each buffer, as long as its block, from what is packed; which of them, by number.

        None where a block is damaged: `copy` will tell which.
        """
        rows: list[tuple[int, int, BlockRow]] = []
        items: list[tuple[Buffer, npt.NDArray[np.uint8]]] = []
        for number, (block, into) in enumerate(wanted):
            row = self.row(block)
            if row is None or row.codec != PLANES or len(into) != row.raw:
                continue
            payload = self._payload(block, row)
            if payload is not None:
                rows.append((number, block, row))
                items.append((payload, np.frombuffer(into, np.uint8)))
        try:
            codec.decode_many(items)
        except codec.Broken:
            return set()
        for (_, block, row), (_, out) in zip(rows, items, strict=True):
            if not self._blocks.is_verified(block):
                if xxhash.xxh3_128_digest(out.data) != row.digest:
                    return set()
                self._blocks.set_verified(block)
        return {number for number, _, _ in rows}

    def will_need(self, ids: Iterable[int]) -> None:
        """Have the disk read blocks that will be asked for soon, unless the first is in memory."""
        for number, block in enumerate(ids):
            row = self.row(block)
            volume = self._blocks.volumes.by_number.get(row.volume) if row is not None else None
            if row is not None and volume is not None and row.hint:
                if not number and volume.is_cached(row.hint):
                    return
                volume.will_need(row.hint, row.stored)

    def _decode(self, block: int, row: BlockRow, payload: Buffer, *, verify: bool) -> Buffer:
        """Raises codec.Broken where the bytes are not the block's."""
        raw = codec.decode(payload, row.codec, row.raw)
        verified = self._blocks.is_verified(block)
        if len(raw) != row.raw or (verify and not verified and xxhash.xxh3_128_digest(raw) != row.digest):
            raise codec.Broken("another digest")
        if verify and not verified:
            self._blocks.set_verified(block)
        if raw is not payload and (verify or verified):
            self._blocks.decoded.add(block, raw)
        return raw


def same_bytes(one: Buffer, other: Buffer) -> bool:
    """Whether two buffers are equal; about 0.1 ms a MiB."""
    return len(one) == len(other) and bool(
        np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))
    )
