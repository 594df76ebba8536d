"""A file under random calls of every kind, against the same calls on bytes in memory; as fsx does it."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from ..crash.sound import complaints
from ..states import build
from .conftest import MountFactory

LARGEST = 1_500_000
FLAGS = [os.O_RDWR, os.O_RDWR, os.O_RDWR | os.O_APPEND]


class Exerciser:
    """The file, its descriptors, and ``model``: what it should hold."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.chance = random.Random(seed)
        self.model = bytearray()
        self.calls: Counter[str] = Counter()
        self.source = build.ggsq(range(700), build.kv(range(700), width=512, layers=2))
        self.append = False
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.other = os.open(path, os.O_RDONLY)

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.other)

    def place(self) -> int:
        """An offset in the file or a little behind it, at times on a page."""
        at = self.chance.randrange(min(LARGEST, len(self.model) + 50_000))
        return at & ~4095 if self.chance.random() < 0.3 else at

    def length(self) -> int:
        return self.chance.choice([1, 100, 4_096, 65_536, self.chance.randrange(1, 200_000)])

    def data(self, at: int, length: int) -> bytes:
        """What belongs there in a state, or noise, or a single byte again and again."""
        match self.chance.randrange(3):
            case 0:
                return self.source[at : at + length].ljust(length, b"s")
            case 1:
                return self.chance.randbytes(length)
        return self.chance.randbytes(1) * length

    def write(self) -> None:
        at = len(self.model) if self.append or self.chance.random() < 0.3 else self.place()
        length = min(self.length(), LARGEST - at)
        if length > 0:
            self.put(self.fd, at, self.data(at, length))

    def put(self, fd: int, at: int, data: bytes) -> None:
        assert os.pwrite(fd, data, at) == len(data)
        self.model.extend(bytes(max(0, at - len(self.model))))
        self.model[at : at + len(data)] = data

    def rewrite_ends(self, fd: int, append: bool) -> None:
        """Appends, and short writes over the last bytes or some of them; nothing between."""
        for _ in range(self.chance.randrange(2, 10)):
            back = 0 if append else min(len(self.model), self.chance.choice([0, 1, 4_096, self.short()]))
            length = self.chance.choice([1, back or 1, self.short(), self.length()])
            at = len(self.model) - back
            if at + length <= LARGEST:
                self.put(fd, at, self.data(at, length))

    def short(self) -> int:
        return self.chance.randrange(1, 4_097)

    def write_ends(self) -> None:
        self.rewrite_ends(self.fd, self.append)

    def save(self) -> None:
        """Over what is there, or from its end on, by a descriptor that only writes."""
        anew = self.chance.random() < 0.7
        fd = os.open(self.path, os.O_WRONLY | (os.O_TRUNC if anew else 0))
        try:
            if anew:
                self.model.clear()
                for at in range(0, self.chance.randrange(len(self.source)), 100_000):
                    self.put(fd, len(self.model), self.source[at : at + self.chance.randrange(100_000)])
            self.rewrite_ends(fd, append=False)
        finally:
            os.close(fd)

    def read(self) -> None:
        at, length = self.place(), self.length()
        fd = self.chance.choice([self.fd, self.other])
        assert os.pread(fd, length, at) == self.model[at : at + length]

    def truncate(self) -> None:
        size = self.chance.choice([0, self.place(), self.place(), self.place()])
        self.chance.choice([lambda: os.ftruncate(self.fd, size), lambda: os.truncate(self.path, size)])()
        del self.model[size:]
        self.model.extend(bytes(size - len(self.model)))

    def map_read(self) -> None:
        with self.mapped(mmap.PROT_READ) as view:
            if view is not None:
                at = self.chance.randrange(len(self.model))
                assert view[at : at + 70_000] == self.model[at : at + 70_000]

    def map_write(self) -> None:
        with self.mapped(mmap.PROT_READ | mmap.PROT_WRITE) as view:
            if view is not None:
                at = self.chance.randrange(len(self.model))
                data = self.data(at, self.length())[: len(self.model) - at]
                view[at : at + len(data)] = data
                self.model[at : at + len(data)] = data
                if self.chance.random() < 0.5:
                    view.flush()
                assert os.pread(self.other, 100, at) == self.model[at : at + 100]

    @contextlib.contextmanager
    def mapped(self, protection: int):  # type: ignore[no-untyped-def]
        if not self.model:
            yield None
            return
        with mmap.mmap(self.fd, len(self.model), mmap.MAP_SHARED, protection) as view:
            yield view

    def copy(self) -> None:
        """Within the file: copy_file_range, to where nothing overlaps."""
        length = self.chance.randrange(1, 100_000)
        if len(self.model) > 2 * length and not self.append:
            source = self.chance.randrange(len(self.model) // 2 - length // 2)
            target = self.chance.randrange(source + length, len(self.model))
            done = os.copy_file_range(self.other, self.fd, length, source, target)
            part = bytes(self.model[source : source + done])
            self.model[target : target + done] = part

    def sync(self) -> None:
        self.chance.choice([os.fsync, os.fdatasync])(self.fd)

    def reopen(self) -> None:
        self.close()
        flags = self.chance.choice(FLAGS)
        if self.chance.random() < 0.3:
            flags |= os.O_TRUNC
            self.model.clear()
        self.append = bool(flags & os.O_APPEND)
        self.fd = os.open(self.path, flags)
        self.other = os.open(self.path, os.O_RDONLY)

    def rename(self) -> None:
        os.rename(self.path, self.path.with_name("other"))
        self.path = self.path.with_name("other") if self.path.name != "other" else self.path

    def check(self) -> None:
        assert os.fstat(self.fd).st_size == os.stat(self.path).st_size == len(self.model)
        assert self.path.read_bytes() == self.model

    def step(self) -> None:
        calls: list[tuple[int, Callable[[], None]]] = [
            (8, self.write), (8, self.read), (2, self.truncate), (3, self.map_read), (3, self.map_write),
            (3, self.write_ends), (2, self.save), (1, self.copy), (1, self.sync), (1, self.reopen),
            (1, self.rename), (1, self.check),
        ]  # fmt: skip
        call = self.chance.choices([call for _, call in calls], [weight for weight, _ in calls])[0]
        self.calls[call.__name__] += 1
        call()


@pytest.mark.parametrize(
    ("seeds", "seconds"), [(range(1, 3), 1.0), pytest.param(range(100, 160), 10.0, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("writeback", ["off", "on"])
def test_any_calls(mount: MountFactory, writeback: str, seeds: range, seconds: float) -> None:
    m = mount("--max-size", "256M", "--writeback", writeback)
    calls: Counter[str] = Counter()
    for seed in seeds:
        folder = m.path / str(seed)
        folder.mkdir()
        exerciser = Exerciser(folder / "file", seed)
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline:
                exerciser.step()
            exerciser.check()
        except Exception as error:
            pytest.fail(f"seed {seed} after {sum(exerciser.calls.values())} calls: {error!r:.500}")
        finally:
            exerciser.close()
        calls += exerciser.calls
        if seed % 10 == 0:
            m.remount()
            assert exerciser.path.read_bytes() == exerciser.model
    print(f"\n{sum(calls.values())} calls: {dict(calls)}")
    m.umount()
    assert complaints(m.store) == []
