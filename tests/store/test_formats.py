"""Stores that older versions wrote open, give every byte back, and take new files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from cachefs.store import Store
from cachefs.store.layout import FORMAT

from ..crash.sound import complaints
from ..data.stores import make
from ..running import Mounted, run_cachefs

PACKS = sorted(path.name for path in make.HERE.glob("format-*.tar.zst"))


def check(m: Mounted, expected: dict[str, dict[str, object]]) -> None:
    found = {str(path.relative_to(m.path)) for path in m.path.rglob("*") if path.is_file()}
    assert found == set(expected)
    for name, about in expected.items():
        path = m.path / name
        assert hashlib.sha256(path.read_bytes()).hexdigest() == about["sha256"], name
        xattrs = {key: os.getxattr(path, key).decode() for key in os.listxattr(path)}
        assert xattrs.pop("user.cachefs.pin", "") == ("1" if name == "pinned.bin" else "")
        assert xattrs == about["xattrs"]


def test_there_is_a_store_of_each_format() -> None:
    assert sorted(f"format-{number}.tar.zst" for number in range(1, FORMAT + 1)) == PACKS
    assert all((make.HERE / name).stat().st_size < 100_000 for name in PACKS)


@pytest.mark.parametrize("pack", PACKS)
def test_a_store_of_an_older_version(mount: Callable[..., Mounted], tmp_path: Path, pack: str) -> None:
    """Promise P18."""
    expected = make.unpack(pack, tmp_path)
    store = tmp_path / "store"
    listed = json.loads(run_cachefs("ls", "--json", store).stdout)  # before anything was upgraded
    assert {entry["name"] for entry in listed["entries"]} == set(expected)
    m = mount(store=store)
    check(m, expected)
    before = m.stats()
    # What is there is found again, and what is new goes in beside it.
    data = make.contents()["chat-a.bin"]
    (m.path / "again").write_bytes(data)
    (m.path / "new").write_bytes(os.urandom(100_000))
    os.unlink(m.path / "noise")
    m.remount()
    assert m.stats()["new_block_bytes"] - before["new_block_bytes"] < 100_000 + len(data) // 2
    for name in ("again", "new"):
        expected[name] = {"sha256": hashlib.sha256((m.path / name).read_bytes()).hexdigest(), "xattrs": {}}
    del expected["noise"]
    check(m, expected)
    m.umount()
    assert complaints(store) == []


def test_a_table_that_a_store_does_not_have_yet(tmp_path: Path) -> None:
    """One that a later version adds: it is empty, and made when an older store is mounted."""
    table = "about"
    make.unpack(PACKS[-1], tmp_path)
    store = tmp_path / "store"
    with (
        lmdb.open(str(store / "index"), max_dbs=64, map_size=16 << 20) as env,
        env.begin(write=True) as txn,
    ):
        txn.drop(env.open_db(table.encode(), txn, create=False))
    for name in ("stats", "ls"):
        done = run_cachefs(name, "--json", store)
        assert (done.returncode, done.stderr) == (0, "")
    Store.open(store).close()
    with lmdb.open(str(store / "index"), max_dbs=64, readonly=True) as env:
        assert env.open_db(table.encode(), create=False)


def test_a_store_of_a_newer_version(tmp_path: Path) -> None:
    """Promise P18. Refused by every command with what to do, and left as it is."""
    make.unpack(PACKS[-1], tmp_path)
    mark = tmp_path / "store" / "format"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "cachefs": FORMAT + 1}))
    (tmp_path / "mnt").mkdir()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")}
    for arguments in (("mount", tmp_path / "store", tmp_path / "mnt"), ("stats", tmp_path / "store"),
                      ("ls", tmp_path / "store"), ("rm", "--all", "--yes", tmp_path / "store")):  # fmt: skip
        done = run_cachefs(*arguments)
        assert done.returncode == 1
        assert f"written by a newer cachefs (format {FORMAT + 1}" in done.stderr
        assert "upgrade cachefs" in done.stderr
        assert done.stderr.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")} == before
