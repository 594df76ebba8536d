"""Pending layers over what is committed: reading sees them all, whatever is frozen, written or failed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cachefs.sizes import MIB
from cachefs.store.index import Index

from .filling import in_memory

KEYS = st.binary(min_size=1, max_size=2)
TABLE = "xattrs"


class Layers(RuleBasedStateMachine):
    """`Index` behaves like a dict; what is on disk is the dict of the last commit."""

    def __init__(self) -> None:
        super().__init__()
        self.place = in_memory()
        self.index = Index(Path(self.place.name), 8 * MIB)
        self.model: dict[bytes, bytes] = {}
        self.frozen_model: dict[bytes, bytes] = {}
        self.disk: dict[bytes, bytes] = {}
        self.refs = 0
        self.committed_refs = 0

    def teardown(self) -> None:
        self.index.close()
        self.place.cleanup()

    @initialize(count=st.sampled_from([0, 511, 512, 513, 1100]))
    def start_with(self, count: int) -> None:
        """Entries on disk, about as many as one step of a scan takes."""
        with self.index.env.begin(write=True, db=self.index.dbs[TABLE]) as txn:
            for number in range(count):
                key = number.to_bytes(2, "big")
                txn.put(key, self.index.to_disk(TABLE, key, b"old"))
                self.model[key] = self.disk[key] = b"old"

    @rule(key=KEYS, value=st.binary(max_size=3))
    def put(self, key: bytes, value: bytes) -> None:
        self.index.put(TABLE, key, value)
        self.model[key] = value

    @rule(key=KEYS)
    def delete(self, key: bytes) -> None:
        self.index.delete(TABLE, key)
        self.model.pop(key, None)

    @rule(start=st.integers(0, 1200), count=st.integers(1, 700))
    def delete_many(self, start: int, count: int) -> None:
        for number in range(start, start + count):
            key = number.to_bytes(2, "big")
            self.index.delete(TABLE, key)
            self.model.pop(key, None)

    @rule()
    def refer(self) -> None:
        self.index.active.refs[7] += 1
        self.index.active.counters["entries"] += 1
        self.index.active.holds.append([7])
        self.refs += 1

    @precondition(lambda self: self.index.frozen is None)
    @rule()
    def freeze(self) -> None:
        layer = self.index.freeze()
        assert (layer is None) == (self.index.frozen is None)
        self.frozen_model = dict(self.model)

    @precondition(lambda self: self.index.frozen is not None)
    @rule()
    def commit(self) -> None:
        layer = self.index.frozen
        assert layer is not None
        with self.index.env.begin(write=True, db=self.index.dbs[TABLE]) as txn:
            for key, value in layer.tables[TABLE].items():
                if value is None:
                    txn.delete(key)
                else:
                    txn.put(key, self.index.to_disk(TABLE, key, value))
        self.committed_refs += layer.refs[7]
        self.index.thaw(committed=True)
        self.disk = self.frozen_model

    @precondition(lambda self: self.index.frozen is not None)
    @rule()
    def fail(self) -> None:
        """A commit that could not be done becomes pending again, under what came later."""
        self.index.thaw(committed=False)

    @rule(key=KEYS)
    def get(self, key: bytes) -> None:
        assert self.index.get(TABLE, key) == self.model.get(key)

    @rule(start=KEYS, stop=KEYS)
    def scan(self, start: bytes, stop: bytes) -> None:
        expected = sorted((k, v) for k, v in self.model.items() if start <= k < stop)
        assert list(self.index.scan(TABLE, start, stop)) == expected

    @rule()
    def scan_all(self) -> None:
        assert list(self.index.scan(TABLE, b"", b"\xff" * 9)) == sorted(self.model.items())

    @rule(keys=st.lists(KEYS, min_size=1, max_size=5))
    def scan_while_changing(self, keys: list[bytes]) -> None:
        """Entries that nobody touches show once, in order, whatever changes beside them."""
        untouched = sorted(self.model.keys() - set(keys))
        seen = []
        for number, (key, _) in enumerate(self.index.scan(TABLE, b"", b"\xff" * 9)):
            seen.append(key)
            if number % 100 == 0:
                for changed in keys:
                    if number % 200:
                        self.put(changed, b"new")
                    else:
                        self.delete(changed)
        assert seen == sorted(set(seen))
        assert [key for key in seen if key not in keys] == untouched

    @invariant()
    def pending_figures_add_up(self) -> None:
        layers = [layer for layer in (self.index.active, self.index.frozen) if layer is not None]
        assert self.committed_refs + sum(layer.refs[7] for layer in layers) == self.refs
        assert self.committed_refs + sum(layer.counters["entries"] for layer in layers) == self.refs
        assert self.committed_refs + sum(len(layer.holds) for layer in layers) == self.refs

    @invariant()
    def the_disk_is_one_moment(self) -> None:
        with self.index.env.begin(db=self.index.dbs[TABLE]) as txn:
            found = {key: self.index.from_disk(TABLE, key, value) for key, value in txn.cursor()}
        assert found == self.disk


TestLayers = Layers.TestCase
TestLayers.settings = settings(max_examples=25, stateful_step_count=25, deadline=None, derandomize=True)


def test_nothing_pending_needs_no_commit(tmp_path: Path) -> None:
    """Figures alone make a layer, so that they are not lost, but do not call for a commit."""
    index = Index(tmp_path, 8 * MIB)
    try:
        assert index.freeze() is None
        index.active.counters["read_bytes"] += 1
        assert not index.active
        assert index.freeze() is not None
        index.thaw(committed=True)
        index.put(TABLE, b"a", b"")
        assert index.active
        assert index.used() < 0.1
    finally:
        index.close()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    (tmp_path / "index").mkdir()
    made = Index(tmp_path / "index", MIB)
    yield made
    made.close()


def test_a_suspended_scan_keeps_no_reader(index: Index) -> None:
    """Listing a deep tree suspends one in each directory on the way; LMDB has slots for 512 readers."""
    index.put("inodes", b"a", b"1")
    index.put("inodes", b"b", b"2")
    scans = [index.scan("inodes", b"", b"z") for _ in range(600)]
    assert all(next(scan) == (b"a", b"1") for scan in scans)
    assert all(list(scan) == [(b"b", b"2")] for scan in scans)


def test_pending_bytes_are_counted(index: Index) -> None:
    index.put("inodes", b"key", b"value")
    assert index.pending == 8
    index.put("inodes", b"key", b"longer value")
    assert index.pending == 15
    index.delete("inodes", b"key")
    assert index.pending == 3
    assert index.freeze() is not None
    index.put("inodes", b"key", b"x")
    assert index.pending == 7
    index.thaw(committed=False)
    assert index.pending == 4
