"""Making a store smaller when it is opened with a lower maximum.

LMDB files never shrink, so what is kept is moved out of some volumes, into free
pages of the others, and those volumes are dropped. Nothing else has the store
open then.
"""

import contextlib
import os
import shutil
from pathlib import Path

import lmdb

from cachefs.sizes import MIB
from cachefs.states.pieces import Buffer
from cachefs.store.errors import StoreFull
from cachefs.store.index import Index
from cachefs.store.layout import HEADROOM, MIN_VOLUME, PAGE, PART_BYTES, Budget, footprint
from cachefs.store.records import BlockRow, VolumeRow, int_key
from cachefs.store.tree import Tree
from cachefs.store.volumes import Volume
from cachefs.store.writer import Writer

_BATCH = 64


def fit_maps(root: Path, budget: Budget, rows: dict[int, VolumeRow]) -> dict[int, VolumeRow]:
    """Map sizes within ``budget.data`` where the files allow it: each at least its file's size.

    Where they do not, each is a little larger, since LMDB needs fresh pages even to
    delete; `excess` is then positive and the volumes too many are to be dropped.
    """
    sizes = {n: _file_bytes(root, n) for n in rows}
    slack = budget.data - sum(sizes.values())
    if slack < 0:
        return {n: row._replace(map_bytes=sizes[n] // PAGE * PAGE + MIB) for n, row in rows.items()}
    fitted = {}
    for number, row in rows.items():
        growth = max(0, min(row.map_bytes - sizes[number], slack))
        slack -= growth
        fitted[number] = row._replace(map_bytes=max(PAGE * 64, (sizes[number] + growth) // PAGE * PAGE))
    return fitted


def _file_bytes(root: Path, number: int) -> int:
    try:
        return (root / f"{number:04d}" / "data.mdb").stat().st_size
    except FileNotFoundError:
        return 0


def excess(writer: Writer) -> int:
    """Bytes by which the volumes pass their budget."""
    return sum(v.map_bytes for v in writer.volumes.by_number.values()) - writer.budget.data


def _kept(writer: Writer) -> tuple[list[Volume], int]:
    """The fullest volumes that fit the budget, and the map size of a new one beside them (0: none)."""
    left, kept = writer.budget.data, []
    for volume in sorted(writer.volumes.by_number.values(), key=lambda v: v.used, reverse=True):
        if volume.map_bytes <= left:
            left -= volume.map_bytes
            kept.append(volume)
    return kept, left // PAGE * PAGE if left >= MIN_VOLUME else 0


def live_bytes_allowed(writer: Writer) -> int:
    """Footprint in bytes that fits once the volumes that are too many have been dropped."""
    kept, fresh = _kept(writer)
    return int((sum(v.capacity for v in kept) + fresh * (1 - HEADROOM)) * (1 - HEADROOM))


def pinned_bytes(writer: Writer, tree: Tree) -> int:
    """Footprint in bytes of the blocks that pinned files need."""
    blocks: set[int] = set()
    for ino in tree.pinned:
        blocks.update(tree.recipe(ino).blocks()[0].tolist())
    total = 0
    with writer.index.env.begin(db=writer.index.dbs["blocks"]) as txn:
        for block in blocks:
            value = txn.get(int_key(block))
            total += footprint(BlockRow.unpack(value).stored) if value else 0
    return total


def drop_volumes(writer: Writer) -> None:
    """Empty the volumes that are too many into the others and a new one, and drop them.

    Enough must have been deleted before (`live_bytes_allowed`). Raises StoreFull
    when blocks find no place.
    """
    kept, fresh = _kept(writer)
    gone = [v for v in writer.volumes.by_number.values() if v not in kept]
    targets = [*kept, writer.volumes.make(fresh)] if fresh else kept
    for source in gone:
        _empty(writer, source, targets)
        with writer.index.env.begin(write=True) as txn:
            txn.delete(int_key(source.number), db=writer.index.dbs["volumes"])
        writer.volumes.drop(source.number)


def _empty(writer: Writer, source: Volume, targets: list[Volume]) -> None:
    ids = source.ids()
    blocks = writer.index.dbs["blocks"]
    for start in range(0, len(ids), _BATCH):
        batch: list[tuple[int, Buffer, BlockRow]] = []
        with source.env.begin(db=source.db) as payloads, writer.index.env.begin() as txn:
            for block in ids[start : start + _BATCH]:
                value = txn.get(int_key(block), db=blocks)
                row = BlockRow.unpack(value) if value else None
                if row is not None and row.volume == source.number:
                    payload = source.get(payloads, block, row.parts)
                    if payload is not None:
                        batch.append((block, payload, row))
        moved = _put(batch, targets)
        with writer.index.env.begin(write=True) as txn:
            for block, row in moved:
                txn.put(int_key(block), row.pack(), db=blocks)
            for volume in targets:
                txn.put(int_key(volume.number), volume.row.pack(), db=writer.index.dbs["volumes"])
        with contextlib.suppress(lmdb.MapFullError):  # it is to be dropped anyway
            source.delete((block, row) for block, _, row in batch)


def _put(batch: list[tuple[int, Buffer, BlockRow]], targets: list[Volume]) -> list[tuple[int, BlockRow]]:
    moved: list[tuple[int, BlockRow]] = []
    for part_bytes in (0, *PART_BYTES):
        for target in sorted(targets, key=lambda v: v.free, reverse=True):
            if not batch:
                return moved
            try:
                parts = target.put(((block, payload) for block, payload, _ in batch), part_bytes)
            except lmdb.MapFullError:
                continue
            hints = target.locate(parts)
            moved += [
                (b, row._replace(volume=target.number, parts=parts[b], hint=hints[b])) for b, _, row in batch
            ]
            batch = []
    if batch:
        raise StoreFull("no room in the remaining volumes")
    return moved


def empty(writer: Writer) -> None:
    """Delete all victims and drop all volumes; no file may need a block any more."""
    writer.purge(writer.volumes.used + 1)
    for number in list(writer.volumes.by_number):
        with writer.index.env.begin(write=True) as txn:
            txn.delete(int_key(number), db=writer.index.dbs["volumes"])
        writer.volumes.drop(number)


def rewrite_index(path: Path, map_bytes: int) -> None:
    """Copy an index entry by entry into a new file; nobody may have it open.

    LMDB's own compaction copies pages with what was deleted from them.
    """
    fresh = path / "compact"
    shutil.rmtree(fresh, ignore_errors=True)  # what a crash left
    fresh.mkdir(mode=0o700)
    old, new = Index(path, map_bytes), Index(fresh, map_bytes, clean=True)
    try:
        with old.snapshot() as source, new.env.begin(write=True) as target:
            for name, db in old.dbs.items():
                target.cursor(new.dbs[name]).putmulti(source.cursor(db))
    finally:
        old.close()
        new.close()
    _replace(path, fresh)


def _replace(path: Path, fresh: Path) -> None:
    (fresh / "data.mdb").rename(path / "data.mdb")
    for name in (path / "lock.mdb", fresh / "lock.mdb"):
        name.unlink(missing_ok=True)
    fresh.rmdir()
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def compact_index(path: Path, map_bytes: int) -> None:
    """Rewrite an index whose file is larger than it may be; nobody may have it open."""
    data = path / "data.mdb"
    if not data.exists() or data.stat().st_size <= map_bytes:
        return
    fresh = path / "compact"
    shutil.rmtree(fresh, ignore_errors=True)  # what a crash left
    fresh.mkdir(mode=0o700, exist_ok=True)
    with lmdb.open(str(path), map_size=data.stat().st_size * 2, max_dbs=64) as env:
        env.copy(str(fresh), compact=True)
    copy = fresh / "data.mdb"
    with copy.open("rb") as file:
        os.fsync(file.fileno())
    copy.chmod(0o600)
    _replace(path, fresh)
