"""The mark of a store that was closed in order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cachefs.states.pieces import Rows
from cachefs.store import Store, StoreRefused, clean, pages

from .breaking import crash
from .filling import add, content, noise


def fill(path: Path) -> None:
    store = Store.open(path, 64 << 20)
    add(store, b"a", [Rows(noise(60_000), 100)])
    store.commit()
    store.close()


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 4]))


def test_pages_are_not_walked_after_an_orderly_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "s")
    walked = clean.last_walk(tmp_path / "s")
    assert walked
    with monkeypatch.context() as patch:
        patch.setattr(pages, "require_sound", lambda store: pytest.fail("walked"))
        store = Store.open(tmp_path / "s")
    assert clean.last_walk(tmp_path / "s") == 0
    assert content(store, 2) == noise(60_000)
    store.close()
    assert clean.last_walk(tmp_path / "s") == walked, "that was not looked at again"


def test_pages_are_walked_after_a_crash(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    store = crash(Store.open(tmp_path / "s"), tmp_path / "s")
    assert clean.last_walk(tmp_path / "s") == 0
    store.close()
    assert clean.last_walk(tmp_path / "s")


def test_what_was_changed_since_is_walked(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    flip(tmp_path / "s" / "index" / "data.mdb", 16)
    assert clean.last_walk(tmp_path / "s") == 0
    with pytest.raises(StoreRefused, match="damaged"):
        Store.open(tmp_path / "s")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"walked": "x"}', None])
def test_an_old_or_strange_mark_counts_for_nothing(tmp_path: Path, text: str | None) -> None:
    fill(tmp_path / "s")
    path = tmp_path / "s" / "clean"
    mark = json.loads(path.read_text())
    mark["walked"] -= 8 * 86400
    path.write_text(json.dumps(mark) if text is None else text)
    assert clean.last_walk(tmp_path / "s") == 0
    Store.open(tmp_path / "s").close()
    assert clean.last_walk(tmp_path / "s")


def test_no_mark_after_a_failure_or_damage(tmp_path: Path) -> None:
    fill(tmp_path / "s")
    store = Store.open(tmp_path / "s")
    store.writer._refused(OSError(5, "Input/output error"))
    store.writer.probe()
    store.close()
    assert clean.last_walk(tmp_path / "s") == 0
    store = Store.open(tmp_path / "s")
    store.blocks.note_damage(1)
    store.close()
    assert clean.last_walk(tmp_path / "s") == 0
