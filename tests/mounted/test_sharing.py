"""Many clients at once, on the same files and on their own."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ..running import Mounted
from ..states import build
from .kernel import elsewhere, opened, read_all


def state(number: int, cells: int = 256) -> bytes:
    """A state of 1 MB whose first half all have in common."""
    positions = list(range(cells))
    keys = [*positions[: cells // 2], *(number * 10_000 + p for p in positions[cells // 2 :])]
    return build.ggsq([number, *positions], build.kv(positions, width=1024, keys=keys))


def together(number: int, work: Callable[[int], object]) -> list[object]:
    """``work(0)`` … in as many threads; the first error is raised."""
    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(work, range(number)))


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR])
def test_readers_see_what_is_written(here: Path, flags: int) -> None:
    """At once, through any descriptor, whether its pages are cached or not."""
    chance = random.Random(1)
    model = bytearray(chance.randbytes(400_000))
    (here / "a").write_bytes(model)
    with (
        opened(here / "a", flags) as writer,
        opened(here / "a", os.O_RDONLY) as one,
        opened(here / "a", os.O_RDWR) as other,
    ):
        for _ in range(100):
            offset, data = chance.randrange(450_000), chance.randbytes(chance.randrange(1, 20_000))
            os.pwrite(writer, data, offset)
            model = model.ljust(offset, b"\0")
            model[offset : offset + len(data)] = data
            low = max(0, offset - 5_000)
            for reader in (one, other):
                assert os.pread(reader, 40_000, low) == model[low : low + 40_000]
        assert read_all(one) == read_all(other) == model
    assert elsewhere("print(open(sys.argv[1], 'rb').read().hex())", here / "a") == model.hex()


def test_reading_behind_a_save(here: Path) -> None:
    """A reader that follows a state while it comes in gets its bytes, never others."""
    data = b"".join(state(number) for number in range(8))
    with opened(here / "a", os.O_WRONLY | os.O_CREAT) as writer, opened(here / "a", os.O_RDONLY) as reader:
        for start in range(0, len(data), 200_000):
            os.write(writer, data[start : start + 200_000])
            stop = min(start + 200_000, len(data))
            assert os.fstat(reader).st_size == stop
            assert os.pread(reader, 300_000, max(0, stop - 150_000)) == data[max(0, stop - 150_000) : stop]
        assert read_all(reader) == data


def test_readers_of_the_version_before(here: Path) -> None:
    """Who has a file open reads it to its end while another takes its name."""
    old, new = state(1), state(2)
    (here / "a").write_bytes(old)
    with opened(here / "a", os.O_RDONLY) as reader:
        first = os.read(reader, 100_000)
        (here / "a.tmp").write_bytes(new)
        os.rename(here / "a.tmp", here / "a")
        rest = b"".join(iter(lambda: os.read(reader, 100_000), b""))
    assert first + rest == old
    assert (here / "a").read_bytes() == new


def test_64_clients_at_once(shared: Mounted, here: Path) -> None:
    """Each saves, reads, replaces and removes its own; all the time some list and read everything."""
    done = threading.Event()
    (here / "all").mkdir()
    final = {f"state-{number}": state(100 + number) for number in range(56)}

    def save(number: int) -> None:
        name = here / "all" / f"state-{number}"
        for data in (state(number), final[name.name]):
            with opened(name.with_suffix(".tmp"), os.O_WRONLY | os.O_CREAT) as fd:
                for start in range(0, len(data), 300_000):
                    os.write(fd, data[start : start + 300_000])
            os.rename(name.with_suffix(".tmp"), name)
            assert name.read_bytes() == data
        own = here / f"own-{number}"
        own.mkdir()
        (own / "x").write_bytes(b"x")
        os.unlink(own / "x")
        own.rmdir()

    def look() -> None:
        while not done.is_set():
            for name in os.listdir(here / "all"):
                try:
                    data = (here / "all" / name).read_bytes()
                except FileNotFoundError:
                    continue
                assert name.endswith(".tmp") or len(data) == len(final[name])
            os.statvfs(here)

    with ThreadPoolExecutor(8) as lookers:
        looking = [lookers.submit(look) for _ in range(8)]
        try:
            together(56, save)
        finally:
            done.set()
        for each in looking:
            each.result()
    assert {name: (here / "all" / name).read_bytes() for name in os.listdir(here / "all")} == final
    assert os.listdir(here) == ["all"]
    assert "Traceback" not in shared.log()


def test_many_writers_of_one_file(here: Path) -> None:
    """Each its own part, in any order: nothing is lost."""
    size, part = 64, 50_000
    os.close(os.open(here / "a", os.O_CREAT | os.O_WRONLY))

    def write(number: int) -> None:
        with opened(here / "a", os.O_WRONLY if number % 2 else os.O_RDWR) as fd:
            for step in range(0, part, 10_000):
                os.pwrite(fd, bytes([number + 1]) * 10_000, number * part + step)

    together(size, write)
    assert (here / "a").read_bytes() == b"".join(bytes([number + 1]) * part for number in range(size))


def test_many_descriptors(here: Path) -> None:
    (here / "a").write_bytes(b"data")
    descriptors = [os.open(here / "a", os.O_RDONLY) for _ in range(800)]
    assert all(os.pread(fd, 10, 0) == b"data" for fd in descriptors)
    for fd in descriptors:
        os.close(fd)
    os.unlink(here / "a")
    assert os.listdir(here) == []
