"""``cachefs check`` as a user runs it: on a mount, on a store, with damage."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import re
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from cachefs.store.check import check
from cachefs.store.index import Index
from cachefs.store.pages import faults

from ..mounted.kernel import elsewhere, fails
from ..running import Mounted, run_cachefs

BOUND = ("--max-size", "100M")


@pytest.fixture
def filled(mount: Callable[..., Mounted]) -> Mounted:
    m = mount(*BOUND)
    for n in range(3):
        (m.path / f"f{n}").write_bytes(random.Random(n).randbytes(1_000_000))
    return m


def flip(store: Path, name: str, at: int) -> None:
    with (store / name).open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ 8]))


def volume_bytes(store: Path) -> bytes:
    return (store / "volumes/0001/data.mdb").read_bytes()


def spoil_row(store: Path, table: str, inode: int) -> None:
    """Break the seal of a file's row in a table of the index."""
    with closing(Index(store / "index", 1 << 24)) as index, index.env.begin(write=True) as txn:
        for key, value in list(txn.cursor(index.dbs[table])):
            named = value if table in ("dirents", "cookies") else key[::-1][-8:]
            if int.from_bytes(named[:8], "little") == inode:
                txn.put(key, value[:-1] + bytes([value[-1] ^ 1]), db=index.dbs[table])


def spoil_content(store: Path, data: bytes) -> None:
    """Flip a bit wherever stored bytes begin like ``data``: an earlier, shorter block may be left."""
    found = [match.start() for match in re.finditer(re.escape(data[:64]), volume_bytes(store))]
    assert found
    for at in found:
        flip(store, "volumes/0001/data.mdb", at + 10)


def test_a_mount_and_its_store(filled: Mounted) -> None:
    for deep in ([], ["--deep"]):
        done = run_cachefs("check", *deep, filled.path)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("3 files, ")
        assert done.stdout.endswith(": sound\n")
    filled.umount()
    done = run_cachefs("check", "--json", "--deep", filled.store)
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert document["sound"]
    assert document["entries"] == 3
    assert document["bytes_read"] == 3_000_000


def test_damage_is_named_and_repaired(filled: Mounted) -> None:
    filled.umount()
    spoil_content(filled.store, random.Random(1).randbytes(64))
    done = run_cachefs("check", "--deep", filled.store)
    assert done.returncode == 1
    assert "'f1'" in done.stdout
    assert "'f2'" not in done.stdout
    assert "--repair" in done.stdout
    done = run_cachefs("check", "--deep", "--repair", filled.store)
    assert (done.returncode, done.stderr) == (0, "")
    assert "removed 'f1'" in done.stdout
    assert run_cachefs("check", "--deep", filled.store).returncode == 0
    filled.mount()
    assert sorted(each.name for each in filled.path.iterdir()) == ["f0", "f2"]


def test_what_a_read_has_found_is_shown_by_stats_and_check(filled: Mounted) -> None:
    filled.expect_errors()
    filled.umount()
    spoil_content(filled.store, random.Random(2).randbytes(64))
    filled.mount()
    with pytest.raises(OSError, match="Input/output"):
        (filled.path / "f2").read_bytes()
    (filled.path / "g").touch()
    done = run_cachefs("stats", "--json", filled.path)
    figures = json.loads(done.stdout)
    assert (figures["corrupt_blocks"], figures["damaged"]) == (1, ["f2"])
    assert "'f2'" in run_cachefs("check", filled.path).stdout
    filled.kill()
    filled.mount()
    assert filled.stats()["damaged"] == ["f2"], "remembered over a kill"
    (filled.path / "f2").unlink()
    run_cachefs("stats", filled.path)
    done = run_cachefs("check", filled.path)
    assert (done.returncode, filled.stats()["corrupt_blocks"]) == (0, 0), done.stdout


