"""fsync and its relatives: what has returned outlives a kill of the daemon."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from cachefs.store.reader import Reader

from ..running import Mounted, eventually
from .conftest import MountFactory
from .kernel import fails, opened, sync_directory

_libc = ctypes.CDLL(None, use_errno=True)

SYNCS: dict[str, Callable[[int], None]] = {"fsync": os.fsync, "fdatasync": os.fdatasync}


def test_what_was_synced_outlives_a_kill(shared: Mounted, here: Path) -> None:
    """Promise P1. Promise P2. New files, appends, rewrites in place, cut files, names, attributes."""
    chance = random.Random(1)
    expected: dict[str, bytes] = {}
    open_still = []
    for name, sync in SYNCS.items():
        for size in (10, 100_000, 3_000_000):
            data = bytearray(chance.randbytes(size))
            fd = os.open(here / f"{name}-{size}", os.O_RDWR | os.O_CREAT)
            open_still.append(fd)
            os.write(fd, data)
            sync(fd)
            os.write(fd, b"appended")
            os.pwrite(fd, b"changed", 1)
            sync(fd)
            data[1:8] = b"changed"
            expected[f"{name}-{size}"] = bytes(data + b"appended")
    cut = os.open(here / "cut", os.O_RDWR | os.O_CREAT)
    open_still.append(cut)
    os.write(cut, b"long" * 100_000)
    os.fsync(cut)
    os.ftruncate(cut, 6)
    os.fsync(cut)
    expected["cut"] = b"longlo"
    (here / "saved.tmp").write_bytes(b"saved")
    os.setxattr(here / "saved.tmp", "user.a", b"1")
    os.rename(here / "saved.tmp", here / "saved")
    (here / "sub").mkdir()
    (here / "gone").touch()
    sync_directory(here)
    os.unlink(here / "gone")
    sync_directory(here)
    expected["saved"] = b"saved"
    shared.kill()
    for fd in open_still:
        with fails(errno.ENOTCONN):
            os.close(fd)
    shared.mount()
    assert sorted(os.listdir(here)) == sorted([*expected, "sub"])
    assert {name: (here / name).read_bytes() for name in expected} == expected
    assert os.getxattr(here / "saved", "user.a") == b"1"


def test_synced_maps_outlive_a_kill(shared: Mounted, here: Path) -> None:
    """Promise P1."""
    fd = os.open(here / "a", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, 2_000_000)
    os.fsync(fd)
    with mmap.mmap(fd, 2_000_000) as view:
        view[1_000_000:1_000_005] = b"bytes"
        view.flush()
        shared.kill()
    with fails(errno.ENOTCONN):
        os.close(fd)
    shared.mount()
    assert (here / "a").read_bytes()[999_999:1_000_006] == b"\0bytes\0"


def test_what_nobody_synced_is_committed_soon(mount: MountFactory) -> None:
    """Promise P3. Names and contents, without anybody asking, and what is left at unmounting."""
    m = mount("--max-size", "64M")
    data = random.Random(2).randbytes(500_000)
    (m.path / "closed.tmp").write_bytes(data)
    os.rename(m.path / "closed.tmp", m.path / "closed")
    (m.path / "removed").touch()
    os.unlink(m.path / "removed")

    def committed() -> list[str]:
        with closing(Reader(m.store)) as reader:
            return [entry.name for entry in reader.entries()]

    assert eventually(lambda: committed() == ["closed"])
    m.kill()
    m.mount()
    assert (m.path / "closed").read_bytes() == data
    (m.path / "last").write_bytes(data[:1_000])
    m.remount()
    assert (m.path / "last").read_bytes() == data[:1_000]


def test_the_whole_filesystem(here: Path) -> None:
    with opened(here / "a", os.O_RDWR | os.O_CREAT) as fd:
        os.write(fd, b"data")
        assert _libc.syncfs(fd) == 0
    os.sync()
    assert (here / "a").read_bytes() == b"data"


def test_synchronous_writes(here: Path) -> None:
    with opened(here / "a", os.O_WRONLY | os.O_CREAT | os.O_DSYNC) as fd:
        for number in range(10):
            assert os.write(fd, b"%d" % number * 5_000) == 5_000
    assert (here / "a").read_bytes() == b"".join(b"%d" % number * 5_000 for number in range(10))


def test_syncing_what_cannot_be_written(here: Path) -> None:
    """Read-only descriptors can be synced, too, as rsync and Python's tempfile do."""
    (here / "a").write_bytes(b"data")
    with opened(here / "a", os.O_RDONLY) as fd:
        os.fsync(fd)
        os.fdatasync(fd)
    sync_directory(here)
