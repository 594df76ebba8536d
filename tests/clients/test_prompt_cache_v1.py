"""The `.llama-prompt-cache-v1` family: private run directories, adoption after a kill, lasting entries."""

from __future__ import annotations

import os
import stat
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from .cxxfs import exists, remove_all
from .fixture import MountFactory, names
from .payload import chat, noise
from .processes import child, expect
from .prompt_cache_v1 import Persist, Run


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_run_saves_and_restores_entries(mount: MountFactory) -> None:
    checkpoints = [noise("c0", 90_000), noise("c1", 90_001)]
    with Run(mount().path) as run:
        run.save(1, chat("a", "b").fields(), chat("draft").file(), checkpoints)
        run.save(2, chat("a", "c").fields())
        for path in run.entry(1):
            os.utime(path, (1_600_000_000,) * 2)
        found = run.restore(1)
        assert found["state-1-target.bin"] == chat("a", "b").file()
        assert found["state-1-draft.bin"] == chat("draft").file()
        assert [found[f"state-1-ckpt{n}.bin"][48:] for n in range(2)] == checkpoints
        assert all(path.stat().st_mtime > 1_600_000_001 for path in run.entry(1))
        assert run.restore(2) == {"state-2-target.bin": chat("a", "c").file()}


def test_modes_asked_for_are_the_modes_seen(mount: MountFactory) -> None:
    with Run(mount().path) as run:
        run.save(1, chat("a").fields())
        assert (mode(run.base), mode(run.path)) == (0o700, 0o700)
        assert {mode(path) for path in (run.path / ".lock", run.path / ".owner", *run.entry(1))} == {0o600}


def test_modes_stay_private_whatever_is_asked(mount: MountFactory) -> None:
    """Prompt-derived data at rest: no file or directory is ever open to others, and chmod still succeeds."""
    m = mount()
    if m.plain:
        pytest.skip("a plain directory takes any mode")
    (m.path / "open.bin").write_bytes(b"x")
    (m.path / "sub").mkdir(mode=0o777)
    os.chmod(m.path / "open.bin", 0o644)
    os.chmod(m.path / "sub", 0o755)
    assert (mode(m.path / "open.bin"), mode(m.path / "sub")) == (0o600, 0o700)
    m.remount()
    assert (mode(m.path / "open.bin"), mode(m.path / "sub")) == (0o600, 0o700)


def test_synced_entries_survive_the_daemon(mount: MountFactory) -> None:
    """After fdatasync, rename and the directory's fsync an entry is whole under its final name."""
    m = mount()
    with Run(m.path) as run:
        run.save(1, chat("a", "b").fields())
        run.save(2, chat("a", "c").fields())
        m.kill()
    m.remount()
    assert {path.name for path in run.path.glob("state-*")} == {"state-1-target.bin", "state-2-target.bin"}
    assert run.restore(1) == {"state-1-target.bin": chat("a", "b").file()}
    assert run.restore(2) == {"state-2-target.bin": chat("a", "c").file()}


def serve(pipe: Connection, base: Path) -> None:
    run = Run(base)
    run.save(1, chat("a", "b").fields(), checkpoints=[noise("c", 100_000)])
    pipe.send(run.path.name)
    pipe.recv()


def test_stale_run_is_adopted_once_its_owner_is_killed(mount: MountFactory) -> None:
    m = mount()
    with child(serve, m.path) as (owner, pipe):
        name = str(expect(pipe))
        with Run(m.path) as run:
            assert run.adopt_stale() == 0
            assert name in names(run.base)
            owner.kill()
            owner.join()
            assert run.adopt_stale() == 2
    assert names(run.base) == {run.path.name}
    m.remount()
    found = run.restore(1001)
    assert found["state-1001-target.bin"] == chat("a", "b").file()
    assert found["state-1001-ckpt0.bin"][48:] == noise("c", 100_000)


def test_shutdown_renames_the_run_and_removes_it(mount: MountFactory) -> None:
    m = mount()
    with Run(m.path) as run, Run(m.path) as other:
        run.save(1, chat("a").fields())
        other.save(1, chat("a").fields())
        run.shutdown()
        assert names(other.base) == {other.path.name}
        assert other.restore(1) == {"state-1-target.bin": chat("a").file()}


def test_remove_all_of_a_large_tree(mount: MountFactory) -> None:
    """Entries unlinked while the directory is being read: none may be skipped."""
    top = mount().path / "tree"
    for sub in ("a", "b/c"):
        (top / sub).mkdir(parents=True)
        for number in range(300):
            (top / sub / f"{number:04}-{'x' * 150}").touch()
    assert remove_all(top) == 604
    assert not exists(top)


def test_persistent_entries_are_verified_and_survive(mount: MountFactory) -> None:
    m = mount()
    cache = Persist(m.path)
    with pytest.raises(BlockingIOError):
        Persist(m.path)
    entries = [cache.save(n, chat("a", n).file(), chat("a", n).packed_tokens) for n in range(3)]
    cache.close()  # and with it the lock, which the kernel may hold on to beyond the dead mount
    m.kill()
    m.remount()
    cache = Persist(m.path)
    assert [cache.load(entry) for entry in entries] == [chat("a", n).file() for n in range(3)]
    with open(entries[1] / "state-1-target.bin", "ab") as file:
        file.write(b"\0")
    assert cache.load(entries[1]) is None
    assert cache.load(entries[0]) == chat("a", 0).file()
    remove_all(entries[0])
    assert names(cache.path) == {".persist.lock", "entry-1", "entry-2"}
    cache.close()
