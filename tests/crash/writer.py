"""A client that saves, overwrites, renames, unlinks and syncs, and tells what it is about to do.

    python writer.py DIRECTORY SEED

One client, one call after the other: so the directory goes through a line of *moments*. Each call that leads
to a new one is told before it is made, and each sync after it has returned. What a crash leaves must be one
of the moments since the last sync that returned; `Story` says so.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.states import build

NAMES = [f"slot-{number}.bin" for number in range(5)] + ["notes", "blob.bin"]
EMPTY = 0
PATCH = 48
"""Bytes that a header rewrite changes."""

Moment = dict[str, int]
"""Name → version. A negative version is its opposite with another header."""


@lru_cache(64)
def content(seed: int, version: int) -> bytes:
    """A version's bytes: a state that shares its beginning with others, or bytes of no kind."""
    if version == EMPTY:
        return b""
    if version < EMPTY:
        return b"patched!" * (PATCH // 8) + content(seed, -version)[PATCH:]
    chance = random.Random(seed * 1_000_003 + version)
    if chance.random() < 0.3:
        return np.random.default_rng([seed, version]).bytes(chance.choice([100, 5_000, 300_000, 2_000_000]))
    cells = chance.randrange(50, 600)
    common = chance.randrange(cells)
    keys = [p if p < common else p + 1_000 * (seed * 1_000 + version) for p in range(cells)]
    return build.ggsq([version, *range(cells)], build.kv(range(cells), layers=2, width=1024, keys=keys))


class Writer:
    """Makes the calls."""

    def __init__(self, directory: str, seed: int) -> None:
        self._directory = directory
        self._dirfd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        self._seed = seed
        self._chance = random.Random(seed)
        self._now: Moment = {}
        self._version = 0

    def _tell(self, **changes: int | None) -> None:
        """The next call makes these changes; None: the name goes."""
        for name, version in changes.items():
            if version is None:
                self._now.pop(name, None)
            else:
                self._now[name] = version
        print(json.dumps(self._now), flush=True)

    def _synced(self) -> None:
        print("synced", flush=True)

    def _sync_directory(self) -> None:
        os.fsync(self._dirfd)
        self._synced()

    def run(self) -> None:
        calls = [self._overwrite, self._overwrite, self._replace, self._replace, self._unlink, self._patch]
        while True:
            self._chance.choice(calls)(self._chance.choice(NAMES), self._chance.random())

    def _write(self, name: str, version: int, flags: int) -> int:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | flags, 0o600, dir_fd=self._dirfd)
        data = content(self._seed, version)
        for start in range(0, len(data), 200_000):
            os.write(fd, data[start : start + 200_000])
        return fd

    def _overwrite(self, name: str, sort: float) -> None:
        """In place; the old version stays until the new one is closed or synced."""
        self._version += 1
        version = self._version
        if name not in self._now:
            self._tell(**{name: EMPTY})
        fd = self._write(name, version, os.O_TRUNC)
        self._tell(**{name: version})
        if sort < 0.7:
            os.fsync(fd)
            self._synced()
        os.close(fd)

    def _replace(self, name: str, sort: float) -> None:
        """Written under another name, synced or not, and moved over the old one."""
        self._version += 1
        version, temporary = self._version, name + ".tmp"
        self._tell(**{temporary: EMPTY})
        fd = self._write(temporary, version, os.O_TRUNC)
        self._tell(**{temporary: version})
        if sort < 0.7:
            os.fsync(fd)
            self._synced()
        if sort < 0.5 or sort > 0.8:
            os.close(fd)
            fd = -1
        self._tell(**{temporary: None, name: version})
        os.rename(temporary, name, src_dir_fd=self._dirfd, dst_dir_fd=self._dirfd)
        if sort < 0.6:
            self._sync_directory()
        if fd >= 0:
            os.close(fd)

    def _unlink(self, name: str, sort: float) -> None:
        if name in self._now:
            self._tell(**{name: None})
            os.unlink(name, dir_fd=self._dirfd)
            if sort < 0.6:
                self._sync_directory()

    def _patch(self, name: str, sort: float) -> None:
        """A header rewritten in place, as ds4 does."""
        version = self._now.get(name, EMPTY)
        if version > 0:
            fd = os.open(name, os.O_WRONLY, dir_fd=self._dirfd)
            os.pwrite(fd, content(self._seed, -version)[:PATCH], 0)
            self._tell(**{name: -version})
            if sort < 0.7:
                os.fsync(fd)
                self._synced()
            os.close(fd)


class Story:
    """What a writer told."""

    def __init__(self, seed: int, lines: Iterable[str]) -> None:
        self._seed = seed
        self.moments: list[Moment] = [{}]
        self.synced = 0
        """The moment of the last sync that returned; none before it may come back."""
        self.syncs = 0
        for line in lines:
            if line.strip() == "synced":
                self.synced = len(self.moments) - 1
                self.syncs += 1
            else:
                self.moments.append(json.loads(line))

    def judge(self, directory: Path) -> str | None:
        """What is wrong with what a crash left, or None."""
        found = {path.name: path.read_bytes() for path in directory.iterdir()}
        if any(self._is(found, moment) for moment in self.moments[self.synced :]):
            return None
        return self._complaint(found)

    def _is(self, found: dict[str, bytes], moment: Moment) -> bool:
        return found.keys() == moment.keys() and all(
            data == content(self._seed, moment[name]) for name, data in found.items()
        )

    def _complaint(self, found: dict[str, bytes]) -> str:
        """Which version each file is of, and which it might be."""
        out = []
        for name in sorted({*found, *self.moments[self.synced]}):
            may_be = list(dict.fromkeys(moment.get(name) for moment in self.moments[self.synced :]))
            ever = {moment.get(name) for moment in self.moments} - {None}
            known = {content(self._seed, version): version for version in ever if version is not None}
            data = found.get(name)
            what = None if data is None else known.get(data, f"torn, {len(data)} bytes")
            out.append(f"{name}: is {what}, may be {may_be}")
        return "no moment since the last sync; " + "; ".join(out)


if __name__ == "__main__":
    Writer(sys.argv[1], int(sys.argv[2])).run()
