"""The bound, eviction against what is open, and saves that do not fit."""

from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path

import pytest

from ..running import Mounted, sampled_use
from ..states import build
from .conftest import MountFactory
from .kernel import fails, opened, read_all

PIN = "user.cachefs.pin"
MIB = 1 << 20


def state(number: int, cells: int = 1_024) -> bytes:
    """A state of 8 MiB for 1,024 cells that shares nothing with any other."""
    positions = range(cells)
    return build.ggsq(build.packed(positions), build.kv(positions, layers=2, width=2_048, salt=number))


def meta(number: int) -> bytes:
    return random.Random(number).randbytes(3_000)


def save(directory: Path, number: int) -> Path:
    """A state, and its sidecar after it."""
    path = directory / f"state-{number:04d}.bin"
    data = state(number)
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
        for start in range(0, len(data), MIB):
            os.write(fd, data[start : start + MIB])
    path.with_name(path.name + ".meta").write_bytes(meta(number))
    return path


def is_whole(path: Path, number: int) -> bool:
    return path.read_bytes() == state(number) and path.with_name(path.name + ".meta").read_bytes() == meta(
        number
    )


def fill(m: Mounted, count: int, limit: int) -> None:
    """Save ``count`` states into a store that cannot hold them, and look at what is left."""
    directory = m.path / "states"
    directory.mkdir()
    started = time.monotonic()
    with sampled_use(m.store) as samples:
        pinned, opened_path = save(directory, 0), save(directory, 1)
        os.setxattr(pinned, PIN, b"1")
        with opened(opened_path, os.O_RDONLY) as reader:
            begin = os.pread(reader, 100_000, 0)
            for number in range(2, count):
                save(directory, number)
            assert begin + os.pread(reader, 100 * MIB, len(begin)) == state(1)
            assert is_whole(opened_path, 1)
    seconds = time.monotonic() - started
    written = count * len(state(0))
    print(
        f"\n{written / MIB:.0f} MiB in {seconds:.1f} s into {limit / MIB:.0f} MiB: "
        f"at most {max(samples) / MIB:.1f} MiB on disk in {len(samples)} samples"
    )
    assert max(samples) <= limit
    assert is_whole(pinned, 0)
    left = sorted(os.listdir(directory))
    data = [name for name in left if name.endswith(".bin")]
    assert [name + ".meta" for name in data] == [name for name in left if name.endswith(".meta")]
    numbers = [int(name[6:10]) for name in data]
    newest = numbers[2:]
    assert numbers[:2] == [0, 1]
    assert newest == list(range(count - len(newest), count))
    assert all(is_whole(directory / name, number) for name, number in zip(data, numbers, strict=True))
    assert sum((directory / name).stat().st_size for name in left) > limit / 4
    figures = m.stats()
    assert figures["disk_bytes"] <= limit
    assert figures["evicted_entries"] == 2 * (count - len(numbers))


def test_four_times_the_bound(mount: MountFactory) -> None:
    """Promise P8."""
    fill(mount("--max-size", "64M"), 32, 64 * MIB)


@pytest.mark.soak
def test_ten_times_the_bound(mount: MountFactory) -> None:
    """3 GiB of states into 300 MiB."""
    fill(mount("--max-size", "300M"), 384, 300 * MIB)


def test_a_reader_keeps_what_eviction_wants(mount: MountFactory) -> None:
    """It reads on to the end while files nobody holds go; once it is closed its file goes, too."""
    m = mount("--max-size", "64M")
    with opened(save(m.path, 0), os.O_RDONLY) as reader:
        parts = [os.pread(reader, MIB, 0)]
        save(m.path, 1)
        number = 2
        while len(parts) < 9:
            save(m.path, number)
            number += 1
            parts.append(os.pread(reader, MIB, len(parts) * MIB))
        assert b"".join(parts) == state(0)[: 9 * MIB]
        assert not (m.path / "state-0001.bin").exists()
        assert is_whole(m.path / "state-0000.bin", 0)
    for _ in range(9):
        save(m.path, number)
        number += 1
    assert not (m.path / "state-0000.bin").exists()
    assert not (m.path / "state-0000.bin.meta").exists()


@pytest.mark.parametrize("kind", ["state", "opaque"])
def test_a_save_that_does_not_fit(mount: MountFactory, kind: str) -> None:
    """Promise P9. write() says so; the version before comes back, and pinned files stay as they were."""
    m = mount("--max-size", "64M")
    old = state(0)
    (m.path / "a").write_bytes(old)
    (m.path / "pinned").write_bytes(state(1))
    os.setxattr(m.path / "pinned", PIN, b"1")
    new = state(2, cells=10_000) if kind == "state" else random.Random(1).randbytes(78 * MIB)
    with opened(m.path / "a", os.O_WRONLY | os.O_TRUNC) as fd:
        with fails(errno.ENOSPC):
            for start in range(0, len(new), MIB):
                os.write(fd, new[start : start + MIB])
        with opened(m.path / "pinned", os.O_RDONLY) as other:
            assert read_all(other) == state(1)
    assert (m.path / "a").read_bytes() == old
    assert m.stats()["torn_saves"] == 1
    (m.path / "b").write_bytes(old)
    assert (m.path / "b").read_bytes() == old
    m.remount()
    assert (m.path / "pinned").read_bytes() == state(1)
    assert (m.path / "b").read_bytes() == old
