"""What a repair takes away from the volumes: payloads, parts and whole volumes that belong to nothing."""

import shutil
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachefs.sizes import MIB, count
from cachefs.store.check import PART
from cachefs.store.check_index import BLOCK, KEY, VOLUME, Ids, IndexCheck, Rows
from cachefs.store.index import Index
from cachefs.store.layout import PAGE
from cachefs.store.records import VolumeRow
from cachefs.store.replace import settle
from cachefs.store.volumes import Volume, part_key


def drop_unknown(path: Path, folder: Path, done: list[str]) -> None:
    """Delete volumes that a crash left half made, or half dropped: those that the index does not name."""
    there = {int(each.name): each for each in (path / "volumes").glob("[0-9]*") if each.name.isdigit()}
    with closing(Index(folder, None)) as index, index.snapshot() as txn:
        found = IndexCheck(index, txn)
        named = set(found.table("volumes", KEY, VOLUME)[0].tolist())
        if there.keys() - named:  # a row may be lost whose volume is in use
            named |= set(found.table("blocks", KEY, BLOCK)[1]["volume"].tolist())
    for number in sorted(there.keys() - named):
        shutil.rmtree(there[number])
        done.append(f"removed volume {number}, which holds nothing")


def delete_strays(path: Path, done: list[str]) -> None:
    """Delete payloads that belong to no block, and parts of none."""
    with ExitStack() as stack:
        index = stack.enter_context(closing(Index(path / "index", None)))
        found = IndexCheck(index, stack.enter_context(index.snapshot()))
        deleted = _delete_in_volumes(path, index, found)
    if deleted:
        done.append(f"deleted {count(deleted, 'payload')} without a block")


def _delete_in_volumes(path: Path, index: Index, found: IndexCheck) -> int:
    deleted = 0
    ids, blocks = found.table("blocks", KEY, np.dtype(found.blocks.dtype))
    volumes, rows = found.table("volumes", KEY, np.dtype([("map_bytes", "<u8"), ("rest", "V16")]))
    for number, row in zip(volumes.tolist(), rows, strict=True):
        place = path / "volumes" / f"{number:04d}"
        size = max(int(row["map_bytes"]), (place / "data.mdb").stat().st_size) + MIB
        with closing(Volume(number, place, VolumeRow(size // PAGE * PAGE, 0, 0))) as volume:
            deleted += settle(volume, index)  # what was being compressed when a crash came
            mine = blocks["volume"] == number
            with volume.env.begin() as payloads:
                keys = b"".join(payloads.cursor(volume.parts).iternext(values=False))
            pieces = np.frombuffer(keys[: len(keys) // 12 * 12], PART)
            pieces = pieces[pieces["block"] != 0]
            owners = np.unique(pieces["block"]).astype(np.uint64)
            there = np.union1d(np.array(volume.ids(), np.uint64), owners)
            stray = np.setdiff1d(there, ids[mine]).tolist()
            if stray:
                volume.delete((block, None) for block in stray)
            deleted += len(stray) + _delete_parts(volume, pieces, ids[mine], blocks["parts"][mine])
    return deleted


def _delete_parts(volume: Volume, pieces: Rows, ids: Ids, parts: npt.NDArray[np.uint16]) -> int:
    """Delete the parts that these blocks' rows do not count; how many there were."""
    at = np.searchsorted(ids, pieces["block"])
    known = at < len(ids)
    known[known] = ids[at[known]] == pieces["block"][known]
    known[known] = pieces["number"][known] >= parts[at[known]]
    keys = [part_key(*map(int, piece)) for piece in pieces[known].tolist()]
    if keys:
        with volume.env.begin(db=volume.parts, write=True, buffers=True) as txn:
            for key in keys:
                volume.drop_value(txn, key, volume.parts)
    return len(keys)
