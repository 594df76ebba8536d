"""Saves that fail or are torn: the old version stays, and nothing is left accounted for."""

from __future__ import annotations

import errno

import pytest

from cachefs.mount.content import Content
from cachefs.sizes import MIB
from cachefs.store.tree import PIN

from ..states import build
from ..store.filling import noise, remove
from .desk import Desk

N = 1200
OLD = build.ggsq(range(N), build.kv(range(N), width=512))
NEW = build.ggsq(range(N), build.kv(range(N), width=512, salt=1))
# Where the recogniser waits for more, only the file's end says that it is torn.
CUTS = [20, 100, 2047, 6000, 30_000, 600_000, len(NEW) // 2, len(NEW) - 1]


async def begin(desk: Desk, size: int, *, sync: bool = False) -> None:
    """A save over the old version that stops after ``size`` bytes, as when its process is killed."""
    content = desk.open(b"f")
    await content.truncate(0)
    await content.write(0, NEW[:size])
    if sync:
        await content.sync()
        await desk.upkeep.commit()
    assert await desk.abandon(content)


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("size", CUTS)
async def test_a_torn_save_brings_back_the_old_version(desk: Desk, size: int, sync: bool) -> None:
    """Even where the torn one was synced, and its commit made the old one's blocks victims."""
    await desk.save(b"f", OLD)
    await desk.upkeep.commit()
    before = desk.store.tree.get(2)
    await begin(desk, size, sync=sync)
    desk.store.writer.purge(1 << 40)
    assert desk.in_tree(b"f") == OLD
    await desk.upkeep.commit()
    desk.store.writer.purge(1 << 40)
    assert await desk.load(b"f") == OLD
    after = desk.store.tree.get(2)
    assert (after.size, after.mtime, after.row_bytes) == (before.size, before.mtime, before.row_bytes)
    assert desk.store.tree.about(2) is not None
    assert desk.store.counters()["torn_saves"] == 1


@pytest.mark.parametrize("refused", [False, True])
async def test_what_was_fsynced_stays(desk: Desk, refused: bool) -> None:
    """The client gave the old version up and was told that the new bytes are safe."""
    await desk.save(b"f", OLD)
    content = desk.open(b"f")
    await content.truncate(0)
    await content.write(0, NEW[:600_000])
    await content.fsync()
    desk.store.writer.purge(1 << 40)
    await content.write(600_000, NEW[600_000:700_000])
    if refused:
        content._save.note_refused(700_000)
    assert await desk.close(content, killed=not refused) == refused, "it is not what was written"
    assert await desk.load(b"f") == NEW[:700_000]
    assert desk.store.counters()["torn_saves"] == 0


async def test_a_kill_with_a_flush_in_between(desk: Desk) -> None:
    """The kernel flushes for a killed process, too."""
    await desk.save(b"f", OLD)
    content = desk.open(b"f")
    await content.truncate(0)
    await content.write(0, NEW[:700_000])
    assert await desk.close(content, killed=True)
    assert await desk.load(b"f") == OLD


@pytest.mark.parametrize("killed", [True, False])
@pytest.mark.parametrize("size", [0, 3, 30])
async def test_a_save_that_hardly_began(desk: Desk, size: int, killed: bool) -> None:
    """Too short to be known as a state: a killed writer's is torn all the same."""
    await desk.save(b"f", OLD)
    content = desk.open(b"f")
    await content.truncate(0)
    if size:
        await content.write(0, NEW[:size])
    assert await desk.close(content, killed=killed) is killed
    assert await desk.load(b"f") == (OLD if killed else NEW[:size])


@pytest.mark.parametrize("sections", [3, 2])
async def test_torn_between_two_sections(desk: Desk, sections: int) -> None:
    """Whole by its own headers; the version before had more sections."""
    await desk.save(b"f", OLD)
    whole = build.ggsq(range(N), build.kv(range(N), width=512, salt=1, v_layers=range(sections - 2)))
    assert NEW.startswith(whole)
    content = desk.open(b"f")
    await content.truncate(0)
    await content.write(0, whole)
    assert await desk.close(content, killed=True)
    assert await desk.load(b"f") == OLD


async def test_a_torn_save_can_be_kept(desk: Desk) -> None:
    await desk.save(b"f", OLD)
    content = desk.open(b"f")
    await content.truncate(0)
    await content.write(0, NEW[:700_000])
    assert not await desk.close(content, keep_torn=True)
    assert await desk.load(b"f") == NEW[:700_000]
    assert desk.store.counters()["torn_saves"] == 0


async def test_a_first_save_that_is_torn_stays_as_it_is(desk: Desk) -> None:
    content = desk.open(b"f")
    await content.write(0, NEW[:700_000])
    assert not await desk.close(content)
    assert await desk.load(b"f") == NEW[:700_000]


async def test_a_whole_save_replaces_the_old_one(desk: Desk) -> None:
    """And costs what differs only."""
    await desk.save(b"f", OLD)
    longer = build.ggsq(range(N + 200), build.kv(range(N + 200), width=512))
    before = desk.store.counters()["new_block_bytes"]
    await desk.upkeep.commit()
    before = desk.store.counters()["new_block_bytes"]
    await desk.save(b"f", longer)
    await desk.upkeep.commit()
    assert await desk.load(b"f") == longer
    tail = 200 * 512 * 4
    assert tail <= desk.store.counters()["new_block_bytes"] - before <= tail + 40_000


async def test_a_foreign_file_may_be_shortened(desk: Desk) -> None:
    await desk.save(b"f", noise(300_000))
    await desk.save(b"f", noise(100_000, 1))
    assert await desk.load(b"f") == noise(100_000, 1)


async def full_save(desk: Desk, data: bytes = NEW) -> int:
    """Save in place until something is refused, and close; the errno."""
    content = desk.open(b"f")
    await content.truncate(0)
    error = 0
    try:
        for at in range(0, len(data), 1 << 18):
            await content.write(at, data[at : at + (1 << 18)])
            await content.read(0, 1)  # waits until it is placed
        await content.flush()
    except OSError as refused:
        error = refused.errno or 0
    await desk.abandon(content)
    return error


@pytest.mark.parametrize("data", [NEW, noise(len(NEW), 3), noise(50_000, 3)])
async def test_a_save_that_does_not_fit_leaves_the_old_version(desk: Desk, data: bytes) -> None:
    """Whether write or close says so."""
    await desk.save(b"f", OLD)
    await desk.upkeep.commit()
    with desk.full_disk():
        assert await full_save(desk, data) == errno.ENOSPC
    assert await desk.load(b"f") == OLD


async def test_a_write_for_which_there_is_no_room_leaves_the_old_version(desk: Desk) -> None:
    """The client stops at the first refused write and closes: nobody was killed, yet it is half a save."""
    await desk.save(b"f", OLD)
    await desk.upkeep.commit()
    content = desk.open(b"f")
    await content.truncate(0)
    await content.write(0, NEW[:300_000])
    with desk.no_room(), pytest.raises(OSError, match="no space"):
        await content.write(300_000, NEW[300_000:] + bytes(4 << 20))
    assert await desk.close(content)
    assert await desk.load(b"f") == OLD


async def test_a_write_beyond_the_largest_size_costs_nothing_else(desk: Desk) -> None:
    """EFBIG is about its own offset: what was written before it stays, over an old version, too."""
    await desk.save(b"f", OLD)
    content = desk.open(b"f")
    await content.truncate(0)
    await content.write(0, NEW)
    with pytest.raises(OSError, match="too large"):
        await content.write(1 << 47, b"x")
    assert not await desk.close(content)
    assert await desk.load(b"f") == NEW


async def test_sync_says_that_a_save_failed(desk: Desk) -> None:
    """Nothing that was synced may be missing."""
    content = desk.open(b"f")
    with desk.full_disk():
        await content.write(0, noise(2 * MIB))
        with pytest.raises(OSError, match="not stored") as caught:
            await content.sync()
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="not stored"):
        await content.write(2 * MIB, b"x")
    await desk.abandon(content)
    remove(desk.store, b"f")


