"""Looking into a store from another process, beside its daemon or without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cachefs.states.pieces import Chunk, Rows
from cachefs.store import Store, StoreRefused
from cachefs.store.reader import Reader
from cachefs.store.tree import PIN

from .filling import SMALL, add, noise, remove

_LOOK = """
import json, pathlib, sys
from cachefs.store.reader import Reader
reader = Reader(pathlib.Path(sys.argv[1]))
entries = [[e.name, e.size, e.exclusive, e.shared, e.pinned, e.tokens, e.type] for e in reader.entries()]
print(json.dumps([reader.stats(), sorted(entries)]))
reader.close()
"""


def look(path: Path) -> tuple[dict[str, Any], list[list[Any]]]:
    """Figures and entries as another process sees them; LMDB opens nothing twice in one."""
    found = subprocess.check_output([sys.executable, "-c", _LOOK, str(path)], text=True)
    stats, entries = json.loads(found)
    return stats, entries


def test_a_reader_sees_what_is_committed(store: Store) -> None:
    first = add(store, b"a", [Chunk(noise(100_000)), Rows(noise(8192, 1), 1024)])
    store.tree.set_xattr(first, PIN, b"1")
    store.index.put(
        "about", first.to_bytes(8, "big"), json.dumps({"tokens": 7, "types": ["f16", "q8_0"]}).encode()
    )
    add(store, b"b", [Rows(noise(8192, 1)[:4096], 1024), Chunk(noise(1000, 2)), Chunk(b"short")])
    store.commit()
    remove(store, b"b")
    stats, entries = look(store.path)
    assert entries == [
        ["a", 108_192, 100_000, 8192, True, 7, "f16, q8_0"],
        ["b", 4096 + 1005, 1005, 4096, False, None, None],
    ]
    assert stats["entries"] == 2
    assert stats["logical_bytes"] == 108_192 + 5101
    assert stats["stored_bytes"] == 109_192
    assert stats["dedup_ratio"] == pytest.approx(113_293 / 109_192, abs=1e-3)
    assert stats["max_bytes"] == store.max_bytes
    assert 0 < stats["disk_bytes"] <= store.max_bytes
    store.commit()
    stats, entries = look(store.path)
    assert [entry[:4] for entry in entries] == [["a", 108_192, 108_192, 0]]
    assert stats["victim_bytes"] > 0


def test_a_reader_of_a_closed_store(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store", SMALL)
    add(store, b"a", noise(5000))
    store.close()
    reader = Reader(tmp_path / "store")
    try:
        (entry,) = reader.entries()
        assert (entry.name, entry.size, entry.exclusive) == ("a", 5000, 5000)
        assert reader.stats()["entries"] == 1
    finally:
        reader.close()


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StoreRefused, match="no such store"):
        Reader(tmp_path / "missing")
    with pytest.raises(StoreRefused, match="not a cachefs store"):
        Reader(tmp_path)


def test_an_empty_store(store: Store) -> None:
    stats, entries = look(store.path)
    assert entries == []
    assert stats["dedup_ratio"] == stats["compression_ratio"] == 1.0
