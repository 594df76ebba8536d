"""The bound holds at every moment: maps add up to less, and what lies on disk never passes it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cachefs.sizes import MIB
from cachefs.states.pieces import Chunk
from cachefs.store import Store, StoreFull, home
from cachefs.store.layout import SPARE
from cachefs.store.recipe import Recipe
from cachefs.store.volumes import Volume

from .conftest import Opener
from .filling import SMALL, add, content, make, names, noise, remove
from .recount import assert_exact, assert_nothing_leaks


class Churn:
    """Files of random sizes come until there is no room, then the oldest go."""

    def __init__(self, store: Store, seed: int, sizes: list[int]) -> None:
        self.store = store
        self.random = random.Random(seed)
        self.sizes = sizes
        self.data = noise(8 * MIB, seed)
        self.files: dict[bytes, bytes] = {}
        self.refused = 0

    def check_bound(self) -> None:
        maps = sum(volume.map_bytes for volume in self.store.volumes.by_number.values())
        assert maps <= self.store.budget.data
        assert maps + self.store.budget.index + SPARE <= self.store.max_bytes
        assert home.disk_bytes(self.store.path) <= self.store.max_bytes

    def step(self, number: int) -> None:
        """Save one file as the daemon does: reserve room, evict for it, write behind."""
        store = self.store
        placer = store.placer()
        parts = []
        for _ in range(self.random.randint(1, 12)):
            size = self.random.choice(self.sizes)
            start = self.random.randrange(len(self.data) - size)
            part = self.data[start : start + size]
            while not store.reserve(size):
                if not store.evict(size):
                    pytest.fail("no room and nothing to evict")
                store.commit()
            placer.place(Chunk(part))
            store.queued -= size
            parts.append(part)
            try:
                store.write_behind()
            except StoreFull:
                self.refused += 1
        name = b"f%d" % number
        ino = make(store, name)
        store.tree.set_content(ino, Recipe(placer.take()), 0, None)
        store.index.active.holds.append(placer.take_holds())
        self.files[name] = b"".join(parts)
        if number % 3 == 0:
            store.commit()
            self.check_bound()


def test_random_churn_stays_below(opened: Opener) -> None:
    """Three times over with blocks from 100 bytes to 256 KiB: nothing is refused and nothing is lost."""
    store = opened(SMALL)
    churn = Churn(store, 5, [100, 1500, 4000, 5000, 20_000, 65_536, 131_072, 200_000, 262_144])
    number = 0
    while store.counters()["new_block_bytes"] < 3 * SMALL:
        churn.step(number)
        number += 1
    store.commit()
    churn.check_bound()
    assert churn.refused == 0
    left = names(store)
    assert sum(len(churn.files[name]) for name in left) > SMALL // 4, "most of the room is used"
    for name in left:
        assert content(store, store.tree.require(1, name).ino) == churn.files[name]
    assert_exact(store)
    assert_nothing_leaks(store)
    store = opened()
    assert names(store) == left
    assert_exact(store)


def test_small_blocks_only(opened: Opener) -> None:
    """Thousands of blocks of a few hundred bytes: leaf pages and index rows stay within their maps."""
    store = opened(SMALL)
    churn = Churn(store, 6, [100, 300, 700, 1999, 2001])
    for number in range(600):
        churn.step(number)
    store.commit()
    churn.check_bound()
    assert_exact(store)


def test_room_is_what_can_be_written(opened: Opener) -> None:
    """What room promises can be had without evicting, in blocks of any size."""
    for size in (5000, 65_536, 262_144):
        store = opened(SMALL)
        placer = store.placer()
        number = size
        while store.room() > 2 * size:
            placer.place(Chunk(noise(size, number)))
            store.write_behind()
            number += 1
        while store.blocks.pool.by_id:
            store.writer.write_out()
        assert store.volumes.used > store.volumes.capacity * 3 // 4
        store.blocks.release(placer.take_holds())
        store.commit()
        store.writer.purge(1 << 40)
        assert_exact(store)
        assert_nothing_leaks(store)


def test_what_is_being_written_takes_room_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment it is in the pool and in a volume; a file evicted for that would be gone for nothing."""
    add(store, b"a", [Chunk(noise(MIB, n)) for n in range(6)])
    before = store.room()
    seen: list[int] = []
    name = type(store.writer)._name

    def look(*arguments: Any) -> Any:
        seen.append(store.room())
        return name(*arguments)

    monkeypatch.setattr(type(store.writer), "_name", look)
    store.commit()
    assert seen == [before]
    assert store.room() == before


def test_a_purge_changes_no_room(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Victims count as room already, also where the disk is the bound, and while they are deleted."""
    for number in range(4):
        add(store, b"%d" % number, [Chunk(noise(MIB, number))])
    store.commit()
    for number in range(3):
        remove(store, b"%d" % number)
    store.commit()
    free = store.volumes.on_disk()._replace(free=8 * MIB)
    monkeypatch.setattr(type(store.volumes), "on_disk", lambda volumes: free)
    store.look_again()
    before = store.room()
    seen: list[int] = []
    drop = Volume._drop_located

    def look(*arguments: Any) -> Any:
        seen.append(store.room())
        return drop(*arguments)

    monkeypatch.setattr(Volume, "_drop_located", look)
    assert store.writer.purge(2 * MIB) >= 2 * MIB
    assert set(seen) == {before}
    assert store.room() == before
