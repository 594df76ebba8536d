"""An open file against a bytearray, whatever is written where, read between, synced, closed and opened."""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.mount.content import Content
from cachefs.states.pieces import Piece
from cachefs.store.place import Placer
from cachefs.store.recipe import MAX_SIZE

from ..states import build
from ..store.breaking import set_hint
from ..store.filling import noise
from .desk import Desk
from .desk import desk as new_desk

STATE = build.ggsq(build.packed(range(900)), build.kv(range(900), width=512, layers=2))
OTHER = build.ggsq(range(700), build.kv(range(700), width=512, v="transposed"))
SIZES = st.sampled_from(
    [1, 47, 64, 65, 4096, 16_384, 65_535, 65_536, 65_537, 131_072, 262_143, 262_145, 600_000, 1 << 20]
)
PART = st.floats(0, 1)


@dataclass
class Step:
    kind: str
    part: float = 0.0
    size: int = 0


STEPS = st.one_of(
    st.builds(Step, st.just("append"), PART, SIZES),
    st.builds(Step, st.just("append"), PART, SIZES),
    st.builds(Step, st.just("overwrite"), PART, SIZES),
    st.builds(Step, st.just("beyond"), PART, SIZES),
    st.builds(Step, st.just("shorten"), PART),
    st.builds(Step, st.just("lengthen"), PART, SIZES),
    st.builds(Step, st.just("read"), PART, SIZES),
    st.builds(
        Step, st.sampled_from(["empty", "flush", "sync", "commit", "write out", "purge", "reopen", "unlink"])
    ),
)


class Checked:
    """A file and its model. Appended bytes go on as the state that the file began as."""

    def __init__(self, desk: Desk, source: bytes) -> None:
        self.desk = desk
        self.source = source
        self.model = bytearray()
        self.content: Content = desk.open(b"f")
        self.unlinked = False
        self.seed = 0

    def data(self, at: int, size: int) -> bytes:
        self.seed += 1
        found = self.source[at : at + size]
        return found + noise(size - len(found), self.seed)

    async def take(self, step: Step) -> None:
        size = len(self.model)
        at = int(size * step.part)
        match step.kind:
            case "append":
                await self.write(size, self.data(size, step.size))
            case "overwrite":
                self.seed += 1
                await self.write(at, noise(step.size, self.seed))
            case "beyond":
                await self.write(size + step.size, self.data(0, 1 + int(step.part * 70_000)))
            case "shorten":
                await self.truncate(at)
            case "lengthen":
                await self.truncate(size + step.size)
            case "empty":
                await self.truncate(0)
            case "read":
                found = await self.content.read(at, step.size)
                assert bytes(found) == self.model[at : at + step.size]
            case _:
                await self.keep(step.kind)

    async def write(self, at: int, data: bytes) -> None:
        if not self.content.append_now(at, data):
            assert await self.content.write(at, data) == len(data)
        self.model += bytes(max(0, at - len(self.model)))
        self.model[at : at + len(data)] = data

    async def truncate(self, size: int) -> None:
        await self.content.truncate(size)
        del self.model[size:]
        self.model += bytes(size - len(self.model))

    async def keep(self, kind: str) -> None:
        store = self.desk.store
        if kind == "flush":
            await self.content.flush()
        elif kind == "sync":
            await self.content.sync()
            await self.desk.upkeep.commit()
            if not self.unlinked:
                assert self.desk.in_tree(b"f") == self.model
        elif kind == "commit":
            await self.desk.upkeep.commit()
        elif kind == "write out":
            store.writer.write_out()
        elif kind == "purge":
            store.writer.purge(1 << 40)
        elif kind == "unlink" and not self.unlinked:
            store.tree.unlink(1, b"f")
            self.unlinked = True
        elif kind == "reopen":
            await self.close()
            if self.unlinked:
                for ino in store.tree.orphans():
                    store.tree.release_orphan(ino)
                self.model.clear()
                self.unlinked = False
            else:
                assert self.desk.in_tree(b"f") == self.model
            self.content = self.desk.open(b"f")

    async def close(self) -> None:
        assert not await self.desk.close(self.content, keep_torn=True)

    async def check(self) -> None:
        assert self.content.size == len(self.model)
        assert bytes(await self.content.read(0, len(self.model) + 10)) == self.model


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(STEPS, max_size=14), st.sampled_from([b"", STATE, OTHER]), st.booleans())
async def test_like_a_bytearray(steps: list[Step], source: bytes, look: bool) -> None:
    """``look``: read everything after every step, which drains the stream each time."""
    async with new_desk() as desk:
        checked = Checked(desk, source)
        for step in steps:
            await checked.take(step)
            if look:
                await checked.check()
        await checked.check()
        await checked.keep("reopen")
        await checked.check()
        await checked.close()
        await desk.upkeep.commit()
        desk.store.writer.purge(1 << 40)
        assert desk.in_tree(b"f") == checked.model


