#!/usr/bin/env python3
"""Fill a new store with tiny blocks, fast, through the store's own code.

fillstore.py STORE MAX_BYTES BLOCKS ENTRIES
"""

import os
import random
import stat
import sys
from pathlib import Path

import xxhash

from cachefs.store import Store, recipe
from cachefs.store.recipe import Recipe
from cachefs.store.records import ROWS
from cachefs.store.tree import ROOT

WIDTH = 64
COMMIT = 50_000
"""Blocks a transaction."""


def add_entry(store: Store, name: str, count: int, rng: random.Random) -> None:
    """A file of ``count`` new blocks of two rows each, findable by digest and by row."""
    words, ids = [], []
    for _ in range(count):
        raw = rng.randbytes(2 * WIDTH)
        head, tail = xxhash.xxh3_64_intdigest(raw[:WIDTH]) or 1, xxhash.xxh3_64_intdigest(raw[WIDTH:]) or 1
        block = store.blocks.add(raw, xxhash.xxh3_128_digest(raw), ROWS, WIDTH, 0, head, tail)
        words.append(recipe.slice_of(block, 0, len(raw)))
        ids.append(block)
    ino, _ = store.tree.create(ROOT, name.encode(), stat.S_IFREG | 0o600, os.getuid(), os.getgid())
    store.tree.set_content(ino, Recipe(recipe.records(words)), count * 2 * WIDTH, None)
    store.index.active.holds.append(ids)


def main() -> None:
    """Make the store."""
    path, max_bytes, blocks, entries = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    rng = random.Random(1)
    store = Store.open(path, max_bytes)
    each, pending = blocks // entries, 0
    for number in range(entries):
        add_entry(store, f"entry{number}.bin", each, rng)
        pending += each
        if pending >= COMMIT:
            store.commit()
            pending = 0
    store.close()


if __name__ == "__main__":
    main()
