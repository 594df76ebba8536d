"""A count of everything in a store from scratch: recipes, payloads and the tree against what the index says.

``assert_exact(store)`` after a commit holds for every store at any time, also after a crash and a reopen.
"""

from __future__ import annotations

import json
import stat
from collections import Counter, defaultdict

from cachefs.store import Store
from cachefs.store.index import TABLES
from cachefs.store.layout import footprint
from cachefs.store.recipe import Recipe
from cachefs.store.records import (
    BlockRow,
    Dirent,
    Inode,
    Refs,
    VolumeRow,
    be,
    be_pair,
    int_key,
    int_of,
    of_be,
)
from cachefs.store.tree import ROOT

Tables = dict[str, dict[bytes, bytes]]


def assert_exact(store: Store, *, interrupted: bool = False) -> None:
    """What is committed agrees with a count from scratch.

    ``interrupted``: a purge was, so that victims may lie there without their payload.
    """
    assert discrepancies(store, interrupted=interrupted) == []


def assert_nothing_leaks(store: Store) -> None:
    """Nothing is accounted for anybody any more. Holds when no file is open and all is committed."""
    blocks = store.blocks
    assert store.queued == 0
    assert not blocks.held
    assert blocks.revived == {}
    assert blocks.revived_bytes == 0
    assert not blocks.dying
    pool = blocks.pool
    assert not pool.by_id
    assert not pool.digests
    assert not pool.heads
    assert not pool.tails
    assert pool.footprint == 0


def discrepancies(store: Store, *, interrupted: bool = False) -> list[str]:
    """Where the committed index and a count from scratch differ, one sentence each."""
    with store.index.snapshot() as txn:
        tables: Tables = {
            name: {bytes(key): bytes(value) for key, value in txn.cursor(store.index.dbs[name])}
            for name in TABLES
        }
    wrong: list[str] = []
    inodes = {of_be(key): Inode.unpack(value) for key, value in tables["inodes"].items()}
    rows = {int_of(key): BlockRow.unpack(value) for key, value in tables["blocks"].items()}
    uses = _references(tables, inodes, wrong)
    _check_blocks(tables, rows, uses, wrong)
    _check_counters(tables, inodes, rows, uses, wrong)
    may_lack = {block for block in rows if interrupted and not uses[block]}
    _check_volumes(store, tables, rows, may_lack, wrong)
    _check_tree(tables, inodes, wrong)
    return wrong


