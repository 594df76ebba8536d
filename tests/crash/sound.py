"""Whether a store that nobody has mounted is consistent in itself."""

from __future__ import annotations

import json
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import lmdb
import xxhash

from cachefs.store import codec
from cachefs.store.index import Index
from cachefs.store.recipe import Recipe
from cachefs.store.records import BlockRow, Dirent, Inode, Refs, be, be_pair, int_of, of_be
from cachefs.store.tree import ROOT

Tables = dict[str, dict[bytes, bytes]]


def complaints(store: Path) -> list[str]:
    """What is wrong in the tree, the reference counts, the figures or the payloads."""
    index = Index(store / "index", None)
    try:
        with index.snapshot() as txn:
            tables: Tables = {name: dict(txn.cursor(db)) for name, db in index.dbs.items()}
    finally:
        index.close()
    inodes = {of_be(key): Inode.unpack(value) for key, value in tables["inodes"].items()}
    rows = {int_of(key): BlockRow.unpack(value) for key, value in tables["blocks"].items()}
    named, wrong = _recipes(tables, inodes)
    wrong += _tree(tables, inodes)
    wrong += _counts(tables, named, rows)
    wrong += _figures(tables, inodes, named, rows)
    return wrong + list(_payloads(store, {block: row for block, row in rows.items() if block in named}))


def _recipes(tables: Tables, inodes: dict[int, Inode]) -> tuple[Counter[int], list[str]]:
    """How many records name each block."""
    pages: dict[int, list[bytes]] = {}
    for key, page in sorted(tables["recipes"].items()):
        pages.setdefault(of_be(key[:8]), []).append(page)
    named: Counter[int] = Counter()
    wrong = [f"a recipe of no inode: {ino}" for ino in pages.keys() - inodes.keys()]
    for ino, inode in inodes.items():
        recipe = Recipe.from_pages(pages.get(ino, []))
        ids, counts = recipe.blocks()
        named.update(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
        if inode.nlink and inode.size != recipe.size:
            wrong.append(f"inode {ino}: {inode.size} bytes, its recipe has {recipe.size}")
    return named, wrong


def _tree(tables: Tables, inodes: dict[int, Inode]) -> list[str]:
    wrong = []
    subdirs: Counter[int] = Counter()
    linked = {ROOT}
    for key, value in tables["dirents"].items():
        parent, name, dirent = of_be(key[:8]), key[8:], Dirent.unpack(value)
        inode = inodes.get(dirent.ino)
        if inode is None or (inode.parent, inode.cookie) != (parent, dirent.cookie):
            wrong.append(f"{name!r} in {parent} and its inode {dirent.ino} differ: {inode}")
            continue
        if tables["cookies"].get(be_pair(parent, dirent.cookie)) != value + name:
            wrong.append(f"{name!r} in {parent} is listed otherwise")
        if stat.S_ISREG(inode.mode) and be_pair(inode.last_use, dirent.ino) not in tables["uses"]:
            wrong.append(f"{name!r} in {parent} would never be evicted")
        subdirs[parent] += dirent.kind == stat.S_IFDIR
        linked.add(dirent.ino)
    files = sum(stat.S_ISREG(inodes[ino].mode) for ino in linked)
    if len(tables["cookies"]) != len(tables["dirents"]) or len(tables["uses"]) != files:
        wrong.append("listings or uses of what has no name")
    orphans = {of_be(key) for key in tables["orphans"]}
    if orphans != inodes.keys() - linked:
        wrong.append(f"orphans {orphans}, without a name {inodes.keys() - linked}")
    for ino, inode in inodes.items():
        expected = 0 if ino in orphans else 2 + subdirs[ino] if stat.S_ISDIR(inode.mode) else 1
        if inode.nlink != expected:
            wrong.append(f"inode {ino}: nlink {inode.nlink}, not {expected}")
    return wrong


def _counts(tables: Tables, named: Counter[int], rows: dict[int, BlockRow]) -> list[str]:
    wrong = []
    refs = {int_of(key): Refs.unpack(value) for key, value in tables["refs"].items()}
    counted = {block: row.number for block, row in refs.items() if row.number}
    if counted != named:
        wrong.append(f"reference counts differ: {dict(counted.items() ^ named.items())}")
    if refs.keys() != rows.keys():
        wrong.append(f"blocks without a row or a count: {refs.keys() ^ rows.keys()}")
    victims = {int_of(value): of_be(key) for key, value in tables["victims"].items()}
    if victims != {block: row.turn for block, row in refs.items() if not row.number}:
        wrong.append("the victims are not the blocks that nobody names")
    return wrong


def _figures(
    tables: Tables, inodes: dict[int, Inode], named: Counter[int], rows: dict[int, BlockRow]
) -> list[str]:
    counters = json.loads(tables["meta"].get(b"counters", b"{}"))
    files = [inode for inode in inodes.values() if inode.nlink and stat.S_ISREG(inode.mode)]
    expected = {
        "entries": len(files),
        "logical_bytes": sum(inode.size for inode in files),
        "row_bytes": sum(inode.row_bytes for inode in files),
        "blocks": len(rows),
        "stored_bytes": sum(rows[block].raw for block in named if block in rows),
    }
    return [
        f"{name} is {counters.get(name, 0)}, should be {value}"
        for name, value in expected.items()
        if counters.get(name, 0) != value
    ]


def _payloads(store: Path, rows: dict[int, BlockRow]) -> Iterator[str]:
    for volume in {row.volume for row in rows.values()}:
        path = store / "volumes" / f"{volume:04d}"
        with lmdb.open(str(path), readonly=True, max_dbs=2) as env:
            whole = env.open_db(b"payloads", integerkey=True, create=False)
            parts = env.open_db(b"parts", create=False)
            with env.begin() as txn:
                for block, row in rows.items():
                    if row.volume != volume:
                        continue
                    payload = txn.get(block.to_bytes(8, "little"), db=whole)
                    if row.parts:
                        keys = [be(block) + number.to_bytes(4, "big") for number in range(row.parts)]
                        payload = b"".join(txn.get(key, db=parts) or b"" for key in keys)
                    if payload is None:
                        yield f"block {block} has no payload"
                    elif xxhash.xxh3_128_digest(codec.decode(payload, row.codec, row.raw)) != row.digest:
                        yield f"block {block} is damaged"
