"""Compressing in idle times: it waits for quiet, gives way to clients, and survives what fails."""

from __future__ import annotations

import lmdb
import pytest
import trio

from cachefs.mount import recompress
from cachefs.mount.recompress import Idle
from cachefs.store.records import RAW, BlockRow

from ..store.breaking import failing
from ..store.filling import SMALL, noise
from ..store.recount import assert_exact
from ..store.test_codec import numbers
from .desk import Desk

DATA = numbers("f2", 98_304) * 4


async def idle(desk: Desk, nursery: trio.Nursery) -> Idle:
    recompressor = desk.store.compress("idle", 1)
    assert recompressor is not None
    made = Idle(desk.store, recompressor)
    nursery.start_soon(made.run)
    return made


async def save(desk: Desk) -> None:
    await desk.save(b"a", DATA)
    await desk.upkeep.commit()


def compressed(desk: Desk) -> bool:
    with desk.store.index.snapshot() as txn:
        rows = [BlockRow.unpack(row) for _, row in txn.cursor(desk.store.index.dbs["blocks"])]
    return all(row.codec != RAW for row in rows)


async def until_compressed(desk: Desk) -> None:
    with trio.fail_after(30):
        while not compressed(desk):  # noqa: ASYNC110 - a thread does it, and tells nobody
            await trio.sleep(0.01)


async def test_when_it_is_quiet(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompress, "QUIET", 0.05)
    await save(desk)
    async with trio.open_nursery() as nursery:
        await idle(desk, nursery)
        await until_compressed(desk)
        nursery.cancel_scope.cancel()
    assert_exact(desk.store)
    assert await desk.load(b"a") == DATA


async def test_not_while_a_client_is_there(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompress, "_LOOK", 0.001)
    monkeypatch.setattr(recompress, "QUIET", 1000.0)
    await save(desk)
    async with trio.open_nursery() as nursery:
        (await idle(desk, nursery)).client()
        await trio.sleep(0.1)
        assert not compressed(desk)
        nursery.cancel_scope.cancel()


async def test_a_moment_is_enough_where_room_is_short(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not while a save is being placed."""
    monkeypatch.setattr(recompress, "QUIET", 1000.0)
    await desk.save(b"noise", noise(SMALL // 2))
    await save(desk)
    monkeypatch.setattr(type(desk.store), "low_water", desk.store.volumes.capacity)
    desk.store.queued = 1
    async with trio.open_nursery() as nursery:
        await idle(desk, nursery)
        await trio.sleep(0.5)
        assert not compressed(desk)
        desk.store.queued = 0
        await until_compressed(desk)
        nursery.cancel_scope.cancel()
    assert_exact(desk.store)


async def test_it_goes_on_after_a_failure(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompress, "QUIET", 0.0)
    monkeypatch.setattr(recompress, "_AFTER_FAILURE", 0.01)
    await save(desk)
    async with trio.open_nursery() as nursery:
        with failing(desk.store, "_meta", lmdb.DiskError("no space")):
            await idle(desk, nursery)
            await trio.sleep(0.4)
            assert not compressed(desk)
        await until_compressed(desk)
        nursery.cancel_scope.cancel()
    assert_exact(desk.store)


async def test_it_ends_at_once(desk: Desk) -> None:
    """Also when it had nothing to do."""
    async with trio.open_nursery() as nursery:
        await idle(desk, nursery)
        await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
