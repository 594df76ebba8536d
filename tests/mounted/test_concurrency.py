"""64 client processes at once, against each other and against eviction.

Every file says which version it is of; what a reader gets must be that version in full, whatever is
renamed over it, removed or evicted meanwhile.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import struct
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from cachefs.sizes import MIB

from ..crash.sound import complaints
from ..running import Mounted, disk_use, run_cachefs, sampled_memory, sampled_use
from ..states import build
from .conftest import MountFactory
from .kernel import opened, read_all

PIN = "user.cachefs.pin"
NAMES = 24
STAYING = 150
MEMORY = 256 * MIB

Client = Callable[["Place", random.Random], Counter[str]]
"""Does one turn of its work; gives what it counted."""


class Place:
    """The directories that the clients share."""

    def __init__(self, root: Path) -> None:
        self.saves = root / "saves"
        self.crowd = root / "crowd"

    def make(self) -> None:
        self.saves.mkdir()
        self.crowd.mkdir()
        for number in range(NAMES):
            (self.saves / f"slot-{number}.bin").write_bytes(content(1 + number))
        for number in range(STAYING):
            self.stay(number).touch()
            os.setxattr(self.stay(number), PIN, b"1")

    def stay(self, number: int) -> Path:
        return self.crowd / f"stay-{number}"


@lru_cache(32)
def content(version: int) -> bytes:
    """A state or noise, its version at byte 12 in both; versions share beginnings."""
    chance = random.Random(version)
    if version % 3 == 0:
        data = np.random.default_rng(version).bytes(chance.choice([20, 5_000, 200_000]))
        return b"noise " * 2 + struct.pack("<I", version) + data
    cells = chance.randrange(20, 150)
    common = chance.randrange(cells)
    keys = [p if p < common else p + 1_000 * version for p in range(cells)]
    return build.ggsq([version, *range(cells)], build.kv(range(cells), layers=2, width=512, keys=keys))


def write(place: Place, chance: random.Random) -> Counter[str]:
    """A save under a temporary name, synced and moved into place."""
    data = content(chance.randrange(1, 10_000))
    path = place.saves / f"slot-{chance.randrange(NAMES)}.bin"
    temporary = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    with opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
        for start in range(0, len(data), 60_000):
            os.write(fd, data[start : start + 60_000])
        if chance.random() < 0.7:
            os.fsync(fd)
    os.rename(temporary, path)
    return Counter(saves=1)


def read(place: Place, chance: random.Random) -> Counter[str]:
    """A file from its beginning, and once more by pieces in any order, whatever becomes of its name."""
    try:
        fd = os.open(place.saves / f"slot-{chance.randrange(NAMES)}.bin", os.O_RDONLY)
    except FileNotFoundError:
        return Counter(absent=1)
    try:
        data = read_all(fd)
        (version,) = struct.unpack_from("<I", data, 12)
        assert data == content(version), f"{len(data)} bytes are not version {version}"
        for _ in range(3):
            at = chance.randrange(len(data))
            assert os.pread(fd, 10_000, at) == data[at : at + 10_000], "another version meanwhile"
        assert os.fstat(fd).st_size == len(data)
    finally:
        os.close(fd)
    return Counter(reads=1, bytes=len(data))


def remove(place: Place, chance: random.Random) -> Counter[str]:
    time.sleep(0.02)
    try:
        os.unlink(place.saves / f"slot-{chance.randrange(NAMES)}.bin")
    except FileNotFoundError:
        return Counter()
    return Counter(removals=1)


def enumerate_(place: Place, chance: random.Random) -> Counter[str]:
    """What stays all the time is listed once, each time; no name is listed twice."""
    found = Counter(os.listdir(place.crowd))
    assert max(found.values()) == 1, found.most_common(3)
    missing = {f"stay-{number}" for number in range(STAYING)} - found.keys()
    assert not missing, f"not listed: {missing}"
    os.listdir(place.saves)
    return Counter(listings=1)


def churn(place: Place, chance: random.Random) -> Counter[str]:
    """Names that come, move and go, also between those that stay and over them."""
    one, other = (place.crowd / f"{os.getpid()}-{chance.randrange(1_000_000)}" for _ in range(2))
    one.touch()
    os.rename(one, other)
    if chance.random() < 0.5:
        os.setxattr(other, PIN, b"1")
        os.rename(other, place.stay(chance.randrange(STAYING)))
    else:
        os.unlink(other)
    return Counter(churned=1)


def attribute(place: Place, chance: random.Random) -> Counter[str]:
    path = place.stay(chance.randrange(STAYING))
    value = chance.randbytes(chance.randrange(2_000))
    name = f"user.{os.getpid()}"
    fd = os.open(path, os.O_RDONLY)
    try:
        os.setxattr(fd, name, value)
        assert os.getxattr(fd, name) == value
        assert name in os.listxattr(fd)
        os.removexattr(fd, name)
    finally:
        os.close(fd)
    return Counter(attributes=1)


def ask(place: Place, chance: random.Random) -> Counter[str]:
    room = os.statvfs(place.saves)
    assert 0 <= room.f_bavail <= room.f_bfree <= room.f_blocks
    return Counter(statfs=1)


def stats(place: Place, chance: random.Random) -> Counter[str]:
    """The figures are of one moment, and never negative."""
    for name in ("stats", "ls"):
        done = run_cachefs(name, "--json", place.saves.parent)
        assert done.returncode == 0, done.stderr
        figures = json.loads(done.stdout)
        if name == "stats":
            assert all(value >= 0 for value in figures.values() if isinstance(value, int | float)), figures
            assert figures["entries"] >= STAYING
            assert figures["logical_bytes"] >= figures["row_bytes"]
        else:
            assert all(entry["exclusive"] + entry["shared"] == entry["size"] for entry in figures["entries"])
    return Counter(stats=1)


def fill(place: Place, chance: random.Random) -> Counter[str]:
    """Files that nobody reads again: the others' are opened, so used later, and yet go now and then."""
    path = place.saves / f"filler-{chance.randrange(1 << 40)}"
    path.write_bytes(chance.randbytes(1_000_000))
    return Counter(fillers=1)