@pytest.mark.parametrize("step", [1000, 4096, 65_536, 1 << 20, 1 << 25])
async def test_a_state_however_it_is_written(desk: Desk, step: int) -> None:
    """The same recipe's worth of blocks for any size of writes, and what was recognised beside it."""
    await desk.save(b"first", STATE)
    await desk.upkeep.commit()
    stored = desk.store.counters()["stored_bytes"]
    await desk.save(b"again", STATE, step)
    await desk.upkeep.commit()
    assert desk.store.counters()["stored_bytes"] == stored
    assert await desk.load(b"again") == STATE
    inode = desk.store.tree.get(desk.store.tree.require(1, b"again").ino)
    assert inode.row_bytes == 2 * 2 * 900 * 512


@pytest.mark.parametrize("how", ["sync", "sync twice", "read", "commit"])
async def test_a_save_that_is_synced_or_read_shares_like_another(desk: Desk, how: str) -> None:
    """Clients sync before they close and rename: what the file is, and what it shares, stays the same."""
    await desk.save(b"first", STATE)
    await desk.upkeep.commit()
    stored = desk.store.counters()["stored_bytes"]
    expected = desk.store.tree.get(desk.store.tree.require(1, b"first").ino).row_bytes
    content = desk.open(b"again")
    await content.write(0, STATE[:1_000_000])
    if how == "sync twice":
        await content.sync()
    await content.write(1_000_000, STATE[1_000_000:])
    if how == "read":
        assert bytes(await content.read(0, len(STATE))) == STATE
    elif how == "commit":
        await desk.upkeep.commit()
    else:
        await content.sync()
        await desk.upkeep.commit()
    await desk.close(content)
    await desk.upkeep.commit()
    ino = desk.store.tree.require(1, b"again").ino
    assert desk.store.tree.get(ino).row_bytes == expected
    assert desk.store.tree.about(ino) == desk.store.tree.about(desk.store.tree.require(1, b"first").ino)
    assert desk.store.counters()["stored_bytes"] == stored
    assert await desk.load(b"again") == STATE


async def test_out_of_order_shares_like_in_order(desk: Desk) -> None:
    """A file written backwards is cut along its rows when it is closed."""
    state = build.ggsq(range(2500), build.kv(range(2500), width=512))
    await desk.save(b"first", state)
    await desk.upkeep.commit()
    stored = desk.store.counters()["stored_bytes"]
    content = desk.open(b"again")
    for at in reversed(range(0, len(state), 100_000)):
        await content.write(at, state[at : at + 100_000])
    await desk.close(content)
    await desk.upkeep.commit()
    assert desk.store.counters()["stored_bytes"] == stored
    assert await desk.load(b"again") == state


async def test_a_header_rewritten_touches_one_extent(desk: Desk) -> None:
    """The last step of a client that fills in its header: cheap, and the rest stays shared."""
    await desk.save(b"f", STATE)
    await desk.upkeep.commit()
    before = desk.store.counters()["new_block_bytes"]
    content = desk.open(b"f")
    await content.write(0, b"h" * 48)
    await desk.close(content)
    await desk.upkeep.commit()
    assert desk.store.counters()["new_block_bytes"] - before <= 64
    assert await desk.load(b"f") == b"h" * 48 + STATE[48:]


async def test_appends_do_not_crumble(desk: Desk) -> None:
    """A log that is opened for every line."""
    model = b""
    for number in range(200):
        content = desk.open(b"log")
        line = b"line %d\n" % number * 20
        await content.write(len(model), line)
        model += line
        await desk.close(content)
    assert await desk.load(b"log") == model
    ino = desk.store.tree.require(1, b"log").ino
    assert len(desk.store.tree.recipe(ino)) <= 4


async def test_small_files_are_inline(desk: Desk) -> None:
    await desk.save(b"f", b"x" * 64)
    await desk.upkeep.commit()
    assert desk.store.counters()["blocks"] == 0
    assert await desk.load(b"f") == b"x" * 64


