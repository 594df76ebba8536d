"""What readers see while a save settles, and what is left when settling, folding or recutting fails."""

from __future__ import annotations

import errno

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from cachefs.mount import scattered
from cachefs.mount.content import Content
from cachefs.sizes import MIB
from cachefs.states.pieces import Buffer
from cachefs.store import Damaged, StoreFull
from cachefs.store.place import Placer
from cachefs.store.recipe import Recipe

from ..store.filling import noise
from .desk import Desk


class Gate:
    """Stands for `write_behind`: a placing thread that comes to it waits until it is open."""

    def __init__(self) -> None:
        self.reached = trio.Event()
        self.open = trio.Event()

    def __call__(self) -> None:
        trio.from_thread.run_sync(self.reached.set)
        trio.from_thread.run(self.open.wait)


@pytest.fixture
def gate(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()
    monkeypatch.setattr(desk.store, "write_behind", made)
    return made


async def read_behind(gate: Gate, content: Content, offset: int, size: int) -> bytes:
    """What a reader gets who comes while a thread is at the gate, which opens once he waits or is done."""
    found: list[bytes] = []

    async def read() -> None:
        found.append(bytes(await content.read(offset, size)))

    await gate.reached.wait()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        gate.open.set()
    return found[0]


async def test_a_reader_while_a_write_settles_the_stream(desk: Desk, gate: Gate) -> None:
    """A header filled in at the end: the bytes that are still being placed are not missing meanwhile."""
    data = noise(MIB)
    content = desk.open(b"f")
    await content.write(0, data)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(content.write, 0, b"h" * 48)
        assert await read_behind(gate, content, 900_000, 4096) == data[900_000:904_096]
    await desk.close(content)
    assert await desk.load(b"f") == b"h" * 48 + data[48:]


async def test_a_reader_while_a_close_settles_the_stream(desk: Desk, gate: Gate) -> None:
    data = noise(MIB)
    content = desk.open(b"f")
    await content.write(0, data)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(content.flush)
        assert await read_behind(gate, content, 900_000, 4096) == data[900_000:904_096]
    await desk.abandon(content, killed=False)


async def test_a_reader_while_an_overlay_is_folded(desk: Desk, gate: Gate) -> None:
    """Bytes that were written are not the old ones again while they are placed."""
    gate.open.set()
    await desk.save(b"f", noise(MIB))
    gate.open = trio.Event()
    gate.reached = trio.Event()
    new = noise(200_000, 1)
    content = desk.open(b"f")
    await content.write(500_000, new)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(content.flush)
        assert await read_behind(gate, content, 600_000, 4096) == new[100_000:104_096]
    await desk.abandon(content, killed=False)


@pytest.mark.parametrize("synced", [0, 10_000])
async def test_an_append_that_fails_keeps_the_end(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, synced: int
) -> None:
    """The short last chunk goes through the stream again, yet is not lost with it; nor is what was synced."""
    kept = noise(40_000 + synced)
    await desk.save(b"f", kept[:40_000])
    await desk.upkeep.commit()
    content = desk.open(b"f")
    if synced:
        await content.write(40_000, kept[40_000:])
        await content.sync()
        await desk.upkeep.commit()

    def refuse(*arguments: object) -> None:
        raise StoreFull("no space")

    with monkeypatch.context() as patch:
        patch.setattr(Placer, "place", refuse)
        await content.write(len(kept), noise(300_000, 1))
        await content.flush()
        with pytest.raises(OSError, match="closed before"):
            await desk.upkeep.sync()
        with pytest.raises(OSError, match="not stored"):
            await content.sync()
    await desk.abandon(content, killed=False)
    await desk.upkeep.commit()
    assert desk.in_tree(b"f")[: len(kept)] == kept


async def test_a_fold_that_fails_keeps_what_was_accepted(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write that starts it is refused; those before it are there once they fit."""
    monkeypatch.setattr(scattered, "_FOLD_AT", MIB)
    model = bytearray(noise(3 * MIB))
    await desk.save(b"f", bytes(model))
    await desk.upkeep.commit()
    content = desk.open(b"f")
    starts = iter(range(7, len(model), 140_000))
    with desk.full_disk(), pytest.raises(OSError, match="not stored") as caught:  # noqa: PT012
        for at in starts:
            await content.write(at, b"n" * 100_000)
            model[at : at + 100_000] = b"n" * 100_000
    assert caught.value.errno == errno.ENOSPC
    accepted = model.count(b"n" * 100_000)
    assert accepted == MIB // 100_000
    refused = next(starts) - 140_000
    await content.flush()
    await desk.abandon(content, killed=False)
    await desk.upkeep.commit()
    found = desk.in_tree(b"f")
    assert found[:refused] == model[:refused]
    assert found[refused + 100_000 :] == model[refused + 100_000 :]


async def test_a_damaged_file_is_not_recut(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """One written backwards that cannot be read at its close stays as it is, and nothing stays reserved."""
    data = noise(8 * MIB)
    content = desk.open(b"f")
    for at in reversed(range(0, len(data), MIB)):
        await content.write(at, data[at : at + MIB])
    await content.flush()
    await desk.upkeep.commit()
    read = desk.store.read
    starts: list[int] = []

    def damaged(source: Recipe, start: int, size: int) -> Buffer:
        starts.append(start)
        if start:
            raise Damaged("block 1 is missing")
        return read(source, start, size)

    with monkeypatch.context() as patch:
        patch.setattr(desk.store, "read", damaged)
        assert not await desk.abandon(content, killed=False)
    assert starts == [0, 4 * MIB]
    assert desk.store.queued == 0
    await desk.upkeep.commit()
    assert desk.in_tree(b"f") == data


OLD = noise(MIB)
NEW = noise(6 * MIB, 1)


async def save_with_a_refusal(desk: Desk) -> Content:
    """A save over an old version that has come to 1 MiB, where a write found no room."""
    await desk.save(b"f", OLD)
    await desk.upkeep.commit()
    content = desk.open(b"f")
    await content.truncate(0)
    await content.write(0, NEW[:MIB])
    with desk.no_room(), pytest.raises(OSError, match="no space"):
        await content.write(MIB, NEW[MIB : 5 * MIB])
    return content


@pytest.mark.parametrize("step", [MIB, 5 * MIB])
@pytest.mark.parametrize("sync", [False, True])
async def test_a_refused_write_that_is_made_good(desk: Desk, sync: bool, step: int) -> None:
    """A client that frees space and goes on has saved the whole file, and it stays."""
    content = await save_with_a_refusal(desk)
    for at in range(MIB, len(NEW), step):
        data = NEW[at : at + step]
        if not content.append_now(at, data):
            await content.write(at, data)
    if sync:
        await content.sync()
        await desk.upkeep.commit()
    assert not await desk.close(content)
    assert await desk.load(b"f") == NEW


async def test_a_refused_write_that_is_left_out(desk: Desk) -> None:
    """What comes after it does not make it good."""
    content = await save_with_a_refusal(desk)
    await content.write(5 * MIB, NEW[5 * MIB :])
    assert await desk.close(content)
    assert await desk.load(b"f") == OLD
