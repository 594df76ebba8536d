"""What is written agrees with a count from scratch, whatever happened and whenever it stopped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from cachefs.sizes import MIB
from cachefs.states.pieces import Chunk
from cachefs.store import Store, StoreFailed, StoreFull
from cachefs.store.layout import MIN_VOLUME, Budget, footprint
from cachefs.store.records import VolumeRow, int_key
from cachefs.store.volumes import Volume

from .breaking import Broken, crash, failing
from .conftest import Opener
from .filling import SMALL, add, content, noise, place, remove
from .recount import assert_exact, assert_nothing_leaks


def in_parts(store: Store, part_bytes: int) -> Callable[..., dict[int, int]]:
    """Have the first volume split payloads, as where free pages are scattered."""
    store.volumes.make(32 * MIB)
    (volume,) = store.volumes.by_number.values()
    put = volume.put
    setattr(volume, "put", lambda payloads, _=0: put(payloads, part_bytes))  # noqa: B010
    return put


def test_payloads_in_parts(store: Store) -> None:
    """Split payloads read back, count and go like whole ones."""
    in_parts(store, 4080)
    ino = add(store, b"a", noise(1_000_000))
    store.commit()
    assert_exact(store)
    assert content(store, ino) == noise(1_000_000)
    remove(store, b"a")
    store.commit()
    store.writer.purge(1 << 30)
    assert_exact(store)
    assert store.volumes.used == 0


@pytest.mark.parametrize("part_bytes", [0, 4080])
def test_strays_of_a_crash_are_swept(tmp_path: Path, part_bytes: int) -> None:
    """Payloads whose index transaction never came are gone at the next start, their parts too."""
    store = Store.open(tmp_path / "store", SMALL)
    if part_bytes:
        in_parts(store, part_bytes)
    kept = add(store, b"kept", noise(200_000))
    store.commit()
    add(store, b"lost", noise(400_000, 1))
    with failing(store, "_meta", Broken()), pytest.raises(Broken):
        store.commit()
    store = crash(store, tmp_path / "store")
    try:
        assert_exact(store)
        assert [name for name, _ in store.tree.walk()] == [b"kept"]
        assert content(store, kept) == noise(200_000)
        again = add(store, b"again", noise(400_000, 2))
        store.commit()
        assert_exact(store)
        assert content(store, again) == noise(400_000, 2)
    finally:
        store.close()


def test_a_crash_after_a_probe(tmp_path: Path) -> None:
    """What lies in a volume and is not named yet goes at the next start, so it must not be counted."""
    store = Store.open(tmp_path / "store", SMALL)
    add(store, b"kept", noise(200_000))
    store.commit()
    add(store, b"lost", noise(400_000, 1))
    with failing(store, "_meta", OSError(5, "broken")), pytest.raises(StoreFailed):
        store.commit()
    store.writer.probe()
    store = crash(store, tmp_path / "store")
    try:
        assert_exact(store)
    finally:
        store.close()


@pytest.mark.parametrize("where", ["first", "another"])
def test_a_volume_that_a_crash_left(tmp_path: Path, where: str) -> None:
    """One that no index transaction came to name is gone at the next start, with all that is in it."""
    store = Store.open(tmp_path / "store", SMALL)
    if where == "another":
        store.volumes.make(8 * MIB)
        add(store, b"kept", noise(7 * MIB))
        store.commit()
    add(store, b"lost", noise(600_000, 1))
    with failing(store, "_meta", Broken()), pytest.raises(Broken):
        store.commit()
    store = crash(store, tmp_path / "store")
    try:
        assert len(list((tmp_path / "store" / "volumes").iterdir())) == len(store.volumes.by_number)
        add(store, b"a", noise(1000))
        store.commit()
        assert_exact(store)
    finally:
        store.close()


def test_a_crash_in_a_purge(tmp_path: Path) -> None:
    """Payloads gone, their rows still there: victims without a payload, which a save takes for absent."""
    store = Store.open(tmp_path / "store", SMALL)
    kept = add(store, b"kept", noise(200_000))
    add(store, b"gone", noise(400_000, 1))
    store.commit()
    remove(store, b"gone")
    store.commit()
    with failing(store, "_meta", Broken()), pytest.raises(Broken):
        store.writer.purge(1 << 30)
    store = crash(store, tmp_path / "store")
    try:
        again = add(store, b"again", noise(400_000, 1))
        store.commit()
        assert content(store, again) == noise(400_000, 1)
        assert content(store, kept) == noise(200_000)
        assert not store.blocks.damaged, "nothing that a file needs is damaged"
        store.writer.purge(1 << 30)
        assert_exact(store)
        assert_nothing_leaks(store)
    finally:
        store.close()


def test_a_purge_frees_room_that_is_used_again(store: Store) -> None:
    """The file does not grow over turnover: LMDB hands freed pages out again."""
    sizes = []
    for turn in range(40):
        add(store, b"f%d" % turn, noise(3 * MIB, turn))
        store.commit()
        if turn >= 3:
            remove(store, b"f%d" % (turn - 3))
            store.commit()
            store.writer.purge(1 << 30)
        sizes.append(sum(volume.disk_bytes() for volume in store.volumes.by_number.values()))
    assert max(sizes) <= 6 * 3 * MIB
    assert_exact(store)


def touched(path: Path) -> int:
    """Bytes of this process's map of a file that were touched, or lie beside those."""
    maps = Path("/proc/self/smaps").read_text().split("VmFlags")
    return sum(int(each.split("Rss:")[1].split()[0]) << 10 for each in maps if f" {path}\n" in each)


