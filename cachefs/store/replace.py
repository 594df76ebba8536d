"""Payloads replaced while everything goes on.

A block keeps its id. In its volume a payload lies under one of two keys, whole under
the block's or in parts beside (`Volume.put`), and the index row says which; so the new
one can lie there before the row names it:

1. the new payload is committed to the volume, under the key that is free, with a
   *journal*: the ids that are under way;
2. the index row names it;
3. the old payload and the journal are deleted.

A crash between leaves a block with two payloads, one of which its row names. `settle`
deletes the other. A reader whose snapshot of the index is older than that of the
volume may find neither, and looks again with newer ones (`BlockReader.raw`).
"""

import struct
from typing import NamedTuple

import lmdb

from cachefs.states.pieces import Buffer
from cachefs.store.errors import StoreFull
from cachefs.store.index import Index
from cachefs.store.layout import footprint
from cachefs.store.records import KEPT, BlockRow, Refs, int_key
from cachefs.store.volumes import Volume, part_key
from cachefs.store.writer import Writer

_JOURNAL = part_key(0, 0)
_ID = struct.Struct("<Q")


class Packed(NamedTuple):
    """A block, its row as it was, and the codec and payload to come; for KEPT only the codec."""

    block: int
    old: BlockRow
    codec: int
    payload: Buffer


def replace(writer: Writer, packed: list[Packed]) -> int:
    """Replace the payloads of blocks that the caller holds; the footprints saved, in bytes.

    Blocks that changed meanwhile, or that no file needs any more, are left as they
    are. Raises StoreFull when the disk or a volume has no room for both payloads;
    then all is as it was, or what was not deleted is named in the journal.
    """
    volumes = writer.volumes
    with writer.lock:
        try:
            packed = _unchanged(writer, packed)
            by_volume: dict[int, list[Packed]] = {}
            for each in packed:
                if each.codec != KEPT:
                    by_volume.setdefault(each.old.volume, []).append(each)
            need = sum(footprint(len(each.payload)) for items in by_volume.values() for each in items)
            if need > volumes.disk_room():
                raise StoreFull("the disk is full")
            for number in by_volume:
                settle(volumes.by_number[number], writer.index)  # what failed last time
            rows = [(each.block, each.old, each.old._replace(codec=KEPT)) for each in packed
                    if each.codec == KEPT]  # fmt: skip
            try:
                for number, items in by_volume.items():
                    rows += _put_beside(volumes.by_number[number], items)
                saved = writer.restate(rows)
                for items in by_volume.values():
                    for each in items:
                        writer.blocks.unverify(each.block)  # before its old pages are free
            finally:
                for number in by_volume:
                    settle(volumes.by_number[number], writer.index)
        except (lmdb.Error, OSError) as error:
            raise StoreFull(str(error)) from error
        return saved


def _unchanged(writer: Writer, packed: list[Packed]) -> list[Packed]:
    dbs = writer.index.dbs
    found = []
    with writer.index.env.begin() as txn:
        for each in packed:
            key = int_key(each.block)
            row, refs = txn.get(key, db=dbs["blocks"]), txn.get(key, db=dbs["refs"])
            if row == each.old.pack() and refs is not None and Refs.unpack(refs).number:
                found.append(each)
    return found


def _put_beside(volume: Volume, packed: list[Packed]) -> list[tuple[int, BlockRow, BlockRow]]:
    """Write new payloads where the blocks' own do not lie, with the journal, in one durable transaction.

    (block, row, row that will name the new payload) of each. Raises lmdb.Error; then nothing was written.
    """
    rows: list[tuple[int, BlockRow, BlockRow]] = []
    with volume.env.begin(write=True) as txn:
        for block, old, codec, payload in packed:
            if old.parts:
                txn.put(int_key(block), payload, db=volume.db)
            else:
                txn.put(part_key(block, 0), payload, db=volume.parts)
            parts = 0 if old.parts else 1
            new = old._replace(codec=codec, stored=len(payload), parts=parts)
            rows.append((block, old, new))
        journal = b"".join(_ID.pack(block) for block, *_ in packed)
        txn.put(_JOURNAL, journal, db=volume.parts)
    hints = volume.locate({block: new.parts for block, _, new in rows})
    return [(block, old, new._replace(hint=hints[block])) for block, old, new in rows]


def settle(volume: Volume, index: Index) -> int:
    """Delete the payloads that rows do not name, of the blocks in the volume's journal; how many blocks.

    Raises lmdb.Error where the disk is too full for that.
    """
    with volume.env.begin(db=volume.parts) as txn:
        journal = txn.get(_JOURNAL)
    if journal is None:
        return 0
    journal = journal[: len(journal) // _ID.size * _ID.size]  # damaged, maybe
    blocks = [block for (block,) in _ID.iter_unpack(journal)]
    with index.env.begin(db=index.dbs["blocks"]) as txn:
        values = {block: txn.get(int_key(block)) for block in blocks}
    with volume.env.begin(db=volume.parts, write=True, buffers=True) as txn:
        for block, value in values.items():
            row = BlockRow.unpack(value) if value else None
            if row is None or row.volume != volume.number:
                volume.drop_value(txn, int_key(block), volume.db)
                row = None
            elif row.parts:
                volume.drop_value(txn, int_key(block), volume.db)
                txn.put(int_key(block), b"", db=volume.db, overwrite=False)
            part = row.parts if row is not None else 0
            while volume.drop_value(txn, part_key(block, part), volume.parts):
                part += 1
        txn.delete(_JOURNAL)
    # LMDB hands pages out again from the second transaction after the one that freed them.
    with volume.env.begin(db=volume.db, write=True) as txn:
        txn.put(int_key(0), b"")
    return len(blocks)
