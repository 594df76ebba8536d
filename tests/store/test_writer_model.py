"""Files come, change and go; whatever fails or ends meanwhile, nothing is lost and every count is exact."""

from __future__ import annotations

from pathlib import Path

import lmdb
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachefs.states.pieces import Chunk, Piece, Rows
from cachefs.store import Store, StoreFull
from cachefs.store.layout import footprint
from cachefs.store.recipe import Recipe

from .breaking import Broken, crash, failing
from .filling import SMALL, add, content, in_memory, noise, place, remove
from .recount import assert_exact, assert_nothing_leaks

WIDTH = 512


def pieces_of(seed: int, size: int) -> list[Piece]:
    """Chunks and groups of rows, some of them the same for different seeds."""
    data = noise(size, seed % 3)
    split = size // 2 // WIDTH * WIDTH
    out: list[Piece] = [Rows(data[:split], WIDTH)] if split else []
    return [*out, Chunk(data[split:] + b"x" * seed)]


NAMES = st.integers(0, 5).map(lambda n: b"f%d" % n)


class WriterMachine(RuleBasedStateMachine):
    """Files come, change and go between commits, purges, failures, crashes and reopens."""

    def __init__(self) -> None:
        super().__init__()
        self.place = in_memory()
        self.path = Path(self.place.name) / "store"
        self.store = Store.open(self.path, SMALL)
        self.model: dict[bytes, bytes] = {}
        self.durable: dict[bytes, bytes] = {}
        self.held: list[tuple[list[int], bytes, Recipe]] = []
        self.interrupted = False

    def teardown(self) -> None:
        self.store.close()
        self.place.cleanup()

    @rule(name=NAMES, seed=st.integers(0, 8), size=st.integers(0, 300_000))
    def save(self, name: bytes, seed: int, size: int) -> None:
        if name in self.model:
            remove(self.store, name)
        pieces = pieces_of(seed, size)
        add(self.store, name, pieces)
        self.model[name] = b"".join(piece.data for piece in pieces)

    @rule(name=NAMES, part=st.floats(0, 1))
    def truncate(self, name: bytes, part: float) -> None:
        if name in self.model:
            size = int(len(self.model[name]) * part)
            ino = self.store.tree.require(1, name).ino
            self.store.tree.set_content(ino, self.store.tree.recipe(ino).cut(size), 0, None)
            self.model[name] = self.model[name][:size]

    @rule(name=NAMES)
    def remove(self, name: bytes) -> None:
        if self.model.pop(name, None) is not None:
            remove(self.store, name)

    @rule(seed=st.integers(0, 8), size=st.integers(1, 300_000))
    def begin_a_save(self, seed: int, size: int) -> None:
        pieces = pieces_of(seed, size)
        recipe, holds = place(self.store, pieces)
        self.held.append((holds, b"".join(piece.data for piece in pieces), recipe))

    @precondition(lambda self: self.held)
    @rule(name=NAMES)
    def end_a_save(self, name: bytes) -> None:
        holds, data, recipe = self.held.pop()
        if name in self.model:
            remove(self.store, name)
        ino = add(self.store, name, [])
        self.store.tree.set_content(ino, recipe, 0, None)
        self.store.index.active.holds.append(holds)
        self.model[name] = data

    @precondition(lambda self: self.held)
    @rule()
    def abandon_a_save(self) -> None:
        self.store.blocks.release(self.held.pop()[0])

    @rule()
    def write_out(self) -> None:
        self.store.writer.write_out()

    @rule()
    def commit(self) -> None:
        self.store.commit()
        self.durable = dict(self.model)
        assert_exact(self.store, interrupted=self.interrupted)
        if not self.held:
            assert_nothing_leaks(self.store)

    @rule()
    def purge_all(self) -> None:
        """Everything that room counts on can be had."""
        counters = self.store.writer.counters
        expected = counters["victim_bytes"] - self.store.blocks.revived_bytes
        assert self.store.writer.purge(1 << 40) == expected

    @rule(wanted=st.integers(1, 200_000))
    def purge_some(self, wanted: int) -> None:
        """No more goes than what is wanted, but for the last block."""
        before = self.store.volumes.used
        freed = self.store.writer.purge(wanted)
        assert self.store.volumes.used == before - freed
        assert freed < wanted + footprint(300_000)

    @rule(method=st.sampled_from(["_meta", "_name", "_tree"]))
    def fail_to_commit(self, method: str) -> None:
        """Once the payloads are written the index refuses: all stays pending and nothing counts twice."""
        with failing(self.store, method, lmdb.DiskError("no space")):
            try:
                self.store.commit()
            except StoreFull:
                return
        self.durable = dict(self.model)

    @rule()
    def fail_to_purge(self) -> None:
        with failing(self.store, "_meta", lmdb.DiskError("no space")):
            try:
                self.store.writer.purge(1 << 40)
            except StoreFull:
                self.interrupted = True

    @rule(early=st.booleans())
    def crash(self, early: bool) -> None:
        """The process ends, maybe between payloads and index."""
        if early:
            with failing(self.store, "_meta", Broken()):
                try:
                    self.store.commit()
                    self.durable = dict(self.model)
                except Broken:
                    pass
        self.store = crash(self.store, self.path)
        self.model = dict(self.durable)
        self.held.clear()
        assert_exact(self.store, interrupted=self.interrupted)
        assert_nothing_leaks(self.store)

    @rule()
    def reopen(self) -> None:
        for holds, _, _ in self.held:
            self.store.blocks.release(holds)
        self.held.clear()
        self.store.close()
        self.store = Store.open(self.path)
        self.durable = dict(self.model)
        assert_exact(self.store, interrupted=self.interrupted)
        assert_nothing_leaks(self.store)

    @invariant()
    def every_byte_is_there(self) -> None:
        for name, data in self.model.items():
            assert content(self.store, self.store.tree.require(1, name).ino) == data

    @invariant()
    def saves_in_progress_are_there(self) -> None:
        for _, data, recipe in self.held:
            assert bytes(self.store.read(recipe, 0, len(data))) == data


TestWriter = WriterMachine.TestCase
TestWriter.settings = settings(max_examples=30, stateful_step_count=25, deadline=None, derandomize=True)
