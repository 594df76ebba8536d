"""Which files go: whole units, the least recently used first, and never what must stay."""

from __future__ import annotations

import stat
import time

import pytest

from cachefs.store import Store
from cachefs.store.evict import is_lock, is_temporary
from cachefs.store.tree import PIN, ROOT

from .conftest import Opener
from .filling import add, content, make, names, noise
from .recount import assert_exact, assert_nothing_leaks

SIZE = 10_000
HOUR = 3600 * 10**9


def fill(store: Store, *every: bytes) -> dict[bytes, int]:
    """Files, each used after the one before."""
    made = {name: add(store, name, noise(SIZE, n)) for n, name in enumerate(every)}
    for ino in made.values():
        store.tree.touch(ino)
    return made


def evict_all(store: Store) -> list[list[bytes]]:
    """Units in the order they go."""
    order = []
    while units := store.evict(1):
        order += [[member.name for member in unit] for unit in units]
    return order


def test_the_least_recently_used_goes_first(store: Store) -> None:
    made = fill(store, b"a", b"b", b"c", b"d")
    store.tree.touch(made[b"b"])
    store.tree.set_use(made[b"a"], store.tree.get(made[b"b"]).last_use + 1)
    assert evict_all(store) == [[b"c"], [b"d"], [b"b"], [b"a"]]
    store.commit()
    assert_exact(store)


def test_order_survives_a_restart(opened: Opener, store: Store) -> None:
    made = fill(store, b"a", b"b", b"c")
    store.tree.touch(made[b"a"])
    store = opened()
    assert evict_all(store) == [[b"b"], [b"c"], [b"a"]]


@pytest.mark.parametrize(
    "unit",
    [
        [b"X.bin", b"X.bin.meta"],
        [b"NAME", b"NAME.checkpoints"],
        [b"s", b"s.bin", b"s.bin.meta", b"s.x"],
    ],
)
def test_a_unit_goes_whole(store: Store, unit: list[bytes]) -> None:
    """Promise P14. With its sidecars, whichever of them is the oldest, and without its neighbours."""
    fill(store, *reversed(unit), b"neighbour", unit[0] + b"2", unit[0] + b"-meta", b"t." + unit[0])
    order = evict_all(store)
    assert sorted(order[0]) == sorted(unit)
    assert all(len(each) == 1 for each in order[1:])
    assert names(store) == set()
    store.commit()
    assert_exact(store)


def test_the_latest_use_of_its_members_counts(store: Store) -> None:
    made = fill(store, b"X.bin", b"X.bin.meta", b"other")
    store.tree.touch(made[b"X.bin.meta"])
    assert evict_all(store) == [[b"other"], [b"X.bin", b"X.bin.meta"]]


def test_units_do_not_cross_directories(store: Store) -> None:
    folder = store.tree.create(ROOT, b"X.bin.d", stat.S_IFDIR | 0o700, 0, 0)[0]
    add(store, b"X.bin.meta", noise(SIZE), folder)
    add(store, b"X.bin", noise(SIZE))
    assert sorted(evict_all(store)) == [[b"X.bin"], [b"X.bin.meta"]]
    assert store.tree.lookup(ROOT, b"X.bin.d") is not None


@pytest.mark.parametrize("which", [b"X.bin", b"X.bin.meta"])
@pytest.mark.parametrize("why", ["open", "pinned"])
def test_open_and_pinned_units_stay_whole(store: Store, which: bytes, why: str) -> None:
    """Promise P14."""
    made = fill(store, b"X.bin", b"X.bin.meta", b"other")
    if why == "open":
        store.busy = {made[which]}.__contains__
    else:
        store.tree.set_xattr(made[which], PIN, b"1")
    assert evict_all(store) == [[b"other"]]
    assert names(store) == {b"X.bin", b"X.bin.meta"}


def test_pins_survive_a_restart(opened: Opener, store: Store) -> None:
    fill(store, b"a", b"b")
    store.pin("a", True)
    store = opened()
    assert evict_all(store) == [[b"b"]]
    store.pin("a", False)
    assert evict_all(store) == [[b"a"]]


