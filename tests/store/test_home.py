"""A store's directory: recognised, refused with a sentence, locked."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cachefs.errors import UserError
from cachefs.store import Store, StoreRefused, home
from cachefs.store.layout import FORMAT

from .filling import SMALL, add, content, noise


def tree_of(path: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else None for p in path.rglob("*")}


def refused(path: Path, *words: str) -> str:
    """Opening fails in one sentence that has these words in it, and changes nothing."""
    before = tree_of(path.parent)
    with pytest.raises(StoreRefused) as caught:
        Store.open(path, SMALL)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(path), *words):
        assert word in message
    assert tree_of(path.parent) == before
    return message


def test_a_new_store_is_private(tmp_path: Path) -> None:
    """Whatever the umask."""
    old = os.umask(0)
    try:
        store = Store.open(tmp_path / "s", SMALL)
        add(store, b"a", noise(100_000))
        store.close()
    finally:
        os.umask(old)
    for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert json.loads((tmp_path / "s" / "format").read_text())["cachefs"] == FORMAT


def test_an_empty_directory_becomes_a_store(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    Store.open(tmp_path / "s", SMALL).close()
    assert home.is_store(tmp_path / "s")


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    Store.open(tmp_path / "s", SMALL).close()
    (tmp_path / "s" / "format").write_text(json.dumps({"cachefs": FORMAT + 1}))
    refused(tmp_path / "s", f"format {FORMAT + 1}", f"up to {FORMAT}", "upgrade")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"cachefs": null}', "\x00\xff", "5"])
def test_a_damaged_mark_is_refused(tmp_path: Path, text: str) -> None:
    Store.open(tmp_path / "s", SMALL).close()
    (tmp_path / "s" / "format").write_bytes(text.encode("latin-1"))
    refused(tmp_path / "s")


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "full", "not a cachefs store")
    refused(tmp_path / "file", "not a directory")
    with pytest.raises(StoreRefused, match="no such directory"):
        Store.open(tmp_path / "missing" / "s", SMALL)
    with pytest.raises(StoreRefused, match="no such store"):
        home.check_format(tmp_path / "missing")


def test_another_users_store_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.open(tmp_path / "s", SMALL).close()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    refused(tmp_path / "s", "another user")


def test_the_lock_says_who_holds_it(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", SMALL, mountpoint="/mnt/states")
    try:
        refused(tmp_path / "s", str(os.getpid()), "/mnt/states", "unmount")
        assert home.read_holder(tmp_path / "s") == {"pid": os.getpid(), "mountpoint": "/mnt/states"}
    finally:
        store.close()
    assert home.read_holder(tmp_path / "s") == {}
    Store.open(tmp_path / "s").close()


def test_a_lock_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence for a read-only or a full disk, too."""
    Store.open(tmp_path / "s", SMALL).close()

    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        refused(tmp_path / "s", "the disk is full")
    (tmp_path / "s" / "lock").unlink()
    (tmp_path / "s" / "lock").mkdir()
    refused(tmp_path / "s", "cannot be locked", "directory")


@pytest.mark.parametrize("garbage", [b"", b"x", bytes(8192), b"\xff" * 100_000])
def test_an_index_that_is_none(tmp_path: Path, garbage: bytes) -> None:
    """A damaged index is refused in a sentence, and the lock let go; an empty file is a new one."""
    Store.open(tmp_path / "s", SMALL).close()
    (tmp_path / "s" / "index" / "data.mdb").write_bytes(garbage)
    for _ in range(2):
        if garbage:
            with pytest.raises(StoreRefused, match="cannot be opened") as caught:
                Store.open(tmp_path / "s", SMALL)
            assert "\n" not in str(caught.value)
        else:
            Store.open(tmp_path / "s", SMALL).close()


def test_a_dead_holder_does_not_count(tmp_path: Path) -> None:
    """The lock goes with its process, even when that was killed."""
    code = (
        "import os, pathlib, sys; from cachefs.store import Store;"
        "s = Store.open(pathlib.Path(sys.argv[1]), 64 << 20, mountpoint='/gone'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "s")]).returncode == -9
    assert home.read_holder(tmp_path / "s")["mountpoint"] == "/gone"
    Store.open(tmp_path / "s").close()


def test_a_store_that_cannot_be_opened_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock and the environments are free again after a refusal."""
    store = Store.open(tmp_path / "s", SMALL)
    ino = add(store, b"a", noise(100_000))
    store.close()

    def fail(self: Store) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_start", fail)
        with pytest.raises(StoreRefused, match="the disk is full"):
            Store.open(tmp_path / "s")
    store = Store.open(tmp_path / "s")
    try:
        assert content(store, ino) == noise(100_000)
    finally:
        store.close()


def test_the_maximum_is_remembered(tmp_path: Path) -> None:
    Store.open(tmp_path / "s", 2 * SMALL).close()
    store = Store.open(tmp_path / "s")
    assert store.max_bytes == 2 * SMALL
    store.close()


def test_disk_bytes_are_those_of_du(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", SMALL)
    add(store, b"a", noise(3_000_000))
    store.close()
    out = subprocess.run(["du", "-s", "-B1", tmp_path / "s"], capture_output=True, text=True, check=True)
    assert home.disk_bytes(tmp_path / "s") == int(out.stdout.split()[0])


def test_offline_commands(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", SMALL)
    try:
        folder = store.tree.create(1, b"d", stat.S_IFDIR | 0o700, 0, 0)[0]
        ino = add(store, b"a", noise(100), folder)
        store.pin("d/a", True)
        assert ino in store.tree.pinned
        store.pin("/d/a", False)
        store.pin("d/a", False)
        assert ino not in store.tree.pinned
        for name in ("", "x", "d/x", "d/a/x", "a"):
            with pytest.raises(UserError):
                store.remove(name)
        with pytest.raises(UserError, match="directory"):
            store.remove("d")
        store.remove("d/a")
        assert store.counters()["entries"] == 0
    finally:
        store.close()
