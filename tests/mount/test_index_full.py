"""A full index: victims go before files, and no more files than it takes."""

from __future__ import annotations

import pytest

from cachefs.sizes import MIB

from ..store.filling import noise, remove
from .desk import Desk


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
