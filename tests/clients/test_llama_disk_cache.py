"""llama-cpp-python's LlamaDiskCache: SQLite and its files on the mount."""

from __future__ import annotations

import sqlite3
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from .fixture import MountFactory, names
from .llama_disk_cache import DiskCache
from .payload import chat, noise
from .processes import child, expect


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_values_are_stored_popped_and_found_again(mount: MountFactory, journal: str) -> None:
    """The llama state lies inside a pickle, after the logits, at an offset of its own."""
    m = mount()
    values = {f"key{n}": noise(("logits", n), 50_001 + n) + chat("a", n).blob() for n in range(3)}
    cache = DiskCache(m.path / "cache", journal)
    assert cache.granted == journal
    for key, value in values.items():
        cache[key] = value
    assert cache.pop("key1") == values["key1"]
    cache.close()
    m.remount()
    assert not {"cache.db-wal", "cache.db-shm", "cache.db-journal"} & names(m.path / "cache")
    cache = DiskCache(m.path / "cache", journal)
    assert cache.keys() == ["key0", "key2"]
    assert [cache.pop(key) for key in ("key2", "key0")] == [values["key2"], values["key0"]]
    assert cache.db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert {name for name in names(m.path / "cache") if not name.startswith("cache.db")} == set()
    cache.close()


def insert_many(pipe: Connection, path: Path, who: str) -> None:
    db = sqlite3.connect(path, timeout=60, isolation_level=None)
    for number in range(50):
        db.execute("INSERT INTO Cache (key, size) VALUES (?, ?)", (f"{who}{number}", number))
    db.close()
    pipe.send("done")


@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_processes_share_the_index(mount: MountFactory, journal: str) -> None:
    """Byte-range locks, and in WAL mode an index that all of them map shared."""
    m = mount()
    cache = DiskCache(m.path / "cache", journal)
    cache.close()
    path = m.path / "cache" / "cache.db"
    with (
        child(insert_many, path, "a", stay=True) as (_, one),
        child(insert_many, path, "b", stay=True) as (_, two),
    ):
        assert (expect(one), expect(two)) == ("done", "done")
    cache = DiskCache(m.path / "cache", journal)
    assert len(cache.keys()) == 100
    assert cache.db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    cache.close()


def test_committed_rows_survive_the_daemon(mount: MountFactory) -> None:
    m = mount()
    cache = DiskCache(m.path / "cache", "delete")
    # EXTRA: only then does SQLite sync the directory after it has unlinked the journal.
    cache.db.execute("PRAGMA synchronous = 3")
    for number in range(5):
        cache.db.execute("INSERT INTO Cache (key, size) VALUES (?, ?)", (f"k{number}", number))
    cache.close()
    m.kill()
    m.remount()
    cache = DiskCache(m.path / "cache", "delete")
    assert cache.keys() == [f"k{number}" for number in range(5)]
    cache.close()
