"""A client killed in the middle of a save, as llama-swap does after 5 s: the save before it survives."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..data.load import real_states
from ..running import Mounted
from .sound import complaints

pytestmark = pytest.mark.crash

SAVE = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
data = open(sys.argv[2], "rb").read()
step = int(sys.argv[3])
os.write(1, b".")
for at in range(0, len(data), step):
    os.write(fd, data[at : at + step])
    os.write(1, b".")
os.close(fd)
os.write(1, b"!")
"""
"""Saves a file over another in pieces, and says so after each: first of all after it was truncated."""


def save_and_kill(path: Path, source: Path, step: int, pieces: int) -> bool:
    """Kill a child that saves ``source`` once it has written some pieces; whether it was faster."""
    command = [sys.executable, "-S", "-c", SAVE, path, source, str(step)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert child.stdout is not None
    told = child.stdout.read(1 + pieces)
    child.send_signal(signal.SIGKILL)
    told += child.stdout.read()
    child.wait()
    child.stdout.close()
    return told.endswith(b"!")


@pytest.mark.parametrize("rounds", [50, pytest.param(200, marks=pytest.mark.soak)])
def test_clients_killed_in_the_middle_of_a_save(
    mount: Callable[..., Mounted], tmp_path: Path, rounds: int
) -> None:
    """Whatever kind of state, wherever it was cut: what is read is the old or the new one in full."""
    m = mount("--max-size", "300M")
    chance = random.Random(rounds)
    states = real_states()
    packs: dict[str, list[str]] = {}
    for name, data in states.items():
        packs.setdefault(name.split("/")[0], []).append(name)
        (tmp_path / name.replace("/", "-")).write_bytes(data)
    pairs = [names for names in packs.values() if len(names) > 1]
    kept = whole = 0
    for number in range(rounds):
        pair = pairs[number % len(pairs)]
        old, new = chance.sample(pair, 2)
        path = m.path / f"slot-{number % 5}.bin"
        path.write_bytes(states[old])
        step = chance.choice([1_000, 4_096, 8_192, 100_000])
        count = -(-len(states[new]) // step)
        pieces = chance.choice([0, 1, count - 1, chance.randrange(count + 1)])
        finished = save_and_kill(path, tmp_path / new.replace("/", "-"), step, pieces)
        found = path.read_bytes()
        where = f"round {number}: {new} over {old}, {pieces} of {count} × {step} bytes, {len(found)} found"
        if found == states[new]:
            whole += 1
        else:
            assert found == states[old], where
            assert not finished, where
            kept += 1
    print(f"\n{rounds} kills: the old version {kept} times, the new one {whole} times")
    assert kept > rounds // 3
    assert m.stats()["torn_saves"] >= kept - rounds // 4
    m.remount()
    assert len(os.listdir(m.path)) == 5
    m.umount()
    assert complaints(m.store) == []
