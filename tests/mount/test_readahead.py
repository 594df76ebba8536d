"""Reading ahead: always the file's bytes, fetched early for sequential readers and not for others."""

from __future__ import annotations

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.mount.readahead import ANNOUNCED, DEPTH, STEP, Announcer, ReadAhead

from ..store.filling import noise

DATA = noise(3 * STEP + 12345)
READ = 1 << 20


class Source:
    """Counts what is fetched from ``data``."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data = data
        self.fetched: list[tuple[int, int]] = []
        self.fail = False

    async def fetch(self, offset: int, size: int) -> bytes:
        self.fetched.append((offset, size))
        await trio.lowlevel.checkpoint()
        if self.fail:
            raise OSError(5, "damaged")
        return self.data[offset : offset + size]


async def read(reader: ReadAhead, source: Source, offset: int, size: int = READ) -> None:
    found = await reader.read(offset, size, len(source.data))
    assert bytes(found) == source.data[offset : offset + size]


async def test_a_sequential_reader_fetches_each_byte_about_once(nursery: trio.Nursery) -> None:
    source = Source()
    reader = ReadAhead(nursery, source.fetch)
    for offset in range(0, len(DATA), READ):
        await read(reader, source, offset)
    ahead = [piece for piece in source.fetched if piece[1] > READ]
    assert ahead
    assert sum(size for _, size in source.fetched) <= len(DATA) + 2 * READ


async def test_it_is_never_far_ahead(nursery: trio.Nursery) -> None:
    source = Source(bytes(20 * STEP))
    reader = ReadAhead(nursery, source.fetch)
    for offset in range(0, 3 * STEP, READ):
        await read(reader, source, offset)
        await trio.testing.wait_all_tasks_blocked()
        assert max(start + size for start, size in source.fetched) <= offset + READ + DEPTH * STEP


async def test_a_probe_of_the_tail_fetches_nothing_else(nursery: trio.Nursery) -> None:
    """The first read, jumps and small reads are answered as asked."""
    source = Source()
    reader = ReadAhead(nursery, source.fetch)
    await read(reader, source, len(DATA) - READ)
    await read(reader, source, 0)
    await read(reader, source, 5 * READ)
    await read(reader, source, 2 * READ, 4096)
    await read(reader, source, 2 * READ + 4096, 4096)
    assert all(size <= READ for _, size in source.fetched)


async def test_the_disk_is_told_once_a_reader_in_a_row_waits(nursery: trio.Nursery) -> None:
    told: list[tuple[int, int]] = []

    async def tell(start: int, stop: int) -> None:
        told.append((start, stop))

    announcer = Announcer(nursery, tell)
    announcer.read(50 * READ, READ, cold=True)
    for number in range(30):
        announcer.read(number * READ, READ, cold=number < 3)
        await trio.testing.wait_all_tasks_blocked()
        if told:
            assert told[-1][1] >= (number + 1) * READ + ANNOUNCED // 2
    assert told[0] == (2 * READ, 2 * READ + ANNOUNCED)
    assert [start for start, _ in told[1:]] == [stop for _, stop in told[:-1]], "each byte once"
    told.clear()
    for number in range(60, 90):
        announcer.read(number * READ, READ, cold=False)
    await trio.testing.wait_all_tasks_blocked()
    assert not told, "what is in memory needs no announcing"


async def test_what_changed_is_forgotten(nursery: trio.Nursery) -> None:
    source = Source()
    reader = ReadAhead(nursery, source.fetch)
    for offset in (0, READ, 2 * READ):
        await read(reader, source, offset)
    source.data = bytes(len(DATA))
    reader.reset()
    await read(reader, source, 3 * READ)
    await read(reader, source, 4 * READ)


async def test_a_failed_fetch_fails_only_who_needs_it(nursery: trio.Nursery) -> None:
    """Ahead it is swallowed; the read itself asks again."""
    source = Source()
    reader = ReadAhead(nursery, source.fetch)
    source.fail = True
    for offset in (0, READ, 2 * READ):
        try:
            await reader.read(offset, READ, len(DATA))
        except OSError:
            continue
        raise AssertionError("a damaged piece was given out")
    source.fail = False
    await trio.testing.wait_all_tasks_blocked()
    await read(reader, source, 3 * READ)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["on", "on", "on", "jump", "back", "reset"]),
            st.integers(0, len(DATA)),
            st.sampled_from([1, 4096, 32 << 10, 128 << 10, READ, STEP, STEP + 5]),
        ),
        max_size=25,
    )
)
async def test_any_reads(steps: list[tuple[str, int, int]]) -> None:
    """However a handle is read, it reads the file."""
    source = Source()
    async with trio.open_nursery() as nursery:
        reader = ReadAhead(nursery, source.fetch)
        at = 0
        for kind, place, size in steps:
            if kind == "jump":
                at = place
            elif kind == "back":
                at = max(0, at - size // 2)
            elif kind == "reset":
                source.data = source.data[::-1]
                reader.reset()
            await read(reader, source, at, size)
            at += size
