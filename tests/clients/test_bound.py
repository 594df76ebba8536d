"""The bound: what the store takes on disk, what goes when it is full, what stays, and what is refused."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from ..running import disk_use, sampled_use
from .cxxfs import exists, last_write_time
from .fixture import Mount, MountFactory, names, stats
from .llama_server import slot_restore, slot_save
from .payload import State, noise
from .stdio import ifstream_ate, ofstream_write, write_all

BOUND = ("--max-size", "64M")
LARGER = ("--max-size", "96M")
SMALLER = ("--max-size", "64M")
PIN = "user.cachefs.pin"
SIDECARS = (".meta", ".checkpoints")


def unique(number: int, cells: int = 256, layers: int = 2) -> State:
    """A state that shares nothing with any other; 2 MiB unless said otherwise."""
    return State(((("unique", number), cells),), layers=layers, width=1024)


def content(state: State) -> bytes:
    return b"".join(state.fields())


def bounded(mount: MountFactory, bound: tuple[str, str] = BOUND) -> Mount:
    m = mount(*bound)
    if m.plain:
        pytest.skip("a plain directory has no bound")
    return m


def save_pair(directory: Path, number: int) -> Path:
    """A state with its `.meta` renamed into place after it, as PR #28092 saves."""
    path = directory / f"pair-{number}.bin"
    slot_save(path, unique(number))
    temporary = path.with_name(path.name + ".meta.tmp")
    ofstream_write(temporary, noise(("meta", number), 3_000))
    os.rename(temporary, path.with_name(path.name + ".meta"))
    return path


def save_slot(directory: Path, number: int) -> Path:
    """A state after its `.checkpoints`, as ik_llama.cpp saves."""
    path = directory / f"slot-{number}"
    ofstream_write(path.with_name(path.name + ".checkpoints"), noise(("checkpoints", number), 200_000))
    slot_save(path, unique(number))
    return path


def broken_units(directory: Path) -> list[str]:
    """Sidecars without data and data without its sidecar.

    A unit may go while the directory is being read, so each suspect is looked at again.
    """
    found = names(directory)
    suspects = []
    for name in found:
        for suffix in SIDECARS:
            if name.endswith(suffix) and name.removesuffix(suffix) not in found:
                suspects.append(name)
        wanted = {"pair": ".meta", "slot": ".checkpoints"}.get(name.split("-")[0], "")
        if not name.endswith(SIDECARS) and name + wanted not in found:
            suspects.append(name)
    return [name for name in suspects if exists(directory / name)]


