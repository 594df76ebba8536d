"""Blocks packed later: fewer bytes, the same content, exact figures, wherever it stops."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest

from cachefs.sizes import MIB
from cachefs.states.pieces import Band, Rows
from cachefs.store import Damaged, Now, Store, StoreFull, home, replace
from cachefs.store.check import check
from cachefs.store.check_repair import repair
from cachefs.store.recompress import Progress, Recompressor
from cachefs.store.records import KEPT, PLANES, RAW, BlockRow
from cachefs.store.volumes import Volume, part_key

from .breaking import Broken, crash, failing
from .conftest import Opener
from .filling import SMALL, add, content, noise, remove
from .recount import assert_exact, assert_nothing_leaks
from .test_blocks import committed_row, only_block, overwrite
from .test_codec import numbers

WIDTH = 384
GROUP = 256 * WIDTH
"""Bytes of a group of rows in these tests."""


def state(groups: int, seed: int = 0) -> list[Rows]:
    return [Rows(numbers("f2", GROUP // 2, 1000 * seed + n), WIDTH) for n in range(groups)]


def joined(pieces: list[Rows]) -> bytes:
    return b"".join(bytes(piece.data) for piece in pieces)


def recompressor(store: Store) -> Recompressor:
    made = store.compress("idle", 1)
    assert made is not None
    return made


def run(store: Store, through: Recompressor | None = None) -> Progress:
    """All that can be packed, checked after each step; what was done."""
    through = through or recompressor(store)
    total = Progress()
    while not total.ended:
        step = through.step(lambda: False)
        total.tried += step.tried
        total.packed += step.packed
        total.saved += step.saved
        total.ended = step.ended
        assert_exact(store)
    return total


def repair_it(path: Path) -> None:
    """No file is lost by it, and a check finds nothing left to do."""
    report, done = repair(path, deep=True, progress=lambda step, at, of: None)
    assert report.sound, list(map(str, report.findings))
    assert all(each.startswith("deleted ") for each in done), done
    assert check(path, deep=True).sound


def rows(store: Store) -> list[BlockRow]:
    with store.index.snapshot() as txn:
        return [BlockRow.unpack(value) for _, value in txn.cursor(store.index.dbs["blocks"])]


def test_smaller_and_the_same(store: Store) -> None:
    pieces = state(40)
    ino = add(store, b"a", pieces)
    store.commit()
    before = store.counters()["compressed_bytes"]
    done = run(store)
    assert done.tried == done.packed == 40 * GROUP
    assert store.counters()["compressed_bytes"] == before - done.saved < before / 1.12
    assert {row.codec for row in rows(store)} == {PLANES}
    assert content(store, ino) == joined(pieces)
    assert_nothing_leaks(store)


def test_tried_once(opened: Opener) -> None:
    """Neither what was packed nor what is noise is tried again, also after a restart."""
    store = opened(SMALL)
    add(store, b"a", state(3))
    add(store, b"b", noise(5 * GROUP, 1))
    store.commit()
    again = recompressor(store)
    assert run(store, again).tried == 8 * GROUP
    assert {row.codec for row in rows(store)} == {PLANES, KEPT}
    assert run(store, again).tried == 0
    add(store, b"c", state(2, seed=5))
    store.commit()
    assert run(store, again).tried == 2 * GROUP
    assert run(opened()).tried == 0


def test_victims_are_left_alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a file needs them again."""
    pieces = state(4)
    add(store, b"a", pieces)
    store.commit()
    remove(store, b"a")
    store.commit()
    through = recompressor(store)
    assert run(store, through).tried == 0
    ino = add(store, b"b", pieces)
    store.commit()
    assert store.counters()["new_block_bytes"] == 4 * GROUP
    assert run(store, through).tried == 0
    monkeypatch.setattr("cachefs.store.recompress._AGAIN", 0.3)
    packed, deadline = 0, time.monotonic() + 10
    while packed < 4 * GROUP and time.monotonic() < deadline:
        packed += run(store, through).packed
        time.sleep(0.02)
    assert packed == 4 * GROUP
    assert content(store, ino) == joined(pieces)