def _references(tables: Tables, inodes: dict[int, Inode], wrong: list[str]) -> Counter[int]:
    """How often recipes name each block."""
    pages: dict[int, list[bytes]] = defaultdict(list)
    for key in sorted(tables["recipes"]):
        ino = of_be(key[:8])
        if of_be(key[8:]) != len(pages[ino]):
            wrong.append(f"inode {ino} lacks recipe page {len(pages[ino])}")
        pages[ino].append(tables["recipes"][key])
    uses: Counter[int] = Counter()
    for ino in pages.keys() | inodes.keys():
        recipe = Recipe.from_pages(pages.get(ino, []))
        inode = inodes.get(ino)
        if inode is None:
            wrong.append(f"a recipe of inode {ino}, which does not exist")
        elif stat.S_ISREG(inode.mode) and inode.size != recipe.size and (inode.nlink or recipe.size):
            wrong.append(f"inode {ino}: size {inode.size}, but its recipe covers {recipe.size}")
        ids, counts = recipe.blocks()
        uses.update(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
    return uses


def _check_blocks(tables: Tables, rows: dict[int, BlockRow], uses: Counter[int], wrong: list[str]) -> None:
    refs = {int_of(key): Refs.unpack(value) for key, value in tables["refs"].items()}
    if refs.keys() != rows.keys():
        wrong.append(f"blocks without a count or counts without a block: {refs.keys() ^ rows.keys()}")
    if missing := uses.keys() - rows.keys():
        wrong.append(f"recipes name blocks that do not exist: {missing}")
    for block, count in refs.items():
        if count.number != uses[block]:
            wrong.append(f"block {block} is counted {count.number} times and named {uses[block]} times")
    victims = {of_be(turn): int_of(key) for turn, key in tables["victims"].items()}
    expected = {count.turn: block for block, count in refs.items() if not count.number}
    if victims != expected:
        wrong.append(f"victims {victims}, but unreferenced are {expected}")
    for table, field in (("digests", "digest"), ("heads", "head"), ("tails", "tail")):
        for key, value in tables[table].items():
            row = rows.get(int_of(value))
            found = None if row is None else getattr(row, field)
            if (found if field == "digest" else int_key(found or 0)) != key:
                wrong.append(f"{table} lead to block {int_of(value)}, which is another")


def _check_counters(
    tables: Tables, inodes: dict[int, Inode], rows: dict[int, BlockRow], uses: Counter[int], wrong: list[str]
) -> None:
    files = [inode for inode in inodes.values() if stat.S_ISREG(inode.mode) and inode.nlink]
    used = [row for block, row in rows.items() if uses[block]]
    unused = [row for block, row in rows.items() if not uses[block]]
    expected = {
        "entries": len(files),
        "logical_bytes": sum(inode.size for inode in files),
        "row_bytes": sum(inode.row_bytes for inode in files),
        "blocks": len(rows),
        "stored_bytes": sum(row.raw for row in used),
        "compressed_bytes": sum(footprint(row.stored) for row in used),
        "victim_bytes": sum(footprint(row.stored) for row in unused),
    }
    counters = json.loads(tables["meta"].get(b"counters", b"{}"))
    for name, value in expected.items():
        if counters.get(name, 0) != value:
            wrong.append(f"{name} is {counters.get(name, 0)}, counted {value}")


def _check_volumes(
    store: Store, tables: Tables, rows: dict[int, BlockRow], may_lack: set[int], wrong: list[str]
) -> None:
    stored = {int_of(key): VolumeRow.unpack(value) for key, value in tables["volumes"].items()}
    lost = {row.volume for row in rows.values()} - store.volumes.by_number.keys()
    if lost:
        wrong.append(f"blocks in volumes that do not exist: {lost}")
    for number, volume in store.volumes.by_number.items():
        mine = {block: row for block, row in rows.items() if row.volume == number}
        there = set(volume.ids())
        if there - mine.keys() or mine.keys() - there - may_lack:
            wrong.append(f"volume {number}: payloads and blocks differ: {there ^ mine.keys()}")
        with volume.env.begin() as txn:
            parts = txn.stat(volume.parts)["entries"]
        expected = sum(row.parts for block, row in mine.items() if block in there)
        if parts != expected:
            wrong.append(f"volume {number} holds {parts} parts, not {expected}")
        used = sum(footprint(row.stored) for row in mine.values())
        if (volume.used, volume.blocks) != (used, len(mine)):
            wrong.append(
                f"volume {number}: {volume.used} bytes of {volume.blocks}, not {used} of {len(mine)}"
            )
        if number in stored and stored[number] != volume.row and mine:
            wrong.append(f"volume {number} is remembered as {stored[number]}, not {volume.row}")


def _check_tree(tables: Tables, inodes: dict[int, Inode], wrong: list[str]) -> None:
    subdirs: Counter[int] = Counter()
    linked = {ROOT}
    cookies = {}
    for key, value in tables["dirents"].items():
        parent, name, dirent = of_be(key[:8]), key[8:], Dirent.unpack(value)
        cookies[be_pair(parent, dirent.cookie)] = value + name
        inode = inodes.get(dirent.ino)
        linked.add(dirent.ino)
        subdirs[parent] += stat.S_ISDIR(dirent.kind)
        if inode is None or (inode.parent, inode.cookie) != (parent, dirent.cookie):
            wrong.append(f"{name!r} in {parent} leads to inode {dirent.ino}: {inode}")
        elif stat.S_IFMT(inode.mode) != dirent.kind:
            wrong.append(f"{name!r} in {parent} is of another kind than its inode")
    if cookies != tables["cookies"]:
        wrong.append("names by cookie differ from names")
    orphans = {of_be(key) for key in tables["orphans"]}
    if orphans != inodes.keys() - linked:
        wrong.append(f"orphans {orphans}, but {inodes.keys() - linked} have no name")
    for ino, inode in inodes.items():
        nlink = 0 if ino in orphans else 2 + subdirs[ino] if stat.S_ISDIR(inode.mode) else 1
        if inode.nlink != nlink:
            wrong.append(f"inode {ino} has nlink {inode.nlink}, not {nlink}")
    expected = {
        be_pair(inode.last_use, ino)
        for ino, inode in inodes.items()
        if inode.nlink and stat.S_ISREG(inode.mode)
    }
    if set(tables["uses"]) != expected:
        wrong.append("uses are not those of the files")
    for table in ("xattrs", "about", "recipes"):
        strange = {of_be(key[:8]) for key in tables[table]} - inodes.keys()
        if strange:
            wrong.append(f"{table} of inodes that do not exist: {strange}")
    assert be(ROOT) in tables["inodes"] or not inodes
