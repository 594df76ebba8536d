"""SIGKILL while stored blocks are compressed: every file is what it was, and all figures are right."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.sizes import MIB
from cachefs.states.pieces import Rows
from cachefs.store import Store
from cachefs.store.records import KEPT, RAW, BlockRow

from ..running import Mounted, environment
from ..store.filling import add, content, in_memory, names, noise
from ..store.recount import assert_exact
from ..store.test_codec import numbers
from .harness import Rounds

WIDTH = 384
GROUP = 128 * WIDTH
BLOCKS = 200
BOUND = 128 * MIB

pytestmark = pytest.mark.crash


def data(number: int) -> bytes:
    """A block of numbers, or one of noise."""
    return noise(GROUP, number) if number % 5 == 4 else numbers("f2", GROUP // 2, number)


def work(path: Path) -> None:
    """What is killed: compresses a few blocks at a time."""
    store = Store.open(path)
    through = store.compress("idle", 1)
    assert through is not None
    through._batch = 4 * GROUP
    while not through.step(lambda: False).ended:
        print("step", flush=True)
    time.sleep(60)


@pytest.mark.parametrize("rounds", [4, pytest.param(200, marks=pytest.mark.soak)])
def test_kills_while_compressing(rounds: int) -> None:
    files = {b"%d" % n: [data(10 * n + i) for i in range(10)] for n in range(BLOCKS // 10)}
    chance = random.Random(1)
    unfinished = 0
    with in_memory() as place:
        path = Path(place) / "store"
        for round_ in range(rounds):
            store = Store.open(path, BOUND)
            if not names(store):
                for name, blocks in files.items():
                    add(store, name, [Rows(block, WIDTH) for block in blocks])
            store.close()
            process = subprocess.Popen(
                [sys.executable, "-m", __name__, path], stdout=subprocess.PIPE, env=environment()
            )
            assert process.stdout is not None
            for _ in range(chance.randrange(1, 30)):
                assert process.stdout.readline() == b"step\n"
            time.sleep(chance.uniform(0, 0.005))
            process.kill()
            process.wait()
            store = Store.open(path)
            try:
                assert_exact(store)
                for name, blocks in files.items():
                    ino = store.tree.require(1, name).ino
                    assert content(store, ino) == b"".join(blocks), f"round {round_}"
                with store.index.snapshot() as txn:
                    rows = [BlockRow.unpack(row) for _, row in txn.cursor(store.index.dbs["blocks"])]
                codecs = [row.codec for row in rows]
                unfinished += RAW in codecs and any(codec not in (RAW, KEPT) for codec in codecs)
                if codecs.count(RAW) < 120:  # begin anew
                    for name in files:
                        store.tree.release_orphan(store.tree.unlink(1, name))
                    store.commit()
                    store.writer.purge(1 << 30)
            finally:
                store.close()
    assert unfinished


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=pytest.mark.soak)])
def test_kills_while_all_is_compressed_at_once(mount: Callable[..., Mounted], rounds: int) -> None:
    options = ("--max-size", "1G", "--compress", "always")
    m = mount(*options)
    crashes = Rounds(m, options, m.kill)
    for seed in range(1, rounds + 1):
        crashes.run(seed, (0.1, 1.0))
    assert m.stats()["corrupt_blocks"] == 0


if __name__ == "__main__":
    work(Path(sys.argv[1]))
