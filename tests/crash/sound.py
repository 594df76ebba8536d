"""Whether a store that nobody has mounted is consistent in itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import lmdb
import xxhash

from cachefs.store import codec
from cachefs.store.index import Index
from cachefs.store.recipe import Recipe
from cachefs.store.records import BlockRow, Inode, Refs, int_of, of_be


def complaints(store: Path) -> list[str]:
    """What is wrong: reference counts, missing or damaged payloads, sizes, names without inodes."""
    index = Index(store / "index", None)
    try:
        with index.snapshot() as txn:
            tables = {name: dict(txn.cursor(db)) for name, db in index.dbs.items() if name != "meta"}
    finally:
        index.close()
    pages: dict[int, list[bytes]] = {}
    for key, page in sorted(tables["recipes"].items()):
        pages.setdefault(of_be(key[:8]), []).append(page)
    out = []
    named: Counter[int] = Counter()
    inodes = {of_be(key): Inode.unpack(value) for key, value in tables["inodes"].items()}
    for ino, parts in pages.items():
        recipe = Recipe.from_pages(parts)
        ids, counts = recipe.blocks()
        named.update(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
        if ino not in inodes:
            out.append(f"a recipe of no inode: {ino}")
        elif inodes[ino].nlink and inodes[ino].size != recipe.size:
            out.append(f"inode {ino}: {inodes[ino].size} bytes, its recipe has {recipe.size}")
    refs = {int_of(key): Refs.unpack(value) for key, value in tables["refs"].items()}
    counted = {block: row.number for block, row in refs.items() if row.number}
    if counted != named:
        out.append(f"reference counts differ: {dict(counted.items() ^ named.items())}")
    for key, value in tables["dirents"].items():
        if int.from_bytes(value[:8], "little") not in inodes:
            out.append(f"a name of no inode: {key!r}")
    rows = {int_of(key): BlockRow.unpack(value) for key, value in tables["blocks"].items()}
    if lost := named.keys() - rows.keys():
        out.append(f"blocks without a row: {sorted(lost)}")
    wanted = {block: row for block, row in rows.items() if block in named}
    return out + _payloads(store, wanted)


def _payloads(store: Path, rows: dict[int, BlockRow]) -> list[str]:
    out = []
    for volume in {row.volume for row in rows.values()}:
        with lmdb.open(str(store / "volumes" / f"{volume:04d}"), readonly=True, max_dbs=2) as env:
            whole, parts = (
                env.open_db(b"payloads", integerkey=True, create=False),
                env.open_db(b"parts", create=False),
            )
            with env.begin() as txn:
                for block, row in rows.items():
                    if row.volume != volume:
                        continue
                    payload = txn.get(block.to_bytes(8, "little"), db=whole)
                    if row.parts:
                        keys = [block.to_bytes(8, "big") + n.to_bytes(4, "big") for n in range(row.parts)]
                        payload = b"".join(txn.get(key, db=parts) or b"" for key in keys)
                    if payload is None:
                        out.append(f"block {block} has no payload")
                    elif xxhash.xxh3_128_digest(codec.decode(payload, row.codec, row.raw)) != row.digest:
                        out.append(f"block {block} is damaged")
    return out