def test_locks_and_saves_in_progress_stay(store: Store) -> None:
    """Promise P14."""
    made = fill(store, b".lock", b"x.lock", b"x.owner", b"s.tmp", b"s.tmp.123", b"s_tmp.bin", b"s")
    assert evict_all(store) == [[b"s"]]
    old = time.time_ns() - 2 * HOUR
    for name in (b"s.tmp", b"s.tmp.123", b".lock"):
        inode = store.tree.get(made[name])
        store.index.delete("uses", inode.last_use.to_bytes(8, "big") + made[name].to_bytes(8, "big"))
        store.index.put("uses", old.to_bytes(8, "big") + made[name].to_bytes(8, "big"), b"")
        store.tree.change(made[name], last_use=old)
    assert sorted(evict_all(store)) == [[b"s.tmp"], [b"s.tmp.123"]]


@pytest.mark.parametrize("name", [b"a.tmp", b"a.bin.tmp", b"a_tmp.bin", b"a.tmp.99", b"a.bin_tmp"])
def test_temporary_names(name: bytes) -> None:
    assert is_temporary(name)


@pytest.mark.parametrize("name", [b"tmp", b"a.tmpl", b"attempt.bin", b"a.template", b"a-tmp"])
def test_names_that_only_look_temporary(name: bytes) -> None:
    assert not is_temporary(name)


def test_lock_names() -> None:
    assert is_lock(b"x.lock")
    assert is_lock(b".owner")
    assert not is_lock(b"lock")
    assert not is_lock(b"x.lock.bin")


def test_as_much_goes_as_is_wanted(store: Store) -> None:
    fill(store, b"a", b"b", b"c", b"d")
    units = store.evict(SIZE + 1)
    assert [[member.name for member in unit] for unit in units] == [[b"a"], [b"b"]]
    counters = store.counters()
    assert counters["evicted_entries"] == 2
    assert counters["evicted_bytes"] == 2 * SIZE
    assert counters["entries"] == 2
    store.commit()
    assert_exact(store)
    assert_nothing_leaks(store)


def test_shared_blocks_stay_for_who_needs_them(store: Store) -> None:
    add(store, b"a", noise(SIZE))
    b = add(store, b"b", noise(SIZE))
    store.commit()
    store.evict(1)
    store.commit()
    store.writer.purge(1 << 30)
    assert content(store, b) == noise(SIZE)
    assert store.counters()["victim_bytes"] == 0


def test_nothing_to_evict(store: Store) -> None:
    assert store.evict(1000) == []
    made = fill(store, b"a")
    store.busy = set(made.values()).__contains__
    assert store.evict(1000) == []


def test_of_many_small_files_some_go_at_a_time(store: Store) -> None:
    """Who serves requests must not look through all of them in one go."""
    for number in range(700):
        add(store, b"%04d" % number, b"tiny")
    chosen = store.evictor.choose(1 << 30)
    assert [unit[0].name for unit in chosen] == [b"%04d" % number for number in range(256)]


def test_files_without_a_byte_free_room_in_the_index_only(store: Store) -> None:
    for number in range(700):
        make(store, b"%04d" % number)
    assert store.evictor.choose(1) == []
    assert len(store.evictor.choose(1, empty=True)) == 256
    add(store, b"data", noise(SIZE))
    assert store.evictor.choose(1)[-1][0].name == b"data"


def test_a_unit_of_thousands_of_files_is_looked_through_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each of them: that would be hundreds of millions of look-ups for 20,000."""
    for number in range(300):
        add(store, b"X.%04d" % number, b"tiny")
    add(store, b"X", b"tiny")
    calls, unit = [], store.evictor.unit
    monkeypatch.setattr(store.evictor, "unit", lambda *args: calls.append(args) or unit(*args))
    (chosen,) = store.evictor.choose(1)
    assert len(chosen) == 301
    assert len(calls) == 2


def test_pinned_units_are_not_looked_through_for_every_statfs(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [add(store, b"%03d" % number, noise(1_000, number)) for number in range(200)]
    for ino in made:
        store.tree.set_xattr(ino, PIN, b"1")
    assert store.unevictable_bytes() == 200_000
    calls, unit = [], store.evictor.unit
    monkeypatch.setattr(store.evictor, "unit", lambda *args: calls.append(args) or unit(*args))
    monkeypatch.setattr("cachefs.store.store._LOOK_EVERY", 60)
    store.tree.remove_xattr(made[0], PIN)
    for _ in range(100):
        assert store.unevictable_bytes() == 199_000
    assert len(calls) == 199
    store.tree.unlink(ROOT, b"001")
    assert store.unevictable_bytes() == 198_000
