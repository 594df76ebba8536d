"""A state that is overwritten in place by a writer that is killed or refused."""

from __future__ import annotations

import errno
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ..clients.processes import child, expect
from ..running import Mounted, eventually
from ..states import build
from .conftest import MountFactory
from .kernel import fails, sync_directory

N = 1_000
OLD = build.ggsq(range(N), build.kv(range(N), width=512))
NEW = build.ggsq(range(N), build.kv(range(N), width=512, salt=1))
HALF = len(NEW) // 2


def half_a_save(pipe: Connection, path: Path, sync: bool) -> None:
    """And a little more, after telling."""
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    os.write(fd, NEW[:HALF])
    if sync:
        os.fsync(fd)
    os.write(fd, NEW[HALF : HALF + 5_000])
    pipe.send("half")
    pipe.recv()


@pytest.mark.parametrize("sync", [False, True])
def test_a_killed_writer(shared: Mounted, here: Path, sync: bool) -> None:
    """Promise P6. Promise P7. The old version comes back, unless the writer fsynced the new one."""
    path = here / "state"
    path.write_bytes(OLD)
    sync_directory(here)
    with child(half_a_save, path, sync) as (process, pipe):
        expect(pipe)
        process.kill()
    kept = NEW[: HALF + 5_000] if sync else OLD
    assert eventually(lambda: path.stat().st_size == len(kept))
    assert path.read_bytes() == kept
    shared.remount()
    assert path.read_bytes() == kept


@pytest.mark.parametrize("sync", [False, True])
def test_a_writer_that_is_refused(mount: MountFactory, sync: bool) -> None:
    """Promise P6. Promise P7. The same when there is no room for the rest."""
    m = mount("--max-size", "64M")
    m.expect_errors()
    path = m.path / "state"
    path.write_bytes(OLD)
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    os.write(fd, NEW[:HALF])
    if sync:
        os.fsync(fd)
    with fails(errno.ENOSPC):
        for _ in range(100):
            os.write(fd, os.urandom(1 << 20))
    os.close(fd)
    assert (path.read_bytes()[:HALF] == NEW[:HALF]) if sync else (path.read_bytes() == OLD)
