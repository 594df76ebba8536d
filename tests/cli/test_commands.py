"""stats, ls, pin, unpin and rm: on a mount, beside it, and without one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from cachefs.errors import UserError
from cachefs.mount import mountpoint as places
from cachefs.mount.mountpoint import Mount
from cachefs.store.reader import Reader

from ..running import Mounted, command, environment, run_cachefs

STATS = """
    version mountpoint store max_bytes disk_bytes logical_bytes stored_bytes compressed_bytes victim_bytes
    dedup_ratio compression_ratio entries blocks row_bytes evicted_entries evicted_bytes corrupt_blocks
    torn_saves written_bytes new_block_bytes read_bytes
""".split()  # noqa: SIM905


@pytest.fixture
def filled(mount: Callable[..., Mounted]) -> Mounted:
    m = mount("--max-size", "64M")
    (m.path / "sub").mkdir()
    (m.path / "a.bin").write_bytes(os.urandom(300_000))
    (m.path / "sub" / "b [red].bin").write_bytes(os.urandom(100_000))
    return m


def ls(path: Path, *options: str) -> list[dict[str, object]]:
    done = run_cachefs("ls", "--json", *options, path)
    assert done.returncode == 0, done.stderr
    entries: list[dict[str, object]] = json.loads(done.stdout)["entries"]
    return entries


def test_stats_of_the_mount_and_of_the_store_are_current(filled: Mounted) -> None:
    for path in (filled.path, filled.store, filled.path / "sub"):
        done = run_cachefs("stats", "--json", path)
        assert done.returncode == 0, done.stderr
        figures = json.loads(done.stdout)
        assert set(STATS) <= set(figures)
        assert figures["mountpoint"] == str(filled.path)
        assert figures["store"] == str(filled.store)
        assert figures["entries"] == 2
        assert figures["logical_bytes"] == 400_000
    filled.umount()
    figures = filled.stats()
    assert figures["mountpoint"] is None
    assert figures["entries"] == 2


def test_stats_for_people(filled: Mounted) -> None:
    lines = dict(line.split("  ", 1) for line in run_cachefs("stats", filled.path).stdout.splitlines())
    assert lines["mountpoint"].strip() == str(filled.path)
    assert "of at most 64 MiB" in lines["on disk"]
    assert lines["entries"].strip() == "2, 391 KiB to their readers"
    filled.umount()
    assert "not mounted" in run_cachefs("stats", filled.store).stdout


def test_ls(filled: Mounted) -> None:
    names = [entry["name"] for entry in ls(filled.path)]
    assert names == ["a.bin", "sub/b [red].bin"]
    entry = ls(filled.path)[0]
    assert set(entry) == {
        *("name", "tokens", "cells", "layers", "type", "size", "exclusive", "shared", "last_use_ns", "pinned")
    }
    assert entry["size"] == 300_000
    assert entry["tokens"] is None
    assert [entry["name"] for entry in ls(filled.path / "sub")] == ["sub/b [red].bin"]
    assert [entry["name"] for entry in ls(filled.path, "--sort", "size")] == names
    filled.umount()
    assert [entry["name"] for entry in ls(filled.store)] == names


def test_ls_beside_a_client_that_removes_and_replaces(mount: Callable[..., Mounted]) -> None:
    """A file that goes meanwhile is no damage; of one that was replaced the new is listed."""
    m = mount("--max-size", "64M")
    for name in "abcd":
        (m.path / name).write_bytes(name.encode() * 300_000)
    run_cachefs("stats", m.path)
    with closing(Reader(m.store)) as reader:
        entries = reader.entries()
        assert next(entries).name == "a"
        (m.path / "b").unlink()
        (m.path / "new").write_bytes(b"c" * 200_000)
        (m.path / "new").rename(m.path / "c")
        assert m.stats()["entries"] == 3
        assert [(entry.name, entry.size) for entry in entries] == [("c", 200_000), ("d", 300_000)]
        assert reader.unreadable == []


def test_ls_for_people_is_never_cut_in_a_pipe(filled: Mounted) -> None:
    name = "x" * 250
    (filled.path / name).write_bytes(b"1")
    header, first, second, third = run_cachefs("ls", filled.path).stdout.splitlines()
    titles = "name tokens cells layers type size only here shared used pinned"
    assert " ".join(header.split()) == titles
    assert first.startswith("a.bin ")
    assert "sub/b [red].bin " in second
    assert third.startswith(name + " ")
    assert len({line.find("s ago") for line in (first, second, third)}) == 1


def test_an_empty_store_lists_nothing(mount: Callable[..., Mounted]) -> None:
    m = mount("--max-size", "64M")
    assert run_cachefs("ls", m.path).stdout == f"{m.path} holds no entries\n"
    assert ls(m.path) == []


@pytest.mark.parametrize("mounted", [True, False])
def test_pin_and_unpin(filled: Mounted, mounted: bool) -> None:
    base = filled.path
    if not mounted:
        filled.umount()
        base = filled.store
    files = [base / "a.bin", base / "sub" / "b [red].bin"]
    for name, pinned in (("pin", True), ("pin", True), ("unpin", False), ("unpin", False)):
        done = run_cachefs(name, *files)
        assert (done.returncode, done.stderr) == (0, "")
        assert [entry["pinned"] for entry in ls(base)] == [pinned, pinned]


def test_pins_by_store_path_reach_the_mount(filled: Mounted) -> None:
    assert run_cachefs("pin", filled.store / "a.bin").returncode == 0
    assert os.getxattr(filled.path / "a.bin", "user.cachefs.pin")


@pytest.mark.parametrize("mounted", [True, False])
def test_rm(filled: Mounted, mounted: bool) -> None:
    base = filled.path
    if not mounted:
        filled.umount()
        base = filled.store
    done = run_cachefs("rm", base / "missing", base / "a.bin", base / "sub")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 2
    assert [entry["name"] for entry in ls(base)] == ["sub/b [red].bin"]
    if not mounted:
        filled.mount()
    assert os.listdir(filled.path) == ["sub"]


@pytest.mark.parametrize("mounted", [True, False])
def test_rm_all(filled: Mounted, mounted: bool) -> None:
    base = filled.path
    if not mounted:
        filled.umount()
        base = filled.store
    done = run_cachefs("rm", "--all", base, stdin=None)
    assert done.returncode == 2
    assert "without a terminal add --yes" in done.stderr
    assert len(ls(base)) == 2
    assert run_cachefs("rm", "--all", "--yes", base / "sub").returncode == 0
    assert [entry["name"] for entry in ls(base)] == ["a.bin"]
    assert run_cachefs("rm", "--all", "--yes", base).returncode == 0
    assert ls(base) == []


def test_rm_all_asks_on_a_terminal(filled: Mounted) -> None:
    import pty
    import subprocess

    for answer, left in ((b"n\n", 2), (b"y\n", 0)):
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            command("rm", "--all", filled.path), stdin=theirs, stderr=subprocess.PIPE, env=environment()
        ) as asking:
            os.write(ours, answer)
            _, question = asking.communicate(timeout=60)
        os.close(ours)
        os.close(theirs)
        assert b"Remove 2 files (391 KiB) from " in question
        assert len(ls(filled.path)) == left
        assert asking.returncode == (130 if left else 0)


# --- without PATH


def found(monkeypatch: pytest.MonkeyPatch, *mounts: Mount) -> None:
    monkeypatch.setattr(places, "mounts", lambda: list(mounts))


def test_without_path_the_only_mount_is_meant(filled: Mounted, monkeypatch: pytest.MonkeyPatch) -> None:
    from cachefs.cli.target import find

    (own,) = (mount for mount in places.mounts() if mount.path == filled.path)
    other = Mount("0:99", Path("/elsewhere"), "fuse.cachefs", "/store", "rw,user_id=12345")
    found(monkeypatch, own, other)
    assert find(None).store == filled.store
    second = Mount("0:98", Path("/more"), "fuse.cachefs", "/store2", f"rw,user_id={os.getuid()}")
    found(monkeypatch, own, second)
    with pytest.raises(UserError, match=f"say which: {filled.path}, /more"):
        find(None)
    found(monkeypatch, other)
    with pytest.raises(UserError, match="you have no cachefs mount"):
        find(None)