@pytest.mark.parametrize("trunc", [False, True])
async def test_rewriting_that_does_not_fit(desk: Desk, trunc: bool) -> None:
    """Bytes out of order whose folding fails: an error, and after O_TRUNC the old version."""
    await desk.save(b"f", OLD)
    content = desk.open(b"f")
    if trunc:
        await content.truncate(0)
        await content.write(0, NEW[:500_000])
    await content.write(100_000, noise(200_000))
    with desk.full_disk():
        with pytest.raises(OSError, match="not stored"):
            await content.sync()
        with pytest.raises(OSError, match="not stored"):
            await content.write(5, b"x")
    try:
        await desk.close(content)
    except OSError:
        assert not desk.contents
    if trunc:
        assert await desk.load(b"f") == OLD
    else:
        assert len(await desk.load(b"f")) == len(OLD)


async def test_an_append_for_which_there_is_no_room_loses_nothing(desk: Desk) -> None:
    """The short last chunk, which is to be cut anew, stays if the new bytes are refused."""
    await desk.save(b"f", noise(30_000))
    content = desk.open(b"f")
    await content.write(100, b"changed")
    model = noise(30_000)[:100] + b"changed" + noise(30_000)[107:]
    await content.sync()
    with desk.no_room(), pytest.raises(OSError, match="no space"):
        await content.write(30_000, b"more")
    assert content.size == 30_000
    assert bytes(await content.read(0, 40_000)) == model
    await content.write(30_000, b"later")
    await desk.close(content)
    assert await desk.load(b"f") == model + b"later"