def test_transposed_and_chunks(store: Store) -> None:
    data = numbers("f2", 64 * 512)
    ino = add(store, b"band", [Band(data, 64, 2, (512,))])
    other = add(store, b"chunks", numbers("f4", 98_304))
    store.commit()
    assert run(store).saved > 0
    assert {row.codec for row in rows(store)} == {PLANES}
    assert content(store, ino) == data
    assert content(store, other) == numbers("f4", 98_304)


def test_payloads_in_parts_become_whole(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the other way round; deleting either leaves nothing behind."""
    pieces = state(3)
    with store.writer.lock:
        put = type(store.volumes.pick(1)).put
        monkeypatch.setattr(
            type(store.volumes.pick(1)), "put", lambda volume, payloads: put(volume, payloads, 8000)
        )
        ino = add(store, b"a", pieces)
        store.commit()
        monkeypatch.undo()
    assert all(row.parts > 1 for row in rows(store))
    other = add(store, b"b", state(3, seed=1))
    store.commit()
    run(store)
    assert sorted(row.parts for row in rows(store)) == [0, 0, 0, 1, 1, 1]
    assert content(store, ino) == joined(pieces)
    assert content(store, other) == joined(state(3, seed=1))
    remove(store, b"a")
    remove(store, b"b")
    store.commit()
    store.writer.purge(1 << 30)
    assert not rows(store)
    assert_exact(store)


def test_saves_share_with_packed_blocks(store: Store) -> None:
    """Whole, and by their first rows."""
    pieces = state(4)
    add(store, b"a", pieces)
    store.commit()
    run(store)
    new = store.counters()["new_block_bytes"]
    half = bytes(pieces[0].data)[: GROUP // 2] + bytes(state(1, seed=7)[0].data)[GROUP // 2 :]
    ino = add(store, b"b", [*pieces, Rows(half, WIDTH)])
    store.commit()
    assert store.counters()["new_block_bytes"] - new == GROUP // 2
    assert content(store, ino) == joined(pieces) + half
    assert_exact(store)


@pytest.mark.parametrize("then", ["start", "repair", "repair, the journal lost", "repair, the journal cut"])
@pytest.mark.parametrize("split", [0, 8000])
@pytest.mark.parametrize("point", ["_put_beside", "restate", "settle", "before"])
def test_a_crash_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, split: int, then: str
) -> None:
    """The next start finds each block with one payload, and the figures right; so does a repair."""
    store = Store.open(tmp_path / "store", SMALL)
    pieces = state(6)
    put = Volume.put
    with monkeypatch.context() as patch:
        patch.setattr(Volume, "put", lambda volume, payloads: put(volume, payloads, split))
        ino = add(store, b"a", pieces)
        store.commit()
    real_put, real_restate = replace._put_beside, store.writer.restate

    def stop(*_: Any) -> None:
        raise Broken

    def then_stop(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            call(*arguments)
            raise Broken

        return run

    settled = iter([False])

    def first_only(*_: Any) -> int:
        if next(settled, True):
            raise Broken
        return 0

    with monkeypatch.context() as patch:
        if point == "_put_beside":
            patch.setattr(replace, "_put_beside", then_stop(real_put))
        elif point == "restate":
            patch.setattr(store.writer, "restate", then_stop(real_restate))
        elif point == "before":
            patch.setattr(store.writer, "restate", stop)
        patch.setattr(replace, "settle", first_only)
        with pytest.raises(Broken):
            recompressor(store).step(lambda: False)
    if "journal" in then:
        for volume in store.volumes.by_number.values():
            with volume.env.begin(write=True, db=volume.parts) as txn:
                journal = txn.pop(part_key(0, 0))
                if journal and then.endswith("cut"):
                    txn.put(part_key(0, 0), journal[:-3])
    store = crash(store, tmp_path / "store", repair_it if then != "start" else None)
    try:
        assert_exact(store)
        assert content(store, ino) == joined(pieces)
        done = point in ("restate", "settle")
        assert {row.codec for row in rows(store)} == {PLANES if done else RAW}
        run(store)
        assert {row.codec for row in rows(store)} == {PLANES}
        assert content(store, ino) == joined(pieces)
        assert_nothing_leaks(store)
    finally:
        store.close()


@pytest.mark.parametrize("error", [lmdb.MapFullError("full"), lmdb.DiskError("no space"), OSError(28, "x")])
def test_no_room(store: Store, error: Exception) -> None:
    """Said, and everything is as it was; later it goes on."""
    ino = add(store, b"a", state(6))
    store.commit()
    through = recompressor(store)
    with failing(store, "_meta", error), pytest.raises(StoreFull):
        through.step(lambda: False)
    assert_exact(store)
    assert_nothing_leaks(store)
    assert run(store, through).packed == 6 * GROUP
    assert content(store, ino) == joined(state(6))


def test_the_disk_is_full(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    add(store, b"a", state(6))
    store.commit()
    monkeypatch.setattr(type(store.volumes), "disk_room", lambda volumes: 1000)
    with pytest.raises(StoreFull):
        recompressor(store).step(lambda: False)
    assert_exact(store)


def test_a_client_comes(store: Store) -> None:
    """The step is given up, and made again."""
    add(store, b"a", state(4))
    store.commit()
    through = recompressor(store)
    answers = iter([False, False, True])
    assert through.step(lambda: next(answers)).tried == 0
    assert_nothing_leaks(store)
    assert run(store, through).packed == 4 * GROUP


def test_a_reader_with_an_older_snapshot(store: Store) -> None:
    """It finds the payload gone from where its row says, and looks again."""
    pieces = state(3)
    ino = add(store, b"a", pieces)
    store.commit()
    ids = sorted(store.tree.recipe(ino).blocks()[0].tolist())
    with store.blocks.reader() as reader:
        assert reader.row(ids[0]) is not None  # the snapshot of the index is taken
        run(store)
        assert [bytes(reader.raw(block)) for block in ids] == [bytes(piece.data) for piece in pieces]
    assert not store.blocks.damaged
    assert committed_row(store, ids[0]).codec == PLANES


def test_old_places_are_forgotten(store: Store) -> None:
    """Nobody reads where a payload lay before, not even who verified it there at the last moment."""
    pieces = state(3)
    ino = add(store, b"a", pieces)
    store.commit()
    recipe = store.tree.recipe(ino)
    first, second, _ = sorted(recipe.blocks()[0].tolist())
    into = memoryview(bytearray(GROUP))
    with store.blocks.reader() as reader:
        reader.copy(first, 0, into)
        assert store.blocks.is_verified(first)
        assert committed_row(store, second).hint
        assert reader.row(second) is not None
        run(store)
        assert not store.blocks.is_verified(first)
        reader.copy(second, 0, into)  # the old pages are free, but nobody has written there yet
        assert into == pieces[1].data
        assert not store.blocks.is_verified(second) or store.blocks._verified[second] is None
    for number in range(10):
        add(store, b"%d" % number, noise(4 * GROUP, number))
        store.commit()
        assert content(store, ino) == joined(pieces)
        assert store.read_cached(recipe, 0, into) is not Now.DONE


@pytest.mark.parametrize("known", [False, True])
def test_damage_stays_damage(store: Store, known: bool) -> None:
    """A damaged block is not packed into a sound one, and a packed one that is damaged is noticed."""
    ino = add(store, b"a", state(1))
    other = add(store, b"b", state(1, seed=1))
    store.commit()
    if known:
        content(store, other)
    overwrite(store, only_block(store, ino), noise(GROUP, 3))
    run(store)
    with pytest.raises(Damaged):
        content(store, ino)
    block = only_block(store, other)
    volume = store.volumes.by_number[committed_row(store, block).volume]
    with volume.env.begin(write=True, db=volume.parts) as txn:
        key = replace.part_key(block, 0)
        payload = bytearray(txn.get(key) or b"")
        payload[20] ^= 1  # in the plane that is stored as it is
        txn.put(key, bytes(payload))
    with pytest.raises(Damaged):
        content(store, other)
    assert store.blocks.damaged == {only_block(store, ino), block}


def test_one_of_many_is_damaged(store: Store) -> None:
    """Packed blocks are decoded many at once; only the damaged one cannot be had."""
    pieces = state(12)
    ino = add(store, b"a", pieces)
    store.commit()
    run(store)
    recipe = store.tree.recipe(ino)
    block = recipe.blocks()[0].tolist()[5]
    volume = store.volumes.by_number[committed_row(store, block).volume]
    with volume.env.begin(write=True, db=volume.parts) as txn:
        payload = bytearray(txn.get(replace.part_key(block, 0)) or b"")
        payload[20] ^= 1
        txn.put(replace.part_key(block, 0), bytes(payload))
    for _ in range(2):
        with pytest.raises(Damaged, match=f"block {block} "):
            content(store, ino)
    for start, stop in ((0, 5 * GROUP), (6 * GROUP, 12 * GROUP)):
        assert store.read(recipe, start, stop - start) == joined(pieces)[start:stop]
    assert store.blocks.damaged == {block}


def test_at_the_bound(opened: Opener, tmp_path: Path) -> None:
    """A store filled to the brim gains room, and never takes more than its bound meanwhile."""
    store = opened(SMALL)
    made = {}
    for number in range(60):
        pieces = state(8, seed=number)
        if store.room() < 9 * GROUP:
            break
        made[add(store, b"%d" % number, pieces)] = joined(pieces)
        store.commit()
    assert len(made) > 30
    room = store.room()
    through = recompressor(store)
    while not through.step(lambda: False).ended:
        assert home.disk_bytes(tmp_path / "store") <= SMALL
    assert_exact(store)
    assert store.room() > room + 4 * MIB
    for ino, data in made.items():
        assert content(store, ino) == data


def test_always(store: Store) -> None:
    """Packed before they are written; chunks that are noise, too, are tried only once."""
    assert store.compress("always", 3) is None
    pieces = state(30)
    ino = add(store, b"a", pieces)
    other = add(store, b"b", noise(300_000))
    store.write_behind()
    assert content(store, ino) == joined(pieces)
    store.commit()
    assert {row.codec for row in rows(store)} == {PLANES, KEPT}
    assert content(store, ino) == joined(pieces)
    assert content(store, other) == noise(300_000)
    assert_exact(store)
    assert_nothing_leaks(store)
    assert run(store).tried == 0


def test_off(store: Store) -> None:
    assert store.compress("off", 1) is None
    add(store, b"a", state(2))
    add(store, b"b", bytes(100_000))
    store.commit()
    assert {row.codec for row in rows(store)} == {RAW}
    assert_exact(store)


@pytest.mark.parametrize("rounds", [20, pytest.param(1500, marks=pytest.mark.soak)])
def test_while_clients_save_read_and_remove(store: Store, rounds: int) -> None:
    """Beside a recompressor that never rests every file stays what it was and all adds up."""
    ended = threading.Event()
    failures: list[BaseException] = []

    def go_on() -> None:
        through = recompressor(store)
        while not ended.is_set():
            try:
                through.step(ended.is_set)
            except StoreFull:
                time.sleep(0.01)
            except BaseException as error:
                failures.append(error)
                return

    chance = random.Random(1)
    made: dict[bytes, tuple[int, bytes]] = {}
    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        for number in range(rounds):
            name = b"%d" % number
            pieces = state(chance.randrange(1, 8), seed=chance.randrange(max(10, rounds // 4)))
            while store.room() < 10 * GROUP and made:
                old = chance.choice(list(made))
                remove(store, old)
                del made[old]
                store.commit()
            made[name] = (add(store, name, pieces), joined(pieces))
            if chance.random() < 0.5:
                store.commit()
            if chance.random() < 0.1:
                store.writer.purge(4 * MIB)
            for ino, data in chance.sample(list(made.values()), min(3, len(made))):
                assert content(store, ino) == data
    finally:
        ended.set()
        thread.join()
    store.commit()
    assert not failures
    assert_exact(store)
    assert_nothing_leaks(store)
    run(store)
    assert all(content(store, ino) == data for ino, data in made.values())
