"""The scrub: every block once an age, verified or not before; damage found; a restart goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from cachefs.mount import scrub
from cachefs.mount.scrub import Position, Scrub
from cachefs.store import Store
from cachefs.store.check import check_open
from cachefs.store.records import int_key

from ..store.filling import SMALL, add, content, noise

MONTH = 30 * 86400.0


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(scrub, "QUIET", 0.01)
    monkeypatch.setattr(scrub, "_SHARE", 0)
    store = Store.open(tmp_path / "s", SMALL)
    for n in range(8):
        add(store, b"f%d" % n, noise(1_500_000, n))
    store.commit()
    yield store
    store.close()


def spoil(store: Store, block: int) -> None:
    (volume,) = store.volumes.by_number.values()
    with volume.env.begin(write=True, db=volume.db) as txn:
        txn.put(int_key(block), bytes(len(txn.get(int_key(block)) or b"")))


def due(store: Store, **position: float) -> None:
    store.writer.remember(b"scrub", {"next": 0, "begun": 1.0, "ended": 0.0, **position})


async def one_pass(store: Store, age: float = MONTH) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Scrub(store, age).run)
        with trio.fail_after(20):
            while not (store.writer.remembered(b"scrub") or {}).get("ended"):  # noqa: ASYNC110
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


async def test_a_pass_reads_every_block_and_finds_damage(store: Store) -> None:
    ino = store.resolve("f3")[2]
    assert content(store, ino) == noise(1_500_000, 3)
    block = store.tree.recipe(ino).blocks()[0].tolist()[4]
    spoil(store, block)
    due(store)
    await one_pass(store)
    store.writer.write_out()
    assert store.blocks.damaged == {block}
    counters = store.counters()
    assert counters["corrupt_blocks"] == 1
    assert counters["scrubbed_bytes"] == 8 * 1_500_000
    assert time.time() - store.writer.remembered(b"scrub")["begun"] < 60


async def test_a_new_store_waits_an_age(store: Store) -> None:
    with trio.move_on_after(0.2):
        await Scrub(store, MONTH).run()
    assert Position(**store.writer.remembered(b"scrub")).begun > time.time() - 60
    assert not store.counters()["scrubbed_bytes"]


async def test_a_restart_goes_on(store: Store) -> None:
    """Blocks before the remembered one are not read again."""
    ids = store.tree.recipe(store.resolve("f4")[2]).blocks()[0].tolist()
    due(store, next=ids[0], begun=time.time() - 100)
    await one_pass(store)
    assert store.counters()["scrubbed_bytes"] == 4 * 1_500_000


async def test_it_waits_while_the_mount_is_busy(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "QUIET", 0.1)
    due(store)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Scrub(store, MONTH).run)
        for _ in range(100):
            store.index.active.counters["read_bytes"] += 1
            await trio.sleep(0.002)
        assert not store.counters()["scrubbed_bytes"]
        nursery.cancel_scope.cancel()


async def test_off_means_off(store: Store) -> None:
    due(store)
    await Scrub(store, 0).run()
    assert not store.counters()["scrubbed_bytes"]


async def test_what_it_keeps_does_not_disturb_a_check(store: Store) -> None:
    due(store)
    await one_pass(store)
    store.commit()
    assert check_open(store.index, store.volumes, deep=True).sound
