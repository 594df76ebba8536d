"""Blocks: holding, dying and revived victims are accounted for; damage is noticed, never passed on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachefs.states.pieces import Chunk, Rows
from cachefs.store import Damaged, Now, Store
from cachefs.store.layout import footprint
from cachefs.store.records import BlockRow, int_key, int_of

from .breaking import set_hint
from .filling import add, content, fill, make, noise, place, remove
from .recount import assert_exact, assert_nothing_leaks

WIDTH = 1024


def rows(count: int, seed: int = 0, tail: int = 0) -> Rows:
    return Rows(noise(count * WIDTH - tail, seed) + bytes(tail), WIDTH)


def committed_row(store: Store, block: int) -> BlockRow:
    value = store.index.committed("blocks", int_key(block))
    assert value is not None
    return BlockRow.unpack(value)


def only_block(store: Store, ino: int) -> int:
    (block,) = store.tree.recipe(ino).blocks()[0].tolist()
    return int(block)


def overwrite(store: Store, block: int, payload: bytes | None) -> None:
    """Damage a payload on disk."""
    volume = store.volumes.by_number[committed_row(store, block).volume]
    with volume.env.begin(write=True, db=volume.db) as txn:
        if payload is None:
            txn.delete(int_key(block))
        else:
            txn.put(int_key(block), payload)
    set_hint(store, block, 0)  # where the payload was, it still is


def test_holds_are_counted(store: Store) -> None:
    blocks = store.blocks
    recipe, holds = place(store, [Chunk(noise(5000))])
    (block,) = holds
    assert blocks.held == {block: 1}
    assert blocks.hold(block)
    blocks.release([block])
    assert blocks.held == {block: 1}
    store.commit()
    store.writer.purge(1 << 30)
    assert bytes(store.read(recipe, 0, 5000)) == noise(5000), "a held block stays, though nothing names it"
    blocks.release(holds)
    assert not blocks.held
    store.writer.purge(1 << 30)
    with pytest.raises(Damaged):
        store.read(recipe, 0, 5000)
    assert_exact(store)


def test_what_is_being_deleted_cannot_be_held(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup in the middle of a purge takes the block for absent, and stores it again."""
    ino = add(store, b"a", noise(50_000))
    store.commit()
    block = only_block(store, ino)
    remove(store, b"a")
    store.commit()
    volume = store.volumes.by_number[1]
    delete = volume.delete
    seen: list[bool] = []

    def look(items: list[tuple[int, BlockRow]], *more: Any) -> None:
        seen.append(store.blocks.hold(block))
        fill(store, make(store, b"b%d" % len(seen)), [Chunk(noise(50_000))])
        delete(items, *more)

    monkeypatch.setattr(volume, "delete", look)
    assert store.writer.purge(1 << 30) == footprint(50_000)
    assert seen == [False]
    monkeypatch.undo()
    store.commit()
    again = store.tree.require(1, b"b1").ino
    assert only_block(store, again) != block
    assert content(store, again) == noise(50_000)
    assert_exact(store)
    assert_nothing_leaks(store)


def test_an_unwanted_block_never_reaches_the_disk(store: Store) -> None:
    _, holds = place(store, [Chunk(noise(50_000))])
    store.blocks.release(holds)
    store.commit()
    assert store.counters()["blocks"] == 0
    assert_nothing_leaks(store)