def work(client: Client, root: Path, seed: int, seconds: float) -> Counter[str]:
    place, chance, done = Place(root), random.Random(seed), Counter[str]()
    deadline = time.monotonic() + seconds
    while True:
        done += client(place, chance)
        if time.monotonic() > deadline:
            return done


CLIENTS: list[Client] = [
    *[write] * 18,
    *[read] * 20,
    *[remove] * 4,
    *[enumerate_] * 6,
    *[churn] * 6,
    *[attribute] * 5,
    *[ask] * 4,
    stats,
]


def run(m: Mounted, clients: list[Client], seconds: float) -> Counter[str]:
    Place(m.path).make()
    done = Counter[str]()
    with (
        sampled_memory(m) as memory,
        ProcessPoolExecutor(len(clients), multiprocessing.get_context("fork")) as pool,
    ):
        turns = [pool.submit(work, client, m.path, seed, seconds) for seed, client in enumerate(clients)]
        for turn in turns:
            done += turn.result()
    print(f"\n{len(clients)} clients: {dict(done)}; memory: {max(memory) / MIB:.0f} MiB at most")
    assert max(memory) <= MEMORY
    for path in (m.path / "saves").glob("slot-*.bin"):
        data = path.read_bytes()
        assert data == content(*struct.unpack_from("<I", data, 12))
    return done


@pytest.mark.parametrize("seconds", [1, pytest.param(120, marks=pytest.mark.soak)])
def test_64_clients(mount: MountFactory, seconds: float) -> None:
    m = mount("--max-size", "512M")
    assert len(CLIENTS) == 64
    done = run(m, CLIENTS, seconds)
    assert all(done[kind] for kind in ("saves", "reads", "listings", "churned", "attributes", "statfs"))
    assert m.stats()["evicted_entries"] == 0
    m.umount()
    assert complaints(m.store) == []


@pytest.mark.parametrize("seconds", [1, pytest.param(120, marks=pytest.mark.soak)])
def test_64_clients_in_a_store_too_small(mount: MountFactory, seconds: float) -> None:
    """Eviction goes on against open files all the time; nobody is refused, and the bound holds."""
    m = mount("--max-size", "64M")
    with sampled_use(m.store) as use:
        done = run(m, [*[fill] * 19, *[write] * 9, *[read] * 10, *CLIENTS[38:]], seconds)
    assert all(done[kind] for kind in ("saves", "listings", "churned", "fillers")), done
    assert m.stats()["evicted_entries"] > 0
    m.umount()
    assert max(use) <= 64 * MIB
    assert disk_use(m.store) <= 64 * MIB
    assert complaints(m.store) == []
