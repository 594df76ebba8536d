"""A lowered maximum: the newest contents survive in less room, pinned ones always, or nothing changes."""

from __future__ import annotations

import json
from pathlib import Path

import lmdb
import pytest

from cachefs.sizes import MIB
from cachefs.store import Store, StoreRefused, home, shrink
from cachefs.store.shrink import compact_index
from cachefs.store.tree import PIN

from .conftest import Opener
from .filling import SMALL, add, content, names, noise, remove
from .recount import assert_exact, assert_nothing_leaks

PIECE = 4 * MIB


def fill(store: Store, count: int, start: int = 0) -> dict[bytes, bytes]:
    """Files of noise, each used after the one before."""
    made = {}
    for number in range(start, start + count):
        name, data = b"f%03d" % number, noise(PIECE + 1000 * number, number)
        add(store, name, data)
        made[name] = data
        if number % 4 == 3:
            store.commit()
    store.commit()
    return made


def check(store: Store, path: Path, made: dict[bytes, bytes]) -> set[bytes]:
    """What is left is as it was, and fits; the names."""
    left = names(store)
    for name in left:
        assert content(store, store.tree.require(1, name).ino) == made[name], name
    assert_exact(store)
    assert_nothing_leaks(store)
    assert home.disk_bytes(path) <= store.max_bytes
    assert sum(v.map_bytes for v in store.volumes.by_number.values()) <= store.budget.data
    return left


def test_down_in_two_steps(tmp_path: Path, opened: Opener) -> None:
    """What survives is the most recently used, and a good part of what fits."""
    store = opened(300 * MIB)
    made = fill(store, 50)
    store.tree.set_xattr(store.tree.require(1, b"f000").ino, PIN, b"1")
    for bound, least in ((100 * MIB, 50 * MIB), (SMALL, 22 * MIB)):
        store = opened(bound)
        left = check(store, tmp_path / "store", made)
        assert b"f000" in left, "pinned"
        unpinned = sorted(left - {b"f000"})
        assert unpinned == sorted(made)[len(made) - len(unpinned) :], "the last used"
        assert sum(len(made[name]) for name in left) >= least
        assert store.shrunk > 0
        assert store.counters()["evicted_entries"] == len(made) - len(left)
        assert opened().max_bytes == bound
    store = opened()
    assert store.shrunk == 0
    made |= fill(store, 1, 90)
    check(store, tmp_path / "store", made)


def test_down_and_up_again(tmp_path: Path, opened: Opener) -> None:
    """The room comes back, and is used."""
    made = fill(opened(200 * MIB), 30)
    opened(SMALL)
    store = opened(200 * MIB)
    kept = names(store)
    made |= fill(store, 10, 50)
    assert check(store, tmp_path / "store", made) >= kept | {b"f%03d" % n for n in range(50, 60)}


def test_victims_go_before_files(tmp_path: Path, opened: Opener) -> None:
    store = opened(200 * MIB)
    made = fill(store, 30)
    for name in sorted(made)[5:]:
        remove(store, name)
    store.commit()
    store = opened(SMALL)
    assert check(store, tmp_path / "store", made) == set(sorted(made)[:5])
    assert store.shrunk == 0


def test_too_much_is_pinned(tmp_path: Path, opened: Opener) -> None:
    """Refused with what to do; every file is still there, and so is the old maximum."""
    store = opened(200 * MIB)
    made = fill(store, 25)
    for name in sorted(made)[:20]:
        store.tree.set_xattr(store.tree.require(1, name).ino, PIN, b"1")
    with pytest.raises(StoreRefused, match=r"pinned.*unpin.*--max-size"):
        opened(SMALL)
    store = opened()
    assert store.max_bytes == 200 * MIB
    assert check(store, tmp_path / "store", made) == set(made)


def test_a_crash_while_moving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the move stops, the next start goes on with it."""
    store = Store.open(tmp_path / "store", 200 * MIB)
    made = fill(store, 25)
    store.close()
    moved = shrink._put
    calls = 0

    def stop(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        result = moved(*arguments)  # type: ignore[arg-type]
        if calls == 2:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patch:
        patch.setattr(shrink, "_put", stop)
        with pytest.raises(KeyboardInterrupt):
            Store.open(tmp_path / "store", SMALL)
    store = Store.open(tmp_path / "store", SMALL)
    try:
        assert check(store, tmp_path / "store", made)
    finally:
        store.close()


def _fill_index(path: Path, map_bytes: int) -> None:
    with lmdb.open(str(path), map_size=map_bytes, max_dbs=4) as env:
        db = env.open_db(b"x")
        for start in range(0, 20_000, 1000):
            with env.begin(write=True, db=db) as txn:
                for number in range(start, start + 1000):
                    txn.put(b"%08d" % number, bytes(900))
        with env.begin(write=True, db=db) as txn:
            for number in range(1000, 20_000):
                txn.delete(b"%08d" % number)


@pytest.mark.parametrize("left_over", [False, True])
def test_an_index_that_is_too_large_is_rewritten(tmp_path: Path, left_over: bool) -> None:
    """Also where a crash left half of an earlier rewriting."""
    _fill_index(tmp_path, 64 * MIB)
    assert (tmp_path / "data.mdb").stat().st_size > 16 * MIB
    if left_over:
        (tmp_path / "compact").mkdir()
        (tmp_path / "compact" / "data.mdb").write_bytes(b"half")
    compact_index(tmp_path, 16 * MIB)
    assert (tmp_path / "data.mdb").stat().st_size < 16 * MIB
    assert not (tmp_path / "compact").exists()
    with lmdb.open(str(tmp_path), max_dbs=4) as env, env.begin(db=env.open_db(b"x")) as txn:
        assert txn.stat(env.open_db(b"x", txn))["entries"] == 1000


def test_the_format_stays(opened: Opener, tmp_path: Path) -> None:
    fill(opened(100 * MIB), 3)
    before = json.loads((tmp_path / "store" / "format").read_text())
    opened(SMALL)
    assert json.loads((tmp_path / "store" / "format").read_text()) == before
