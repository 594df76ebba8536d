"""The power fails: what the store's own disk had not been told to keep is gone.

The store lies on a loop device whose filesystem is shut down by its ioctl: nothing more reaches the disk,
by the kernel's own rules. Then it is mounted again, as after a power cut.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.mount import mountpoint as places
from cachefs.mount.processes import wait_for_end

from ..running import TIMEOUT, Mounted
from .disk import MAKE, Disk, make_disk
from .harness import Rounds

BOUND = ("--max-size", "300M")

pytestmark = pytest.mark.crash


@pytest.fixture(params=MAKE)
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk]:
    made = make_disk(tmp_path, request.param, 600 << 20)
    yield made
    if os.path.ismount(made.path):
        made.down()


@pytest.mark.parametrize("rounds", [2, pytest.param(30, marks=pytest.mark.soak)])
def test_power_cuts_under_load(disk: Disk, tmp_path: Path, rounds: int) -> None:
    """Promise P1. Promise P2. Promise P4."""
    m = Mounted(disk.path / "store", tmp_path / "mnt")
    m.path.mkdir()
    m.expect_errors()  # the disk is gone before the daemon is
    m.mount(*BOUND)
    seed = 0

    def cut() -> None:
        pid = m.pid
        disk.fail(log=seed % 2 == 1)
        os.kill(pid, signal.SIGKILL)
        assert not wait_for_end([pid], TIMEOUT)
        dead = places.mounted_at(m.path)
        assert dead is not None
        places.clear_dead(dead)
        disk.down()
        disk.up()

    try:
        crashes = Rounds(m, BOUND, cut)
        for seed in range(1, rounds + 1):
            crashes.run(seed, (0.2, 1.0 if rounds < 10 else 2.5))
        assert crashes.syncs >= 5 * rounds
    finally:
        wrong = m.clean_up()
    assert not wrong
