"""SIGKILL to a daemon that compresses, then a repair, killed too at times: every file is what it was."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from cachefs.store.index import Index
from cachefs.store.records import KEPT, RAW, BlockRow

from ..mounted.kernel import sync_directory
from ..running import Mounted, command, environment, eventually, run_cachefs
from ..store.filling import noise
from ..store.test_codec import numbers
from .sound import complaints

OPTIONS = ("--max-size", "64M", "--compress", "idle:1")
"""Short of room with these files, so the daemon compresses as soon as clients are quiet."""
FILES, SIZE = 5, 5_900_000

pytestmark = pytest.mark.crash


def data(seed: int) -> bytes:
    return numbers("f2", SIZE // 2 - 100_000, seed) + noise(200_000, seed)


def packed(store: Path) -> int:
    """How many blocks are."""
    with closing(Index(store / "index", None)) as index, index.snapshot() as txn:
        codecs = [BlockRow.unpack(row).codec for _, row in txn.cursor(index.dbs["blocks"])]
    return sum(codec not in (RAW, KEPT) for codec in codecs)


def repair(store: Path) -> None:
    done = run_cachefs("check", "--deep", "--repair", store)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "removed" not in done.stdout
    assert "dropped" not in done.stdout


def start_repair(store: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command("check", "--deep", "--repair", store), stdout=subprocess.DEVNULL, env=environment()
    )


@pytest.mark.parametrize("rounds", [2, pytest.param(60, marks=pytest.mark.soak)])
def test_a_repair_after_a_kill_while_compressing(mount: Callable[..., Mounted], rounds: int) -> None:
    chance = random.Random(rounds)
    for round_ in range(rounds):
        m = mount(*OPTIONS)
        files = {f"f{n}": data(100 * round_ + n) for n in range(FILES)}
        for name, content in files.items():
            (m.path / name).write_bytes(content)
        sync_directory(m.path)
        assert eventually(lambda store=m.store: packed(store))
        time.sleep(chance.uniform(0, 0.15))
        m.kill()
        if round_ % 2:
            process = start_repair(m.store)
            time.sleep(chance.uniform(0.2, 0.8))
            process.send_signal(signal.SIGKILL)
            process.wait()
        repair(m.store)
        assert complaints(m.store) == []
        m.mount(*OPTIONS)
        for name, content in files.items():
            assert (m.path / name).read_bytes() == content, f"round {round_}, {name}"
        assert m.stats()["evicted_entries"] == 0
        m.umount()
        shutil.rmtree(m.store)