def test_damaged_pages_refuse_the_mount_and_can_be_repaired(filled: Mounted) -> None:
    filled.umount()
    size = (filled.store / "index/data.mdb").stat().st_size
    for page in range(2, size // 4096):
        flip(filled.store, "index/data.mdb", page * 4096 + 10)  # a page's kind
        if faults(filled.store / "index"):
            break
        flip(filled.store, "index/data.mdb", page * 4096 + 10)
    done = run_cachefs("mount", filled.store, filled.path)
    assert done.returncode == 1
    assert "check --deep --repair" in done.stderr
    assert done.stderr.count("\n") == 1
    for command in ("stats", "ls"):
        done = run_cachefs(command, filled.store)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert run_cachefs("check", "--deep", "--repair", filled.store).returncode == 0
    filled.mount()


@pytest.mark.parametrize("table", ["inodes", "recipes", "dirents", "cookies"])
def test_ls_lists_what_is_not_damaged(filled: Mounted, table: str) -> None:
    """One line says which could not be listed. `stats` does not need them."""
    inode = (filled.path / "f1").stat().st_ino
    filled.umount()
    spoil_row(filled.store, table, inode)
    done = run_cachefs("ls", "--json", filled.store)
    document = json.loads(done.stdout)
    lost = [] if table == "cookies" else ["f1"]  # its name is known without them
    assert [each["name"] for each in document["entries"]] == sorted({"f0", "f1", "f2"} - set(lost))
    assert (document["damaged"], done.returncode) == (lost, bool(lost))
    assert done.stderr == (
        "cachefs: cannot be listed, 1 damaged row of the index: 'f1'; "
        "'cachefs check --deep --repair' on the unmounted store removes what is lost\n" * bool(lost)
    )
    done = run_cachefs("stats", filled.store)
    assert (done.returncode, done.stderr) == (0, "")


def test_rm_all_takes_what_is_damaged_too(filled: Mounted) -> None:
    inode = (filled.path / "f1").stat().st_ino
    filled.umount()
    spoil_row(filled.store, "recipes", inode)
    filled.mount()
    done = run_cachefs("rm", "--all", "--yes", filled.path)
    assert done.returncode == 0, done.stderr
    assert list(filled.path.iterdir()) == []


@pytest.mark.parametrize("table", ["inodes", "cookies"])
def test_rm_all_of_a_damaged_store_says_what_to_do(filled: Mounted, table: str) -> None:
    """And removes nothing before that."""
    inode = (filled.path / "f1").stat().st_ino
    filled.umount()
    spoil_row(filled.store, table, inode)
    done = run_cachefs("rm", "--all", "--yes", filled.store)
    assert done.returncode == 1
    assert "'cachefs check --deep --repair" in done.stderr
    assert done.stderr.count("\n") == 1
    assert filled.stats()["entries"] == 3
    run_cachefs("check", "--deep", "--repair", filled.store)
    assert run_cachefs("rm", "--all", "--yes", filled.store).returncode == 0
    assert filled.stats()["entries"] == 0


def test_a_damaged_inode_hides_no_other_file(filled: Mounted) -> None:
    inode = (filled.path / "f1").stat().st_ino
    filled.umount()
    spoil_row(filled.store, "inodes", inode)
    filled.mount()
    assert sorted(each.name for each in filled.path.iterdir()) == ["f0", "f2"]
    with fails(errno.EIO):
        (filled.path / "f1").read_bytes()


def test_what_cannot_run(filled: Mounted, tmp_path: Path) -> None:
    for arguments, says in (
        (["--repair", filled.path], "unmount it"),
        ([tmp_path / "nothing" / "there"], "does not exist"),
        ([filled.path / "f0"], "whole store"),
    ):
        done = run_cachefs("check", *arguments)
        assert done.returncode == 2, arguments
        assert says in done.stderr
        assert done.stderr.count("\n") == 1


def test_no_snapshot_lasts_while_everything_is_read(filled: Mounted) -> None:
    """Reading 200 GB takes an hour; the daemon could use no page again that it gave up meanwhile."""
    look = "import lmdb; print(lmdb.open(sys.argv[1], readonly=True).readers())"
    seen: list[str] = []

    def progress(step: str, done: int, of: int) -> None:
        if step == "reading":
            seen.extend(elsewhere(look, filled.store / "index").splitlines())

    assert check(filled.store, deep=True, progress=progress).sound
    mine = [line.split()[-1] for line in seen if line.split()[0] == str(os.getpid())]
    assert set(mine) == {"-"}


def test_beside_a_daemon_that_is_at_work(filled: Mounted) -> None:
    """What is only half done there is no fault: payloads without rows, and victims that are going."""
    stop = threading.Event()

    def work() -> None:
        for n in itertools.count():
            if stop.is_set():
                return
            name = filled.path / f"w{n % 7}"
            name.write_bytes(random.Random(n).randbytes(6_000_000))
            if n % 3 == 0:
                name.unlink()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for deep in ([], ["--deep"], []):
            done = run_cachefs("check", *deep, filled.path)
            assert done.returncode == 0, done.stdout
    finally:
        stop.set()
        worker.join()
