"""Placing, purging and writing behind at once, in the orders that matter."""

from __future__ import annotations

from pathlib import Path

import lmdb
import pytest
import xxhash

from cachefs.sizes import MIB
from cachefs.states.pieces import Buffer, Chunk, Rows
from cachefs.store import Damaged, Store, StoreFull
from cachefs.store.blocks import BlockReader

from .breaking import crash, failing
from .filling import SMALL, add, content, noise, remove
from .recount import assert_exact, assert_nothing_leaks

WIDTH = 256


def test_a_candidate_purged_while_another_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never named, although a snapshot from before the purge still shows it."""
    first, shared = noise(WIDTH), noise(40 * WIDTH, 1)
    add(store, b"victim", [Rows(first + shared + noise(23 * WIDTH, 2), WIDTH)])
    store.commit()
    add(store, b"newest", [Rows(first + noise(63 * WIDTH, 3), WIDTH)])
    store.commit()
    remove(store, b"victim")
    store.commit()
    raw = BlockReader.raw
    purged: list[int] = []

    def read_and_purge(reader: BlockReader, block: int, *, verify: bool = True) -> Buffer:
        found = raw(reader, block, verify=verify)
        if not purged:
            purged.append(store.writer.purge(1 << 30))
        return found

    target = first + shared + noise(23 * WIDTH, 4)
    with monkeypatch.context() as patch:
        patch.setattr(BlockReader, "raw", read_and_purge)
        ino = add(store, b"new", [Rows(target, WIDTH)])
    assert purged[0] > 0, "the newest candidate was read first, and the other was a victim"
    store.commit()
    assert content(store, ino) == target
    assert_exact(store)
    assert_nothing_leaks(store)


def test_an_old_failure_of_writing_behind(store: Store) -> None:
    """Does not hurt a later save: what could not be written then has been since."""
    blocks = store.budget.batch // MIB + 1
    with failing(store, "_meta", lmdb.DiskError("no space")):
        ino = add(store, b"a", [Chunk(noise(MIB, number)) for number in range(blocks)])
        with store.writer.lock:  # so that it cannot fail before this call returns
            store.write_behind()
        assert store._batch is not None
        assert isinstance(store._batch.exception(), StoreFull)
    store.commit()
    later = add(store, b"b", [Chunk(noise(MIB, 100 + number)) for number in range(blocks)])
    store.write_behind()
    store.commit()
    for each, seed in ((ino, 0), (later, 100)):
        assert content(store, each) == b"".join(noise(MIB, seed + number) for number in range(blocks))
    assert_exact(store)


def test_a_failure_of_writing_behind_is_told(store: Store) -> None:
    """To a save that goes on while the disk is full: at the latest when the pool is."""
    placer = store.placer()
    with failing(store, "_meta", lmdb.DiskError("no space")):
        for number in range(store.budget.pool // MIB + 1):
            placer.place(Chunk(noise(MIB, number)))
        with pytest.raises(StoreFull):
            store.write_behind()
    store.blocks.release(placer.take_holds())
    store.commit()
    assert_exact(store)
    assert_nothing_leaks(store)


def test_used_after_a_crash(tmp_path: Path) -> None:
    """Payloads without a name do not count, also where a purge wrote the figures before the crash."""
    store = Store.open(tmp_path / "store", SMALL)
    add(store, b"victim", noise(3 * MIB))
    store.commit()
    remove(store, b"victim")
    store.commit()
    add(store, b"lost", noise(2 * MIB, 1))
    with failing(store, "_name", lmdb.DiskError("no space")), pytest.raises(StoreFull):
        store.commit()
    assert store.writer.purge(MIB) > 0
    store = crash(store, tmp_path / "store")
    try:
        assert_exact(store)
        add(store, b"again", noise(2 * MIB, 1))
        store.commit()
        assert_exact(store)
    finally:
        store.close()


def test_pages_of_what_was_purged_are_not_read_for_it(store: Store) -> None:
    """A snapshot from before the purge still has the row, and the place was verified."""
    before = [(place(store, raw), raw) for raw in (noise(200_000, n) for n in range(20))]
    store.writer.write_out()
    into = memoryview(bytearray(200_000))
    with store.blocks.reader() as reader:
        for block, _ in before:
            reader.copy(block, 0, into)
    with store.blocks.reader() as reader:
        reader.row(before[0][0])
        store.blocks.release([block for block, _ in before])
        store.writer.purge(1 << 30)
        after = [place(store, noise(200_000, 100 + n)) for n in range(20)]
        store.writer.write_out()
        for block, raw in before:
            try:
                reader.copy(block, 0, into)
            except Damaged:
                continue
            assert into == raw
    store.blocks.release(after)


def place(store: Store, raw: bytes) -> int:
    return store.blocks.add(raw, xxhash.xxh3_128_digest(raw))