class Room:
    """What `Store.room` counts on: victims that are not held."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def purgeable(self) -> int:
        return self.store.writer.counters["victim_bytes"] - self.store.blocks.revived_bytes

    def check(self) -> None:
        """What room promises from victims is what a purge really frees."""
        expected = self.purgeable()
        assert self.store.writer.purge(1 << 40) == expected
        assert self.purgeable() == 0


def test_held_victims_are_no_room(store: Store) -> None:
    """A victim that a save has found again is not to be had."""
    add(store, b"a", noise(100_000))
    store.commit()
    remove(store, b"a")
    store.commit()
    _, holds = place(store, [Chunk(noise(100_000))])
    assert store.blocks.revived
    Room(store).check()
    store.blocks.release(holds)
    assert not store.blocks.revived
    Room(store).check()
    assert_nothing_leaks(store)


def test_a_block_that_becomes_a_victim_while_held_is_no_room(store: Store) -> None:
    """The other way round: the old file goes while the new save holds its blocks."""
    add(store, b"a", noise(100_000))
    store.commit()
    _, holds = place(store, [Chunk(noise(100_000))])
    remove(store, b"a")
    store.commit()
    Room(store).check()
    store.blocks.release(holds)
    Room(store).check()
    assert_nothing_leaks(store)


def test_a_held_victim_named_and_let_go_in_one_commit_is_no_room(store: Store) -> None:
    add(store, b"a", noise(100_000))
    store.commit()
    remove(store, b"a")
    store.commit()
    _, holds = place(store, [Chunk(noise(100_000))])
    add(store, b"b", noise(100_000))
    remove(store, b"b")
    store.commit()
    Room(store).check()
    store.blocks.release(holds)
    Room(store).check()
    assert_nothing_leaks(store)


def test_new_blocks_written_before_their_recipe_are_no_room(store: Store) -> None:
    recipe, holds = place(store, [Chunk(noise(100_000))])
    store.writer.write_out()
    Room(store).check()
    ino = make(store, b"a")
    store.tree.set_content(ino, recipe, 0, None)
    store.index.active.holds.append(holds)
    store.commit()
    Room(store).check()
    assert content(store, ino) == noise(100_000)
    assert_nothing_leaks(store)


def flip(payload: bytes) -> bytes:
    return payload[:100] + bytes([payload[100] ^ 1]) + payload[101:]


DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "a flipped bit": flip,
    "missing": lambda payload: None,
    "empty": lambda payload: b"",
    "cut": lambda payload: payload[:-1],
    "cut at a row": lambda payload: payload[: -10 * WIDTH],
    "longer": lambda payload: payload + b"x",
    "another": lambda payload: bytes(len(payload)),
}


@pytest.mark.parametrize("compressible", [False, True])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_an_error_never_wrong_bytes(store: Store, damage: str, compressible: bool) -> None:
    data = noise(60_000) if not compressible else b"".join(b"%d," % n for n in range(9000))
    ino = add(store, b"a", [Chunk(data)])
    other = add(store, b"b", [Chunk(noise(3000, 9))])
    store.commit()
    block = only_block(store, ino)
    volume = store.volumes.by_number[1]
    with volume.env.begin(db=volume.db) as txn:
        payload = bytes(txn.get(int_key(block)) or b"")
    assert (len(payload) < len(data)) == compressible
    overwrite(store, block, DAMAGE[damage](payload))
    if compressible and damage == "longer":
        assert content(store, ino) == data, "zstd does not mind what follows its frame"
        return
    for _ in range(2):
        with pytest.raises(Damaged):
            content(store, ino)
    assert content(store, other) == noise(3000, 9)
    assert store.blocks.damaged == {block}
    store.tree.set_xattr(other, b"user.x", b"")
    store.commit()
    assert store.counters()["corrupt_blocks"] == 1


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_new_save_does_not_lean_on_damage(store: Store, damage: str) -> None:
    """Saving the same content again, or a branch of it, stores what it cannot read back."""
    whole = rows(64)
    ino = add(store, b"a", [whole])
    store.commit()
    block = only_block(store, ino)
    overwrite(store, block, DAMAGE[damage](bytes(whole.data)))
    other = noise(WIDTH, 77)
    saves = {
        b"same": bytes(whole.data),
        b"head": bytes(whole.data[: 32 * WIDTH]) + other,
        b"tail": other + bytes(whole.data[-32 * WIDTH :]),
        b"shorter": bytes(whole.data[: 40 * WIDTH]),
    }
    for name, data in saves.items():
        add(store, name, [Rows(data, WIDTH)])
    store.commit()
    for name, data in saves.items():
        assert content(store, store.tree.require(1, name).ino) == data, name
    assert_nothing_leaks(store)


def test_tiles_do_not_lean_on_damage(store: Store) -> None:
    from .test_place import tile

    ino = add(store, b"a", [tile(range(60))])
    store.commit()
    overwrite(store, only_block(store, ino), b"short")
    for name, keys in ((b"head", [*range(40), 99]), (b"tail", [98, *range(30, 60)]), (b"same", range(60))):
        again = add(store, name, [tile(keys)])
        store.commit()
        assert content(store, again) == bytes(tile(keys).data)


def test_a_block_is_verified_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ino = add(store, b"a", [Chunk(noise(60_000))])
    store.commit()
    assert content(store, ino) == noise(60_000)
    monkeypatch.setattr("xxhash.xxh3_128_digest", lambda *a: pytest.fail("hashed again"))
    assert content(store, ino) == noise(60_000)


def test_a_hint_leads_to_the_payload(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ino = add(store, b"a", [Rows(noise(60_000), 100), Rows(noise(50_000, 2), 100)])
    small = add(store, b"b", [Rows(noise(4000, 3), 100)])
    store.commit()
    assert committed_row(store, only_block(store, small)).hint == 0, "it shares a page, which moves"
    with monkeypatch.context() as patch:
        patch.setattr(store.volumes.by_number[1], "get", lambda *a: pytest.fail("asked LMDB"))
        assert content(store, ino) == noise(60_000) + noise(50_000, 2)


def can_refuse_to_wait(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT) == 1
        except OSError:
            return False


def test_what_is_in_memory_is_read_at_once(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store", 64 << 20)
    try:
        data = noise(60_000) + noise(50_000, 2)
        ino = add(store, b"a", [Rows(data[:60_000], 100), Rows(data[60_000:], 100)])
        recipe = store.tree.recipe(ino)
        into = memoryview(bytearray(80_000))
        assert store.read_cached(recipe, 20_000, into) is Now.DONE, "it waits to be written yet"
        assert into == data[20_000:100_000]
        store.commit()
        possible = can_refuse_to_wait(store.path / "volumes" / "0001" / "data.mdb")
        for _ in range(2):  # verified on the way, and then known
            into = memoryview(bytearray(80_000))
            assert store.read_cached(recipe, 20_000, into) is (Now.DONE if possible else Now.COLD)
            assert not possible or into == data[20_000:100_000]
        assert store.read_cached(recipe, 40_000, into) is Now.OTHERWISE, "that is beyond the end"
    finally:
        store.close()


@pytest.mark.parametrize("wrong", [1, 4096, 16 << 20, 1 << 40])
def test_a_wrong_hint_does_no_harm(store: Store, wrong: int) -> None:
    ino = add(store, b"a", [Rows(noise(60_000), 100)])
    store.commit()
    block = only_block(store, ino)
    set_hint(store, block, committed_row(store, block).hint + wrong)
    with store.blocks.reader() as reader:
        assert reader.raw(block) == noise(60_000), "verified, but not there"
    assert content(store, ino) == noise(60_000)
    assert not store.blocks.damaged


def test_damage_is_not_read_at_once_either(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store", 64 << 20)
    try:
        ino = add(store, b"a", [Rows(noise(60_000), 100)])
        store.commit()
        recipe = store.tree.recipe(ino)
        hint = committed_row(store, only_block(store, ino)).hint
        with (store.path / "volumes" / "0001" / "data.mdb").open("r+b") as file:
            file.seek(hint + 31_000)
            file.write(bytes(8))
        for size in (100, 60_000):
            assert store.read_cached(recipe, 0, memoryview(bytearray(size))) is not Now.DONE
            with pytest.raises(Damaged):
                store.read(recipe, 0, size)
    finally:
        store.close()


def test_ids_grow(store: Store) -> None:
    ids = [only_block(store, add(store, b"%d" % n, [Chunk(noise(1000, n))])) for n in range(5)]
    assert ids == sorted(set(ids))
    store.commit()
    volume = store.volumes.by_number[1]
    assert volume.ids() == ids
    assert int_of(int_key(ids[-1])) == ids[-1]
