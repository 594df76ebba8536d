"""SIGKILL to a repair: whatever it left can be repaired, and nothing more is lost than without the kill."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from cachefs.store import Store
from cachefs.store.check import check
from cachefs.store.check_repair import repair

from ..store.filling import in_memory
from ..store.flipping import Flip, make_template, read_all

pytestmark = pytest.mark.crash


def quiet(step: str, done: int, of: int) -> None:
    pass


def damage(store: Path, seed: int) -> None:
    """Spoil several bits, so that something is to be repaired."""
    for n in range(12):
        Flip.choose(store, 1000 * seed + n).apply(store)


def repaired(store: Path, files: dict[str, bytes]) -> dict[str, int]:
    report, _ = repair(store, deep=True, progress=quiet)
    assert report.sound, list(map(str, report.findings))
    opened = Store.open(store)
    seen = read_all(opened, files)
    opened.close()
    assert check(store, deep=True).sound
    return seen


@pytest.mark.parametrize("rounds", [6, pytest.param(200, marks=pytest.mark.soak)])
def test_a_killed_repair_can_be_repeated(rounds: int) -> None:
    with in_memory() as path:
        template = Path(path) / "template"
        files = make_template(template)
        for seed in range(rounds):
            spoilt, store = Path(path) / "spoilt", Path(path) / "store"
            shutil.copytree(template, spoilt)
            damage(spoilt, seed)
            shutil.copytree(spoilt, store)
            started = time.monotonic()
            expected = repaired(spoilt, files)
            took = time.monotonic() - started
            child = os.fork()
            if child == 0:
                repair(store, deep=True, progress=quiet)
                os._exit(0)
            time.sleep(random.Random(seed).uniform(0, took))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            assert repaired(store, files) == expected, f"seed {seed}"
            shutil.rmtree(spoilt)
            shutil.rmtree(store)
