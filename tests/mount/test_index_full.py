"""A full index: victims go before files, and no more files than it takes."""

from __future__ import annotations

import errno

import pytest

from cachefs.sizes import MIB
from cachefs.store.tree import ROOT

from ..mounted.kernel import fails
from ..store.filling import SMALL, make, noise, remove
from .desk import Desk, desk


async def save(desk: Desk, count: int, name: bytes) -> None:
    for number in range(count):
        await desk.save(name + b"%02d" % number, noise(MIB, number + 100 * name[0]))
        await desk.upkeep.commit()


def full_above(desk: Desk, monkeypatch: pytest.MonkeyPatch, blocks: int) -> None:
    """The index counts as full while it has more blocks than that, victims or not."""
    monkeypatch.setattr(desk.store, "index_full", lambda: desk.store.counters()["blocks"] > blocks)


async def test_victims_go_before_files(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many must: as long as there are victims no file is evicted."""
    store = desk.store
    await save(desk, 4, b"kept")
    blocks = store.counters()["blocks"]
    await save(desk, 16, b"gone")
    for number in range(16):
        remove(store, b"gone%02d" % number)
    await desk.upkeep.commit()
    assert store.counters()["victim_bytes"] > 2 * store.low_water, "more than one purge deletes"
    full_above(desk, monkeypatch, blocks)
    await desk.upkeep._evict_while_low()
    assert desk.gone == []
    assert store.counters()["blocks"] == blocks


async def test_no_more_files_go_than_it_takes(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an eviction made victims is deleted before the next one."""
    store = desk.store
    await save(desk, 20, b"f")
    full_above(desk, monkeypatch, store.counters()["blocks"] - 1)
    await desk.upkeep._evict_while_low()
    assert not store.index_full()
    assert 1 <= len(desk.gone) <= 1 + store.low_water // 4 // MIB
    assert desk.gone == [b"f%02d" % number for number in range(len(desk.gone))]


async def test_nothing_goes_while_there_is_room(desk: Desk) -> None:
    await save(desk, 4, b"f")
    blocks = desk.store.counters()["blocks"]
    await desk.upkeep._evict_while_low()
    assert desk.gone == []
    assert desk.store.counters()["blocks"] == blocks


async def test_names_are_refused_when_nothing_more_can_go() -> None:
    """Rather than taken into memory, never to be committed. What is there stays, and can be removed."""
    async with desk(SMALL) as made:
        store, count = made.store, 0
        with fails(errno.ENOSPC):
            while count < 1_000:
                await made.upkeep.make_index_room(66_000)
                store.tree.set_xattr(ROOT, b"user.%d" % count, noise(65_536, count))
                count += 1
        assert store.index.pending < store.budget.index // 4
        await made.upkeep.commit()
        assert store.tree.xattr(ROOT, b"user.%d" % (count - 1)) == noise(65_536, count - 1)
        for number in range(count):
            store.tree.remove_xattr(ROOT, b"user.%d" % number)
        await made.upkeep.commit()
        await made.upkeep.make_index_room(66_000)


async def test_files_go_for_new_names() -> None:
    """Empty ones, too: they take no room but in the index."""
    rest = b"-" * 245
    async with desk(SMALL) as made:
        for number in range(15_000):
            await made.upkeep.make_index_room(512)
            make(made.store, b"%05d" % number + rest)
        assert made.gone[:3] == [b"00000" + rest, b"00001" + rest, b"00002" + rest]
        assert len(made.gone) < 13_000
        assert made.store.tree.lookup(ROOT, b"14999" + rest) is not None


async def test_a_file_of_more_pieces_than_the_index_takes() -> None:
    """ENOSPC from the write, and no memory that grows with them; the version before comes back."""
    async with desk(SMALL) as made:
        await made.save(b"a", b"old" * 100)
        content = made.open(b"a")
        await content.truncate(0)
        with fails(errno.ENOSPC):
            for number in range(200_000):
                await content.write(number * 8_192 + 1, b"%064d." % number)
        with fails(errno.ENOSPC):
            await made.close(content)
        assert made.in_tree(b"a") == b"old" * 100
