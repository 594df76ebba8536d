"""Files put into a store without a mount, and stores that are closed again."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from cachefs.sizes import MIB
from cachefs.states.pieces import Chunk, Piece
from cachefs.store import Store
from cachefs.store.recipe import Recipe
from cachefs.store.tree import ROOT

SMALL = 64 * MIB


def noise(size: int, seed: int = 0) -> bytes:
    """``size`` bytes that do not compress."""
    return np.random.default_rng(seed).bytes(size)


def chunks(data: bytes, size: int = 128 * 1024) -> list[Piece]:
    return [Chunk(data[at : at + size]) for at in range(0, len(data), size)]


def in_memory() -> TemporaryDirectory[str]:
    """A directory for stores of tests, in memory where the system has room for it: syncing takes no time."""
    shared = Path("/dev/shm")
    there = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 1 << 30
    return TemporaryDirectory(prefix="cachefs-test-", dir=shared if there else None)


@contextmanager
def temporary_store(max_bytes: int = SMALL) -> Iterator[Store]:
    """A store in a directory of its own, for tests that run many times."""
    with in_memory() as path:
        store = Store.open(Path(path) / "store", max_bytes)
        try:
            yield store
        finally:
            store.close()


def place(store: Store, pieces: Iterable[Piece]) -> tuple[Recipe, list[int]]:
    """The recipe of pieces placed in order, and the holds that came with it."""
    placer = store.placer()
    for piece in pieces:
        placer.place(piece)
    return Recipe(placer.take()), placer.take_holds()


def make(store: Store, name: bytes, parent: int = ROOT) -> int:
    """An empty file; its inode number."""
    return store.tree.create(parent, name, stat.S_IFREG | 0o600, 0, 0)[0]


def fill(store: Store, ino: int, pieces: Iterable[Piece], row_bytes: int = 0) -> None:
    """Make the pieces a file's content; pending until the next commit."""
    recipe, holds = place(store, pieces)
    store.tree.set_content(ino, recipe, row_bytes, None)
    store.index.active.holds.append(holds)


def add(store: Store, name: bytes, data: bytes | Iterable[Piece], parent: int = ROOT) -> int:
    """A new file; its inode number. Pending until the next commit."""
    ino = make(store, name, parent)
    fill(store, ino, chunks(data) if isinstance(data, bytes) else data)
    return ino


def remove(store: Store, name: bytes, parent: int = ROOT) -> None:
    store.tree.release_orphan(store.tree.unlink(parent, name))


def content(store: Store, ino: int) -> bytes:
    """All bytes of a file as the tree has it."""
    recipe = store.tree.recipe(ino)
    return bytes(store.read(recipe, 0, recipe.size))


def names(store: Store) -> set[bytes]:
    return {path for path, _ in store.tree.walk()}