async def test_files_beyond_the_largest_are_refused(desk: Desk) -> None:
    content = desk.open(b"f")
    for call in (content.write(MAX_SIZE, b"x"), content.truncate(MAX_SIZE + 1)):
        with pytest.raises(OSError, match="too large") as caught:
            await call
        assert caught.value.errno == errno.EFBIG
    await content.truncate(MAX_SIZE)
    assert bytes(await content.read(MAX_SIZE - 5, 10)) == bytes(5)
    await content.truncate(0)
    await desk.close(content)


async def test_a_damaged_block_is_an_error_of_its_range(desk: Desk) -> None:
    data = noise(700_000)
    await desk.save(b"f", data)
    await desk.upkeep.commit()
    extents = list(desk.store.tree.recipe(2).extents(0, len(data)))
    middle = extents[len(extents) // 2]
    volume = desk.store.volumes.by_number[1]
    with volume.env.begin(write=True, db=volume.db) as txn:
        txn.put(middle.a.to_bytes(8, "little"), bytes(middle.length))
    set_hint(desk.store, middle.a, 0)
    content = desk.open(b"f")
    with pytest.raises(OSError, match="damaged") as caught:
        await content.read(0, len(data))
    assert caught.value.errno == errno.EIO
    assert bytes(await content.read(0, middle.start)) == data[: middle.start]
    await desk.close(content)


async def test_times_follow_writes(desk: Desk) -> None:
    content = desk.open(b"f")
    made = content.mtime
    await content.write(0, b"x")
    assert content.mtime >= made
    await content.sync()
    assert desk.store.tree.get(2).mtime == content.mtime
    await desk.close(content)


async def test_who_syncs_in_a_directory_is_hurried_there(desk: Desk) -> None:
    """The disk gets a part of the next file while the rest is still coming."""
    content = desk.open(b"f")
    await content.write(0, noise(100_000))
    assert content._stream is not None
    patient = content._stream._limit
    await content.fsync()
    await desk.close(content)
    content = desk.open(b"g")
    await content.write(0, noise(100_000))
    assert content._stream is not None
    assert content._stream._limit <= patient
    assert content._stream._hurry
    await desk.close(content)


async def test_saves_closed_one_after_the_other_are_placed_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind their closes, yet never two at once: the second must find the blocks of the first."""
    async with new_desk(2 << 30) as desk:  # so large that all three may wait in memory
        await three_saves(desk, monkeypatch)


async def three_saves(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = []
    common = build.kv(range(3000), layers=4, width=384)
    for number in range(3):
        content = desk.open(b"%d" % number)
        data = build.ggsq(range(3000), common) + noise(5000, number)
        for at in range(0, len(data), 1 << 20):
            await content.write(at, data[at : at + (1 << 20)])
        contents.append(content)
    real = Placer.place
    at_work: set[Placer] = set()
    most = 0

    def place(placer: Placer, piece: Piece) -> None:
        nonlocal most
        at_work.add(placer)
        most = max(most, len(at_work))
        time.sleep(0.001)
        real(placer, piece)
        at_work.discard(placer)

    monkeypatch.setattr(Placer, "place", place)
    for content in contents:
        await content.flush()
    await desk.upkeep.sync()
    assert most == 1
    assert desk.store.counters()["stored_bytes"] < len(data) + 100_000
    for content in contents:
        await desk.close(content)


async def test_a_short_rewrite_of_what_is_queued(desk: Desk) -> None:
    """Only what reaches the end may take the place of the last bytes."""
    content = desk.open(b"f")
    await content.write(0, b"0123456789")
    await content.write(2, b"ab")
    assert content.size == 10
    await content.write(8, b"89ABC")
    await desk.close(content)
    assert desk.in_tree(b"f") == b"01ab456789ABC"


async def test_a_rewrite_that_is_refused_leaves_the_old_bytes(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = desk.open(b"f")
    await content.write(0, b"0123456789")
    assert content._stream is not None
    desk.store.queued -= content._stream._credit
    content._stream._credit = 0
    with monkeypatch.context() as patch:
        patch.setattr(desk.store, "reserve", lambda size: False)
        with pytest.raises(OSError, match="space"):
            await content.write(5, b"x" * 4000)
    assert bytes(await content.read(0, 100)) == b"0123456789"
    await desk.close(content)
    assert desk.in_tree(b"f") == b"0123456789"