def test_a_purge_does_not_read_what_goes(tmp_path: Path) -> None:
    """From a cold disk it would read as much as it frees, while who needs the room waits."""
    place = tmp_path / "store"
    store = Store.open(place, SMALL)
    add(store, b"a", [Chunk(noise(256 << 10, n)) for n in range(100)])
    store.commit()
    remove(store, b"a")
    store.commit()
    store.close()
    store = Store.open(place)
    try:
        before = touched(place / "volumes/0001/data.mdb")
        freed = store.writer.purge(1 << 30)
        assert freed > 25 * MIB
        assert touched(place / "volumes/0001/data.mdb") - before < freed // 2
        assert_exact(store)
    finally:
        store.close()


def test_purging_takes_the_oldest_victims(store: Store) -> None:
    for number in range(6):
        add(store, b"%d" % number, [Chunk(noise(100_000, number))])
        store.commit()
    for number in (3, 1, 5, 0):
        remove(store, b"%d" % number)
        store.commit()
    store.writer.purge(2 * footprint(100_000))
    for number, new in ((3, True), (1, True), (5, False), (0, False)):
        placer = store.placer()
        placer.place(Chunk(noise(100_000, number)))
        assert (placer.new_bytes > 0) == new
        store.blocks.release(placer.take_holds())


def write_all(store: Store) -> None:
    while store.blocks.pool.by_id:
        store.writer.write_out()


def test_a_full_store_refuses_and_loses_nothing(store: Store) -> None:
    """Too much is StoreFull; what was there stays, and the same goes in once there is room."""
    ino = add(store, b"a", noise(20 * MIB))
    store.commit()
    placer = store.placer()
    for number in range(40):
        placer.place(Chunk(noise(MIB, 100 + number)))
    with pytest.raises(StoreFull):
        write_all(store)
    assert content(store, ino) == noise(20 * MIB)
    store.blocks.release(placer.take_holds())
    store.commit()
    assert_exact(store)
    assert_nothing_leaks(store)
    remove(store, b"a")
    store.commit()
    ino = add(store, b"b", noise(30 * MIB, 1))
    store.commit()
    assert content(store, ino) == noise(30 * MIB, 1)
    assert_exact(store)


def test_an_eviction_passes_a_save_that_does_not_fit(store: Store) -> None:
    """A commit that only deletes goes through although the pool is too large to be written."""
    add(store, b"a", noise(30 * MIB))
    store.commit()
    recipe, holds = place(store, [Chunk(noise(MIB, n)) for n in range(20)])
    remove(store, b"a")
    store.commit()
    assert_exact(store)
    store.commit()
    assert bytes(store.read(recipe, 19 * MIB, MIB)) == noise(MIB, 19)
    store.blocks.release(holds)
    store.commit()
    assert_exact(store)
    assert_nothing_leaks(store)


def test_a_disk_without_room_for_a_volume(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is a full store, not the end of the mount."""

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Volume, "__init__", refuse)
    ino = add(store, b"a", noise(100_000))
    with pytest.raises(StoreFull):
        store.commit()
    monkeypatch.undo()
    store.commit()
    assert content(store, ino) == noise(100_000)
    assert_exact(store)
    assert_nothing_leaks(store)


def test_a_disk_without_room_for_another_volume(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free in those that are there is used to the last page, though no run of them is long enough."""
    budget = replace(Budget.of(SMALL), volume=MIN_VOLUME)
    monkeypatch.setattr(Budget, "of", lambda *_: budget)
    store = opened(SMALL)
    for n in range(56):
        add(store, b"%d" % n, noise(120 << 10, n))
    store.commit()
    for n in range(0, 56, 2):
        remove(store, b"%d" % n)
    store.commit()
    store.writer.purge(1 << 30)
    assert list(store.volumes.by_number) == [1]

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Volume, "__init__", refuse)
    ino = add(store, b"large", [Chunk(noise(256 << 10, n)) for n in range(100, 108)])
    store.commit()
    assert content(store, ino) == b"".join(noise(256 << 10, n) for n in range(100, 108))
    assert_exact(store)


def test_a_reader_that_was_killed_keeps_no_pages(store: Store) -> None:
    """LMDB counts its snapshot among those in use until somebody looks whether it lives."""
    add(store, b"a", noise(100_000))
    store.commit()
    killed = "import lmdb, os; t = lmdb.open('{}', readonly=True).begin(); os.kill(os.getpid(), 9)"
    envs = [store.index.env, *(volume.env for volume in store.volumes.by_number.values())]
    for env in envs:
        subprocess.run([sys.executable, "-c", killed.format(env.path())], timeout=20)
    before = [len(env.readers().splitlines()) for env in envs]
    add(store, b"b", noise(100_000, 1))
    with failing(store, "_meta", lmdb.MapFullError("full")), pytest.raises(StoreFull):
        store.commit()
    assert [len(env.readers().splitlines()) for env in envs] == [number - 1 for number in before]
    store.commit()
    assert_exact(store)


def test_figures_survive(opened: Opener) -> None:
    store = opened(SMALL)
    add(store, b"a", noise(100_000))
    store.index.active.counters["read_bytes"] += 7
    store.commit()
    before = store.counters()
    store = opened()
    assert store.counters() == before
    assert store.counters()["read_bytes"] == 7
    assert store.counters()["new_block_bytes"] == 100_000


def test_a_volume_deletes_what_is_not_there(tmp_path: Path) -> None:
    volume = Volume(1, tmp_path / "v", VolumeRow(8 * MIB, 0, 0))
    try:
        volume.put([(5, b"x" * 5000)])
        volume.delete([(4, None), (5, None)])
        assert volume.ids() == []
        with volume.env.begin(db=volume.db) as txn:
            assert txn.get(int_key(0)) == b"", "the empty transaction behind a deletion"
    finally:
        volume.close()