def test_eight_times_the_bound(mount: MountFactory) -> None:
    """Disk use stays below the bound throughout; oldest units go whole; pinned and open ones stay."""
    m = bounded(mount)
    limit = stats(m)["max_bytes"]
    pinned, opened = save_pair(m.path, 0), save_slot(m.path, 1)
    os.setxattr(pinned, PIN, b"1")
    with open(m.path / ".lock", "wb") as lock, open(opened, "rb") as reader, sampled_use(m.store) as samples:
        fcntl.flock(lock, fcntl.LOCK_EX)
        begin = reader.read(5_000)
        first = save_pair(m.path, 2)
        assert exists(first)
        last = first
        for number in range(3, 8 * limit // len(content(unique(0)))):
            last = save_slot(m.path, number) if number % 3 == 0 else save_pair(m.path, number)
        assert begin + reader.read() == content(unique(1))
        assert {opened.name, f"{opened.name}.checkpoints"} <= names(m.path)
        assert slot_restore(opened)[0] == content(unique(1))
    assert max(samples) <= limit
    assert exists(m.path / ".lock")
    assert broken_units(m.path) == []
    assert {pinned.name, f"{pinned.name}.meta"} <= names(m.path)
    assert ifstream_ate(pinned) == content(unique(0))
    assert ifstream_ate(last) == content(unique(number))
    # The kernel has seen this name before and must have been told that it went.
    assert not exists(first)
    figures = stats(m)
    assert figures["evicted_entries"] > 100
    disk = os.statvfs(m.path)
    assert 0 < disk.f_bavail <= disk.f_blocks
    assert disk.f_blocks * disk.f_frsize <= limit


def test_state_that_promises_more_than_the_bound(mount: MountFactory) -> None:
    """ENOSPC from write(), since nobody looks at close(), and everything else is left as it was."""
    m = bounded(mount)
    for number in range(6):
        save_pair(m.path, number)
    before, listing = stats(m), names(m.path)
    with sampled_use(m.store) as samples, pytest.raises(OSError, match="space") as error:
        slot_save(m.path / "huge.bin", unique(99, cells=6_000, layers=8))
    assert error.value.errno == errno.ENOSPC
    assert max(samples) <= before["max_bytes"]
    assert names(m.path) - {"huge.bin"} == listing
    assert stats(m)["evicted_entries"] == before["evicted_entries"]
    for number in range(6):
        assert ifstream_ate(m.path / f"pair-{number}.bin") == content(unique(number))
    (m.path / "huge.bin").unlink(missing_ok=True)
    assert ifstream_ate(save_pair(m.path, 7)) == content(unique(7))


def test_overwrite_that_cannot_fit_keeps_the_old_version(mount: MountFactory) -> None:
    """llama-server truncates the name first and leaves a partial file behind when its save fails."""
    m = bounded(mount)
    path = m.path / "slot.bin"
    slot_save(path, unique(0))
    with pytest.raises(OSError, match="space"):
        slot_save(path, unique(99, cells=6_000, layers=8))
    assert slot_restore(path)[0] == content(unique(0))


def test_bytes_without_a_promise_end_at_the_bound(mount: MountFactory) -> None:
    """Of a foreign file nobody knows how long it gets: it ends with ENOSPC, and what is pinned stays."""
    m = bounded(mount)
    limit = stats(m)["max_bytes"]
    pinned = save_pair(m.path, 0)
    os.setxattr(pinned, PIN, b"1")
    fd = os.open(m.path / "stream", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    written = 0
    refused = 0
    with sampled_use(m.store) as samples:
        while written < 2 * limit and not refused:
            try:
                write_all(fd, noise(("stream", written), 1 << 20))
                written += 1 << 20
            except OSError as error:
                refused = error.errno or 0
    assert refused == errno.ENOSPC
    assert written <= limit
    assert max(samples) <= limit
    os.close(fd)
    (m.path / "stream").unlink(missing_ok=True)
    assert ifstream_ate(pinned) == content(unique(0))
    assert ifstream_ate(save_pair(m.path, 1)) == content(unique(1))


def test_last_use_decides_also_after_a_remount(mount: MountFactory) -> None:
    """A touched sidecar and a read keep their units; the others go in the order they were written."""
    m = bounded(mount)
    paths = [save_pair(m.path, number) for number in range(9)]
    last_write_time(paths[0].with_name(paths[0].name + ".meta"), os.stat(paths[8]).st_mtime_ns + 10**9)
    assert len(ifstream_ate(paths[1])) == os.stat(paths[1]).st_size
    times = {name: os.stat(m.path / name).st_mtime_ns for name in names(m.path)}
    m.remount(*BOUND)
    assert {name: os.stat(m.path / name).st_mtime_ns for name in names(m.path)} == times
    for number in range(100, 200):
        save_pair(m.path, number)
        # Newest first, since eviction may go on meanwhile.
        there = [exists(path) for path in reversed(paths)][::-1]
        # Once one is there, so are all that were used after it.
        assert there[2:] == sorted(there[2:])
        if not there[5]:
            break
    assert not there[5]
    assert there[:2] == [True, True]
    assert ifstream_ate(paths[0]) == content(unique(0))
    assert broken_units(m.path) == []


def test_smaller_bound_at_the_next_mount(mount: MountFactory) -> None:
    """The store is brought down to the new bound; pins made before still hold."""
    m = bounded(mount, LARGER)
    for number in range(40):
        save_pair(m.path, number)
        if number == 3:
            os.setxattr(m.path / "pair-3.bin", PIN, b"1")
    m.remount(*SMALLER)
    limit = stats(m)["max_bytes"]
    assert limit == 64 << 20
    assert disk_use(m.store) <= limit
    assert ifstream_ate(m.path / "pair-3.bin") == content(unique(3))
    assert ifstream_ate(m.path / "pair-39.bin") == content(unique(39))
    assert broken_units(m.path) == []
    with sampled_use(m.store) as samples:
        for number in range(40, 60):
            save_pair(m.path, number)
    assert max(samples) <= limit
    assert os.getxattr(m.path / "pair-3.bin", PIN)
