"""Commits and eviction beside the requests: nothing is lost when one fails, and room is made ahead."""

from __future__ import annotations

import lmdb
import pytest
import trio

from cachefs.sizes import MIB
from cachefs.store import StoreFull

from ..store.breaking import failing
from ..store.filling import content, noise, remove
from ..store.recount import assert_exact
from .desk import Desk


async def fill(desk: Desk, count: int, size: int = 4 * MIB) -> list[bytes]:
    """Files, each used after the one before."""
    names = [b"f%02d" % number for number in range(count)]
    for number, name in enumerate(names):
        await desk.save(name, noise(size, number))
        await desk.upkeep.commit()
    return names


async def test_a_failed_commit_is_made_up_for(desk: Desk) -> None:
    """What could not be committed stays pending and readable, beside what came meanwhile."""
    await desk.save(b"a", noise(300_000, 1))
    with failing(desk.store, "_meta", lmdb.DiskError("no space")):
        for _ in range(2):
            with pytest.raises(StoreFull):
                await desk.upkeep.commit()
            assert await desk.load(b"a") == noise(300_000, 1)
    await desk.save(b"b", noise(300_000, 2))
    assert desk.store.counters()["entries"] == 2
    await desk.upkeep.commit()
    assert_exact(desk.store)
    assert desk.in_tree(b"a") == noise(300_000, 1)
    assert desk.in_tree(b"b") == noise(300_000, 2)


async def test_commits_at_once_take_turns(desk: Desk) -> None:
    async with trio.open_nursery() as nursery:
        for number in range(8):
            await desk.save(b"%d" % number, noise(50_000, number))
            nursery.start_soon(desk.upkeep.commit)
    await desk.upkeep.commit()
    assert_exact(desk.store)
    assert desk.store.counters()["entries"] == 8


async def test_what_was_just_unlinked_is_room(desk: Desk) -> None:
    """Even before its commit, and with nothing left to evict."""
    await desk.save(b"a", noise(30 * MIB))
    await desk.upkeep.commit()
    remove(desk.store, b"a")
    await desk.upkeep.make_room(20 * MIB)
    desk.store.queued -= 20 * MIB
    assert desk.gone == []


async def test_room_is_made_by_evicting_the_oldest(desk: Desk) -> None:
    names = await fill(desk, 8)
    before = desk.store.room()
    await desk.upkeep.make_room(before + 2 * MIB)
    desk.store.queued -= before + 2 * MIB
    assert desk.gone
    assert desk.gone == names[: len(desk.gone)]
    assert len(desk.gone) <= 4, "no more than it takes"
    for number, name in enumerate(names):
        if name not in desk.gone:
            assert await desk.load(name) == noise(4 * MIB, number)


async def test_more_than_there_is_evicts_and_refuses(desk: Desk) -> None:
    """And leaves the account as it was."""
    await fill(desk, 3)
    with pytest.raises(OSError, match="no space"):
        await desk.upkeep.make_room(60 * MIB)
    assert desk.store.queued == 0


async def test_eviction_runs_ahead(desk: Desk) -> None:
    """Once there is little room, it makes more before anybody has to wait for it."""
    store = desk.store
    number = 0
    while not desk.upkeep.is_low():
        await desk.save(b"%03d" % number, noise(MIB, number))
        await desk.upkeep.commit()
        number += 1
    assert desk.gone == []
    await desk.upkeep._evict_while_low()
    assert not desk.upkeep.is_low()
    assert desk.gone == [b"%03d" % n for n in range(len(desk.gone))]
    assert store.volumes.free >= min(2 * store.budget.batch, store.low_water)
    kept = store.tree.require(1, b"%03d" % (number - 1)).ino
    assert content(store, kept) == noise(MIB, number - 1)


async def test_open_files_are_not_evicted(desk: Desk) -> None:
    await fill(desk, 3)
    one = desk.open(b"f00")
    with pytest.raises(OSError, match="no space"):
        await desk.upkeep.make_room(60 * MIB)
    assert sorted(desk.gone) == [b"f01", b"f02"]
    assert bytes(await one.read(0, one.size)) == noise(4 * MIB, 0)
    await desk.close(one)
