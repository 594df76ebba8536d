"""`check` and `repair` on stores whose index says something wrong, one row at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest

from cachefs.sizes import MIB
from cachefs.states.pieces import Chunk
from cachefs.store import Store
from cachefs.store.check import Report, check
from cachefs.store.check_repair import repair
from cachefs.store.errors import StoreFailed, StoreRefused
from cachefs.store.index import SEALED, Index
from cachefs.store.pages import faults
from cachefs.store.records import BlockRow, Refs, be, int_key, int_of
from cachefs.store.tree import ROOT

from .breaking import crash, failing
from .filling import SMALL, add, content, fill, in_memory, noise, remove
from .flipping import make_template, read_all


@pytest.fixture(scope="module")
def template() -> Iterator[tuple[Path, dict[str, bytes]]]:
    with in_memory() as path:
        yield Path(path) / "store", make_template(Path(path) / "store")


@pytest.fixture
def place(template: tuple[Path, dict[str, bytes]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(template[0], tmp_path / "store"))


def quiet(step: str, done: int, of: int) -> None:
    pass


def mend(place: Path) -> list[str]:
    """Repair, after which a check is clean; what was done."""
    report, done = repair(place, deep=True, progress=quiet)
    assert report.sound, list(map(str, report.findings))
    assert check(place, deep=True).sound
    return done


def texts(report: Report) -> str:
    return "\n".join(map(str, report.findings))


def test_a_sound_store_is_sound_and_stays_as_it_is(
    place: Path, template: tuple[Path, dict[str, bytes]]
) -> None:
    report = check(place, deep=True)
    assert (texts(report), report.notes) == ("", [])
    assert report.files == len(template[1])
    assert report.bytes_read > 1_000_000
    before = (place / "index/data.mdb").read_bytes()
    assert mend(place) == []
    assert (place / "index/data.mdb").read_bytes() == before


Txn = lmdb.Transaction
Spoil = Callable[[Index, Txn], None]


def _first(index: Index, txn: Txn, table: str) -> tuple[bytes, bytes]:
    key, value = next(iter(txn.cursor(index.dbs[table])))
    return bytes(key), bytes(value)


def _drop(table: str) -> Spoil:
    return lambda index, txn: txn.delete(_first(index, txn, table)[0], db=index.dbs[table]) and None


def _count(index: Index, txn: Txn) -> None:
    for key, value in list(txn.cursor(index.dbs["refs"])):
        if Refs.unpack(value).number:
            txn.put(bytes(key), Refs(77, 0).pack(), db=index.dbs["refs"])
            return


def _digest(index: Index, txn: Txn) -> None:
    key, _ = _first(index, txn, "digests")
    txn.put(key, int_key(1_000_000), db=index.dbs["digests"])


def _figures(index: Index, txn: Txn) -> None:
    txn.put(b"counters", json.dumps({"blocks": 5, "torn_saves": 3}).encode(), db=index.dbs["meta"])


def _unreadable(index: Index, txn: Txn) -> None:
    txn.put(b"counters", b"{", db=index.dbs["meta"])


def _stranger(index: Index, txn: Txn) -> None:
    for table, key in (("about", be(999)), ("xattrs", be(999) + b"user.x"), ("recipes", be(999) + bytes(4))):
        txn.put(key, index.to_disk(table, key, b""), db=index.dbs[table])


WRONG: dict[str, tuple[Spoil, str]] = {
    "a count": (_count, "reference count"),
    "a victim": (_drop("victims"), "may be deleted"),
    "a count's row": (_drop("refs"), "not both"),
    "a digest": (_digest, "digest"),
    "a head": (_drop("heads"), "heads"),
    "a tail": (_drop("tails"), "tails"),
    "figures": (_figures, "stats say"),
    "unreadable figures": (_unreadable, "cannot be read"),
    "a volume's figures": (_drop("volumes"), "volume"),
    "a cookie": (_drop("cookies"), "listing"),
    "a use": (_drop("uses"), "eviction"),
    "rows of nobody": (_stranger, "do not exist"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_follows_from_the_files_is_rebuilt(
    place: Path, template: tuple[Path, dict[str, bytes]], what: str
) -> None:
    spoil, expected = WRONG[what]
    index = Index(place / "index", 64 * MIB)
    with index.env.begin(write=True) as txn:
        spoil(index, txn)
    index.close()
    assert expected in texts(check(place))
    assert mend(place)
    store = Store.open(place)
    assert read_all(store, template[1]) == {"whole": len(template[1])}
    store.close()


@pytest.mark.parametrize("table", SEALED)
def test_a_row_that_breaks_its_seal_is_an_error(
    place: Path, template: tuple[Path, dict[str, bytes]], table: str
) -> None:
    """Never other bytes, another size or another file; repair keeps all that it does not concern."""
    index = Index(place / "index", 64 * MIB)
    with index.env.begin(write=True) as txn:
        cursor = txn.cursor(index.dbs[table])
        assert cursor.last()
        key, value = bytes(cursor.key()), bytearray(cursor.value())
        value[3] ^= 1
        txn.put(key, bytes(value), db=index.dbs[table])
    index.close()
    assert not check(place).sound
    mend(place)
    store = Store.open(place)
    assert read_all(store, template[1])["whole"] >= len(template[1]) - 1
    store.close()


def test_a_file_that_lost_a_block_goes_and_its_neighbours_stay(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", SMALL)
    shared, own = Chunk(noise(50_000, 1)), Chunk(noise(50_000, 2))
    for name, pieces in ((b"x", [shared, own]), (b"x.meta", [Chunk(noise(99, 3))]), (b"y", [shared])):
        add(store, name, pieces)
    store.commit()
    ids = store.tree.recipe(store.resolve("x")[2]).blocks()[0].tolist()
    volume = store.volumes.by_number[1]
    with volume.env.begin(write=True, db=volume.db) as txn:
        txn.delete(int_key(ids[1]))
    store.close()
    report = check(tmp_path / "s")
    assert "'x'" in texts(report)
    assert "'y'" not in texts(report)
    assert any("removed 'x'" in line for line in mend(tmp_path / "s"))
    store = Store.open(tmp_path / "s")
    assert {path for path, _ in store.tree.walk()} == {b"x.meta", b"y"}
    assert content(store, store.resolve("y")[2]) == shared.data
    store.close()


def test_payloads_of_nobody_are_deleted(place: Path) -> None:
    store = Store.open(place)
    store.volumes.by_number[1].put([(10**6, noise(9000))])
    store.volumes.by_number[1].used, store.volumes.by_number[1].blocks = 0, 0
    store.close()
    assert "without a block" in texts(check(place))
    mend(place)


def _empty(path: Path) -> None:
    (path / "data.mdb").touch()


def _zeros(path: Path) -> None:
    (path / "data.mdb").write_bytes(bytes(8192))


def _no_tables(path: Path) -> None:
    lmdb.open(str(path), map_size=MIB).close()


@pytest.mark.parametrize("make", [_empty, _zeros, _no_tables])
def test_a_volume_that_was_being_made_is_no_hindrance(
    place: Path, template: tuple[Path, dict[str, bytes]], make: Callable[[Path], None]
) -> None:
    """A crash left it before the index knew it; a power cut may leave anything there."""
    (place / "volumes/0009").mkdir()
    make(place / "volumes/0009")
    assert mend(place) == ["removed volume 9, which holds nothing"]
    store = Store.open(place)
    assert read_all(store, template[1]) == {"whole": len(template[1])}
    store.close()


@pytest.mark.parametrize("empty", [False, True])
def test_a_store_that_was_being_made(tmp_path: Path, empty: bool) -> None:
    """There is nothing to repair: a mount goes on where the crash came."""
    place = tmp_path / "store"
    Store.open(place, SMALL).close()
    shutil.rmtree(place / "index")
    if empty:
        (place / "index").mkdir()
        (place / "index/data.mdb").touch()
    assert check(place).notes == [
        "left unfinished by a crash while it was made; the next mount makes it anew"
    ]
    assert mend(place) == []
    Store.open(place).close()


def test_what_is_no_volume_is_left_alone(place: Path) -> None:
    """A copy that somebody put beside them."""
    (place / "volumes/0001.old").mkdir()
    assert mend(place) == []
    assert (place / "volumes/0001.old").is_dir()


def test_victims_without_payloads(place: Path) -> None:
    """A kill in the middle of a purge leaves them, which the next purge ends."""
    store = Store.open(place)
    ids = store.tree.recipe(add(store, b"gone", noise(MIB))).blocks()[0].tolist()
    store.commit()
    remove(store, b"gone")
    store.commit()
    with failing(store, "_meta", lmdb.Error("killed")), pytest.raises(StoreFailed):
        store.writer.purge(4 * MIB)
    holder = (place / "lock").read_bytes()
    reports = []

    def look(place: Path) -> None:
        (place / "lock").write_bytes(holder)
        reports.append(check(place, deep=True))

    store = crash(store, place, look)
    assert [texts(report) for report in reports] == [""]
    with store.index.env.begin(db=store.index.dbs["blocks"]) as txn:
        assert all(txn.get(int_key(block)) for block in ids), "the crash came too late"
    for _ in range(2):
        store.close()
        assert texts(check(place, deep=True)) == ""
        store = Store.open(place)
        store.writer.purge(4 * MIB)
    store.close()


def test_damaged_victims_are_dropped(place: Path) -> None:
    index = Index(place / "index", None)
    with index.snapshot() as txn:
        victim = int_of(_first(index, txn, "victims")[1])
        row = BlockRow.unpack(txn.get(int_key(victim), db=index.dbs["blocks"]))
        digest = row.digest
    index.close()
    store = Store.open(place)
    volume = store.volumes.by_number[row.volume]
    with volume.env.begin(write=True, db=volume.db) as txn:
        txn.put(int_key(victim), bytes(row.stored))
    store.close()
    assert "unlike the digest" in texts(check(place, deep=True))
    assert check(place).sound
    assert "dropped 1 damaged block" in mend(place)
    index = Index(place / "index", None)
    assert index.committed("digests", digest) is None
    index.close()


def test_a_store_of_the_format_before_is_brought_up(tmp_path: Path) -> None:
    """Rows without seals and no table of damage, as version 1 has written them."""
    store = Store.open(tmp_path / "s", SMALL)
    add(store, b"a", noise(300_000))
    store.commit()
    index = store.index
    with index.env.begin(write=True) as txn:
        for table in SEALED:
            for key, value in list(txn.cursor(index.dbs[table])):
                txn.put(bytes(key), bytes(value[:-8]), db=index.dbs[table])
        txn.drop(index.dbs["damaged"])
    store.volumes.close()
    index.close()
    store._lock.release()
    mark = tmp_path / "s" / "format"
    mark.write_text(json.dumps(json.loads(mark.read_text()) | {"cachefs": 1}))
    assert check(tmp_path / "s", deep=True).sound
    store = Store.open(tmp_path / "s")
    assert content(store, store.resolve("a")[2]) == noise(300_000)
    assert store.index.sealed
    store.close()
    assert json.loads(mark.read_text())["cachefs"] == 2
    assert check(tmp_path / "s", deep=True).sound


def test_a_store_in_use_cannot_be_repaired_but_checked(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", SMALL)
    add(store, b"a", noise(300_000))
    store.commit()
    add(store, b"b", noise(300_000, 2))
    store.writer.write_out()
    with pytest.raises(StoreRefused, match="in use by process"):
        repair(tmp_path / "s", deep=False, progress=quiet)
    remove(store, b"a")
    store.commit()
    store.close()
    assert check(tmp_path / "s", deep=True).sound


def test_pages_of_a_store_are_followed_to_the_last(place: Path) -> None:
    """Whatever LMDB makes of long values, lists of values and free pages is known."""
    assert [fault for each in (place / "index", *place.glob("volumes/*")) for fault in faults(each)] == []


def test_pages_of_long_lists_are_followed(tmp_path: Path) -> None:
    """Rows that begin so many blocks that their ids fill a tree of their own."""
    index = Index(tmp_path, 64 * MIB)
    for turn in range(3):
        with index.env.begin(write=True) as txn:
            for key in (5, 6, 7, 900):
                for block in range(turn * 900, turn * 900 + (3 if key == 7 else 900)):
                    txn.put(int_key(key), int_key(block), db=index.dbs["heads"])
    with index.env.begin(write=True) as txn:
        for block in range(0, 900, 2):
            txn.delete(int_key(5), int_key(block), db=index.dbs["heads"])
    index.close()
    assert faults(tmp_path) == []


def spoil_rows(store: Store, table: str, ino: int) -> None:
    index = store.index
    with index.env.begin(write=True) as txn:
        for key, value in list(txn.cursor(index.dbs[table])):
            if bytes(key)[:8] == be(ino):
                txn.put(bytes(key), bytes([value[0] ^ 1]) + bytes(value[1:]), db=index.dbs[table])


def committed(store: Store, name: bytes) -> int:
    ino = add(store, name, noise(100_000))
    store.commit()
    return ino


def test_a_file_whose_recipe_is_damaged_can_be_removed_and_replaced(store: Store) -> None:
    for name in (b"gone", b"anew"):
        spoil_rows(store, "recipes", committed(store, name))
        with pytest.raises(OSError, match="damaged"):
            content(store, store.resolve(name.decode())[2])
    remove(store, b"gone")
    fill(store, store.resolve("anew")[2], [Chunk(noise(5000))])
    store.commit()
    assert content(store, store.resolve("anew")[2]) == noise(5000)
    assert store.tree.lookup(ROOT, b"gone") is None


def test_eviction_passes_over_a_damaged_inode(store: Store) -> None:
    spoil_rows(store, "inodes", committed(store, b"a"))
    committed(store, b"b")
    assert [[member.name for member in unit] for unit in store.evict(1)] == [[b"b"]]
