"""The overlay against a bytearray: what was written last shows, what was cut does not."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cachefs.mount.overlay import _MERGE_LIMIT, Overlay

from ..store.filling import SMALL, noise
from .desk import desk

LENGTH = 200
PLACE = st.integers(0, LENGTH - 1)


class Laid(RuleBasedStateMachine):
    """``model`` is a file's bytes, None where the overlay says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.overlay = Overlay()
        self.model: list[int | None] = [None] * LENGTH
        self.next = 0

    @rule(start=PLACE, size=st.integers(1, 60))
    def write(self, start: int, size: int) -> None:
        data = bytes((self.next + i) % 256 for i in range(min(size, LENGTH - start)))
        self.next += 7
        self.overlay.write(start, data)
        self.model[start : start + len(data)] = data

    @rule(count=st.integers(2, 5), size=st.integers(1, 10), start=st.integers(0, 100))
    def write_on(self, count: int, size: int, start: int) -> None:
        """Runs that touch each other, as a sequential writer makes them."""
        for number in range(count):
            self.write(start + number * size, size)

    @rule(start=PLACE, size=st.integers(0, 80))
    def cut(self, start: int, size: int) -> None:
        self.overlay.cut(start, start + size)
        stop = min(LENGTH, start + size)
        self.model[start:stop] = [None] * (stop - start)

    @rule(start=PLACE, size=st.integers(0, 80))
    def patch(self, start: int, size: int) -> None:
        into = bytearray(b"\xee" * min(size, LENGTH - start))
        self.overlay.patch(start, into)
        expected = self.model[start : start + len(into)]
        assert into == bytes(0xEE if byte is None else byte for byte in expected)

    @rule()
    def take(self) -> None:
        runs = self.overlay.take()
        found: list[int | None] = [None] * LENGTH
        at = -1
        for start, data in runs:
            assert data
            assert start >= at, "in order and disjoint"
            at = start + len(data)
            found[start:at] = data
        assert found == self.model
        assert not self.overlay
        self.model = [None] * LENGTH

    @invariant()
    def its_size_is_what_it_holds(self) -> None:
        held = sum(byte is not None for byte in self.model)
        assert self.overlay.size == held
        assert bool(self.overlay) == (held > 0)


TestOverlay = Laid.TestCase
TestOverlay.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


def test_nothing_written_is_nothing_held() -> None:
    overlay = Overlay()
    overlay.write(5, b"")
    assert not overlay
    assert overlay.take() == []


def test_a_long_run_is_not_copied_for_every_write() -> None:
    """Runs that touch are joined only up to a limit."""
    overlay = Overlay()
    for number in range(5):
        overlay.write(number * _MERGE_LIMIT, bytes(_MERGE_LIMIT))
    assert [len(data) for _, data in overlay.take()] == [_MERGE_LIMIT] * 5


def test_many_short_runs_cost_more_than_their_bytes() -> None:
    overlay = Overlay()
    for number in range(1_000):
        overlay.write(number * 2, b"x")
    assert overlay.size == 1_000
    assert overlay.cost > 100_000


async def test_many_files_written_out_of_order_share_their_memory() -> None:
    """Each may have 16 MiB of what is not placed yet, but not all of them together."""
    async with desk(SMALL) as made:
        store, piece = made.store, 100_000
        most = store.budget.index // 4
        contents = [made.open(b"%d" % number) for number in range(12)]
        heaviest = 0
        for step in range(8):
            for number, content in enumerate(contents):
                await content.write(2 * piece * (8 - step), noise(piece, number))
                heaviest = max(heaviest, store.scattered)
        assert most // 2 < heaviest < 2 * most + len(contents) * (most // 16 + piece)
        for content in contents:
            await made.close(content)
        assert store.scattered == 0