async def write_on(content: Content, data: bytes) -> tuple[int, int]:
    """Write until it is refused; the bytes that were taken, and the errno."""
    for at in range(0, len(data), MIB):
        try:
            await content.write(at, data[at : at + MIB])
            await content.read(0, 1)  # waits until it is placed
        except OSError as refused:
            return at, refused.errno or 0
    return len(data), 0


async def test_the_store_is_too_small(desk: Desk) -> None:
    """ENOSPC comes from write; what was there before stays, evictable or not, and nothing leaks."""
    await desk.save(b"pinned", noise(8 * MIB, 1))
    desk.store.tree.set_xattr(desk.store.tree.require(1, b"pinned").ino, PIN, b"1")
    await desk.save(b"old", noise(4 * MIB, 2))
    content = desk.open(b"big")
    written, error = await write_on(content, noise(60 * MIB, 3))
    assert error == errno.ENOSPC
    assert 20 * MIB < written < 40 * MIB
    assert desk.gone == [b"old"]
    await desk.close(content)
    assert desk.store.queued == 0
    assert await desk.load(b"pinned") == noise(8 * MIB, 1)
    assert len(await desk.load(b"big")) == written
    remove(desk.store, b"big")
    await desk.save(b"next", noise(20 * MIB, 99))
    assert await desk.load(b"next") == noise(20 * MIB, 99)


async def test_a_state_too_large_is_refused_by_its_headers(desk: Desk) -> None:
    """Before everything else was evicted for its sake."""
    await desk.save(b"other", noise(10 * MIB, 1))
    state = build.ggsq(range(20_000), build.kv(range(20_000), width=1024, layers=4, v=None))
    assert len(state) > 70 * MIB
    content = desk.open(b"big")
    written, error = await write_on(content, state)
    assert error == errno.ENOSPC
    assert written < 8 * MIB
    assert desk.gone == []
    await desk.close(content)


async def test_the_same_state_again_needs_no_room(desk: Desk) -> None:
    """What is shared is no reason to refuse or to evict."""
    state = build.ggsq(range(9000), build.kv(range(9000), width=512, layers=2))
    await desk.save(b"a", state)
    await desk.save(b"other", noise(8 * MIB, 1))
    for name in (b"b", b"c", b"d"):
        await desk.save(name, state)
    assert desk.gone == []
    assert await desk.load(b"d") == state


async def test_unlinked_first_then_saved_again(desk: Desk) -> None:
    """The victims of the old version are found again by the new one."""
    await desk.save(b"f", OLD)
    await desk.upkeep.commit()
    remove(desk.store, b"f")
    await desk.upkeep.commit()
    before = desk.store.counters()["new_block_bytes"]
    longer = build.ggsq(range(N + 200), build.kv(range(N + 200), width=512))
    await desk.save(b"g", longer)
    await desk.upkeep.commit()
    assert desk.store.counters()["new_block_bytes"] - before <= 200 * 512 * 4 + 40_000
    assert await desk.load(b"g") == longer


async def test_small_files_that_stay_open_do_not_hold_the_store(desk: Desk) -> None:
    """What an open file may still become must not evict what is there."""
    await desk.save(b"old", noise(10 * MIB))
    contents = []
    for number in range(200):
        content = desk.open(b"%d" % number)
        await content.write(0, b"little")
        contents.append(content)
    assert desk.store.queued == 200 * len(b"little")
    await desk.upkeep._evict_while_low()
    assert desk.gone == []
    for content in contents:
        await desk.close(content)
