"""Hostile sizes, names, attributes and numbers: bounded memory, clear errors, a sound store.

Each test has a small version; the large one is marked soak. Figures are printed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachefs.sizes import GIB, MIB
from cachefs.store.recipe import MAX_SIZE

from ..crash.sound import complaints
from ..running import Mounted, disk_use, eventually, memory_of, run_cachefs, sampled_memory
from .conftest import MountFactory
from .kernel import fails, opened, sync_directory

MEMORY = 256 * MIB
"""What the daemon may take, whatever clients do."""
OPEN_FILE = 10_000
"""More for a file that is open and written to: its cutter, queue and lock."""
KNOWN_INODE = 150
"""More for an inode that the kernel knows, which it may be asked for again."""
MANY_WRITERS = 128 * MIB
"""More when many write at once: what each has in hand."""
PIN = "user.cachefs.pin"


@contextmanager
def bounded(mount: MountFactory, bound: int, allowance: int = 0) -> Iterator[Mounted]:
    """A mount whose daemon keeps to its memory, and whose store is sound and within its bound at the end."""
    m = mount("--max-size", f"{bound // MIB}M")
    with sampled_memory(m) as samples:
        yield m
    print(f"\nmemory: {max(samples) / MIB:.0f} MiB at most, {len(samples)} samples")
    assert max(samples) <= MEMORY + allowance
    m.umount()
    assert disk_use(m.store) <= bound
    assert complaints(m.store) == []


def rate(what: str, each: Callable[[int], object], numbers: Iterable[int]) -> int:
    """Call ``each`` for every number, and print how many that were in a second."""
    started, count = time.monotonic(), 0
    for number in numbers:
        each(number)
        count += 1
    seconds = time.monotonic() - started
    print(f"\n{what}: {count} in {seconds:.1f} s, {count / seconds:.0f}/s", end="")
    return count


def for_seconds(count: int, seconds: float) -> Iterator[int]:
    """0 … count, fewer when the time is up."""
    deadline = time.monotonic() + seconds
    for number in range(count):
        if time.monotonic() > deadline:
            return
        yield number


def absent(path: str) -> None:
    assert not os.path.exists(path)


def tiny(number: int) -> bytes:
    return random.Random(number).randbytes(1 + number % 100)


@pytest.mark.parametrize("count", [400, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_tiny_files(mount: MountFactory, count: int) -> None:
    """Of 1 to 100 bytes. The oldest go when their names fill the index; the newest are all there."""
    with bounded(mount, 2 * GIB, KNOWN_INODE * count) as m:

        def write(number: int) -> None:
            if number % 1_000 == 0:
                (m.path / f"{number // 1_000}").mkdir()
            path = m.path / f"{number // 1_000}/{number}"
            with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                os.write(fd, tiny(number))

        made = rate("written", write, for_seconds(count, 900))
        sync_directory(m.path)
        figures = m.stats()
        print(f"\n{figures['entries']} of {made} left, {figures['disk_bytes'] / MIB:.0f} MiB on disk", end="")
        assert figures["entries"] + figures["evicted_entries"] == made
        assert figures["entries"] >= min(made, 30_000)

        def read(number: int) -> None:
            assert (m.path / f"{number // 1_000}/{number}").read_bytes() == tiny(number)

        newest = range(max(0, made - 30_000), made)
        rate("read", read, newest if len(newest) < 3_000 else random.Random(1).sample(newest, 3_000))
        m.remount()
        read(made - 1)


@pytest.mark.parametrize("count", [600, pytest.param(100_000, marks=pytest.mark.soak)])
def test_a_crowded_directory(mount: MountFactory, count: int) -> None:
    bound = 64 * MIB if count < 10_000 else 8 * GIB
    with bounded(mount, bound, KNOWN_INODE * count) as m:
        names = [f"{number}-file" for number in range(count)]
        paths = [os.path.join(m.path, "d", name) for name in names]
        (m.path / "d").mkdir()
        rate("created", lambda n: os.mknod(paths[n]), range(count))
        found: list[str] = []
        rate("listings", lambda _: found.extend(os.listdir(m.path / "d")), range(2))
        assert sorted(found) == sorted(names * 2)
        rate("looked up", lambda n: os.stat(paths[n]), range(count))
        rate("looked up in vain", lambda n: absent(paths[n] + "x"), range(count))
        rate("renamed", lambda n: os.rename(paths[n], paths[n] + "x"), range(0, count, 10))
        rate("replaced", lambda n: os.rename(paths[n], paths[n] + "x"), range(1, count, 10))
        m.remount()
        assert len(os.listdir(m.path / "d")) == count
        with os.scandir(m.path / "d") as entries:
            gone = rate("unlinked while listed", lambda _: os.unlink(next(entries)), range(count))
            assert next(entries, None) is None
        assert gone == count
        (m.path / "d").rmdir()


@pytest.mark.parametrize("by", ["truncate", "write"])
def test_60_gib_of_nothing(mount: MountFactory, by: str) -> None:
    """A sparse file, far larger than the store."""
    size = 60 * GIB
    with bounded(mount, 64 * MIB) as m:
        with opened(m.path / "a", os.O_RDWR | os.O_CREAT) as fd:
            if by == "truncate":
                os.ftruncate(fd, size)
                os.pwrite(fd, b"the end", size - 7)
            else:
                assert os.pwrite(fd, b"the end", size - 7) == 7
            os.fsync(fd)
            os.pwrite(fd, b"middle", size // 2)
            assert os.fstat(fd).st_size == size
            assert os.pread(fd, 4_096, 0) == bytes(4_096)
            assert os.pread(fd, 10, size // 2 - 2) == b"\0\0middle\0\0"
            assert os.pread(fd, 100, size - 9) == b"\0\0the end"
            # Holes are not told apart from data; who asks must get an answer that loses nothing.
            assert os.lseek(fd, 0, os.SEEK_DATA) == 0
            assert os.lseek(fd, 0, os.SEEK_HOLE) == size
        m.remount()
        with opened(m.path / "a", os.O_RDWR) as fd:
            assert os.pread(fd, 100, size - 9) == b"\0\0the end"
            os.ftruncate(fd, size // 2 + 3)
            os.ftruncate(fd, size)
            assert os.pread(fd, 10, size // 2 - 2) == b"\0\0mid\0\0\0\0\0"
        assert m.stats()["stored_bytes"] < MIB
        os.unlink(m.path / "a")
        assert os.listdir(m.path) == []


@pytest.mark.soak
def test_a_copy_of_holes(mount: MountFactory) -> None:
    """Zeros share: 8 GiB of them fit where 64 MiB do."""
    size = 8 * GIB
    with bounded(mount, 64 * MIB) as m:
        with opened(m.path / "a", os.O_WRONLY | os.O_CREAT) as fd:
            os.pwrite(fd, b"the end", size - 7)
        shutil.copyfile(m.path / "a", m.path / "b")
        assert os.stat(m.path / "b").st_size == size
        with opened(m.path / "b", os.O_RDONLY) as fd:
            assert os.pread(fd, 100, size - 9) == b"\0\0the end"
            while part := os.read(fd, 16 * MIB):
                assert not part.strip(b"\0") or part.endswith(b"the end")


OFFSETS = [MAX_SIZE, MAX_SIZE + 1, 1 << 56, 1 << 62, (1 << 63) - 4096, (1 << 63) - 1]


def test_offsets_near_the_largest(mount: MountFactory) -> None:
    with bounded(mount, 64 * MIB) as m:
        path = m.path / "a"
        path.write_bytes(b"data")
        for offset in OFFSETS:
            with opened(path, os.O_RDWR) as fd:
                with fails(errno.EFBIG, errno.EINVAL):
                    os.pwrite(fd, b"xyz", offset)
                if offset > MAX_SIZE:
                    with fails(errno.EFBIG, errno.EINVAL):
                        os.ftruncate(fd, offset)
                    with fails(errno.EFBIG, errno.EINVAL):
                        os.truncate(path, offset)
                with contextlib.suppress(OSError):
                    assert os.pread(fd, 10, offset) == b""
            assert path.read_bytes() == b"data"
        os.truncate(path, MAX_SIZE)
        with opened(path, os.O_RDWR) as fd:
            assert os.pwrite(fd, b"xyz", MAX_SIZE - 3) == 3
            assert os.pread(fd, 10, MAX_SIZE - 4) == b"\0xyz"
            with contextlib.suppress(OSError):  # the kernel may split it
                assert os.pwrite(fd, b"z23", MAX_SIZE - 1) == 1
            assert os.pread(fd, 10, MAX_SIZE - 4) == b"\0xyz"
            with opened(path, os.O_WRONLY | os.O_APPEND) as end, fails(errno.EFBIG):
                os.write(end, b"x")
        m.umount()
        m.mount()
        assert os.stat(path).st_size == MAX_SIZE


@pytest.mark.parametrize("steps", [300, pytest.param(20_000, marks=pytest.mark.soak)])
def test_up_and_down(mount: MountFactory, steps: int) -> None:
    """Truncated to random sizes from 0 to the largest, with something written now and then."""
    chance = random.Random(steps)
    with bounded(mount, 64 * MIB) as m, opened(m.path / "a", os.O_RDWR | os.O_CREAT) as fd:
        written: dict[int, bytes] = {}
        for step in range(steps):
            size = chance.choice([0, 1, 4_095, MIB + 1, 1 << chance.randrange(48)]) + chance.randrange(3)
            size = min(size, MAX_SIZE)
            os.ftruncate(fd, size)
            written = {at: data[: max(0, size - at)] for at, data in written.items() if at < size}
            if size and chance.random() < 0.5:
                at = chance.randrange(size) // 16 * 16
                written[at] = b"%016d" % step
                os.pwrite(fd, written[at], at)
                size = max(size, at + 16)
            assert os.fstat(fd).st_size == size
            for at, data in written.items():
                assert os.pread(fd, len(data), at) == data
            if step % 50 == 0:
                os.fsync(fd)
                written = dict(chance.sample(sorted(written.items()), min(10, len(written))))


def test_names_that_look_like_units(mount: MountFactory) -> None:
    """Each is a file of its own, however its dots lie; under pressure they go, and nothing else happens."""
    names = ["a", "a.", "a..", "a.b", "a.b.c", "a..b", ".a", "..a", "...", "a.tmp", "a.lock", "." * 200]
    names += ["x" + ".y" * count for count in (1, 50, 127)] + [f"x.{number}" for number in range(200)] + ["x"]
    with bounded(mount, 64 * MIB) as m:
        for name in names:
            (m.path / name).write_bytes(os.fsencode(name) * 10)
        assert sorted(os.listdir(m.path)) == sorted(names)
        assert all((m.path / name).read_bytes() == os.fsencode(name) * 10 for name in names)
        for number in range(8):
            (m.path / f"new{number}").write_bytes(random.Random(number).randbytes(8 * MIB))
        left = {name for name in os.listdir(m.path) if not name.startswith("new")}
        assert {"a.tmp", "a.lock"} <= left <= set(names)
        unit = {name for name in names if name == "x" or name.startswith("x.")}
        assert unit <= left or not unit & left


def test_attributes_until_the_index_is_full(mount: MountFactory) -> None:
    """ENOSPC, not memory. What was set stays, and once some are removed others fit."""
    with bounded(mount, 64 * MIB) as m:
        path = m.path / "a"
        path.write_bytes(b"data")
        os.setxattr(path, PIN, b"1")
        (m.path / "other").write_bytes(b"other")
        values = [random.Random(number).randbytes(65_536) for number in range(400)]
        with fails(errno.ENOSPC):
            for number, value in enumerate(values):
                os.setxattr(path, f"user.{number:0240d}", value)
        names = [name for name in os.listxattr(path) if name != PIN]
        assert 50 < len(names) < 200
        m.remount()
        assert sorted(os.listxattr(path)) == sorted([*names, PIN])
        assert all(os.getxattr(path, name) == values[int(name[5:])] for name in names)
        for name in names:
            os.removexattr(path, name)
        for number in range(10):
            os.setxattr(path, f"user.{number}", values[number])
        (m.path / "dir").mkdir()
        assert path.read_bytes() == b"data"


def test_more_attribute_names_than_can_be_listed(mount: MountFactory) -> None:
    """The kernel's limit is 64 KiB of names."""
    with bounded(mount, 64 * MIB) as m:
        (m.path / "a").touch()
        for number in range(300):
            os.setxattr(m.path / "a", f"user.{number:0250d}", b"x")
        with fails(errno.E2BIG):
            os.listxattr(m.path / "a")
        for number in range(100):
            os.removexattr(m.path / "a", f"user.{number:0250d}")
        assert len(os.listxattr(m.path / "a")) == 200


@pytest.mark.soak
def test_directories_until_the_index_is_full(mount: MountFactory) -> None:
    """Directories are not evicted. They can be removed when nothing more fits."""
    with bounded(mount, 64 * MIB, KNOWN_INODE * 100_000) as m:
        made = 0
        with fails(errno.ENOSPC):
            for made in range(100_000):
                (m.path / f"{made}").mkdir()
        assert made > 10_000
        m.remount()
        assert len(os.listdir(m.path)) == made
        with fails(errno.ENOSPC):
            (m.path / "a").touch()
        rate("removed", lambda n: os.rmdir(m.path / f"{n}"), range(made))
        (m.path / "a").write_bytes(b"data")


@pytest.mark.parametrize("depth", [300, pytest.param(1_000, marks=pytest.mark.soak)])
def test_deep_trees(mount: MountFactory, depth: int) -> None:
    with bounded(mount, 64 * MIB) as m:
        name = "d" * 100
        fd = os.open(m.path, os.O_RDONLY | os.O_DIRECTORY)
        for _ in range(depth):
            os.mkdir(name, dir_fd=fd)
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
        with opened(Path(f"/proc/self/fd/{fd}/leaf"), os.O_WRONLY | os.O_CREAT) as leaf:
            os.write(leaf, b"deep")
        os.fsync(fd)
        os.close(fd)
        with fails(errno.ENAMETOOLONG):
            os.stat(m.path / "/".join([name] * 50))
        done = run_cachefs("ls", "--json", m.path)
        assert done.returncode == 0, done.stderr
        assert f"{'/'.join([name] * depth)}/leaf" in done.stdout
        m.remount()
        os.rename(m.path / name, m.path / "moved")
        shutil.rmtree(m.path / "moved") if depth < 500 else remove_deep(m.path / "moved", name)
        assert os.listdir(m.path) == []


def remove_deep(top: Path, name: str) -> None:
    """What lies below is moved up until nothing is deep; no tool's stack is as deep as this tree."""
    while (top / name).exists():
        if (top / name / name).exists():
            os.rename(top / name / name, top / "next")
            os.rmdir(top / name)
            os.rename(top / "next", top / name)
        else:
            os.unlink(top / name / "leaf")
            os.rmdir(top / name)
    top.rmdir()


@pytest.mark.parametrize("order", ["in order", "out of order"])
@pytest.mark.parametrize(("count", "size"), [(8, 2), pytest.param(64, 24, marks=pytest.mark.soak)])
def test_many_writers_at_once(mount: MountFactory, count: int, size: int, order: str) -> None:
    """What they have written and is not placed yet is bounded for all of them together; sizes in MiB."""
    pieces = list(range(0, size * MIB, 65_536))
    with bounded(mount, 4 * GIB, MANY_WRITERS) as m:

        def write(number: int) -> None:
            chance = random.Random(number)
            offsets = pieces if order == "in order" else chance.sample(pieces, len(pieces))
            with opened(m.path / f"{number}", os.O_RDWR | os.O_CREAT) as fd:
                for offset in offsets:
                    os.pwrite(fd, random.Random(number * 10_000 + offset).randbytes(65_536), offset)

        with ThreadPoolExecutor(count) as writers:
            list(writers.map(write, range(count)))
        for number in range(count):
            data = (m.path / f"{number}").read_bytes()
            assert all(
                data[at : at + 65_536] == random.Random(number * 10_000 + at).randbytes(65_536)
                for at in pieces
            )


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_open_handles(mount: MountFactory, count: int) -> None:
    """All of them written to and read; nothing else has to go for what they might become."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * count:
        pytest.skip(f"may open {hard} files only")
    with bounded(mount, 300 * MIB, OPEN_FILE * count) as m:
        (m.path / "old").write_bytes(b"old" * 1_000_000)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * count), hard))
        descriptors: list[int] = []
        try:
            flags = os.O_RDWR | os.O_CREAT
            rate("opened", lambda n: descriptors.append(os.open(m.path / f"{n}", flags)), range(count))
            rate("written", lambda n: os.write(descriptors[n], b"%d" % n), range(count))
            for number, fd in enumerate(descriptors):
                assert os.pread(fd, 10, 0) == b"%d" % number
                assert stat.S_ISREG(os.fstat(fd).st_mode)
        finally:
            rate("closed", lambda n: os.close(descriptors[n]), range(len(descriptors)))
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert m.stats()["evicted_entries"] == 0
        assert (m.path / "old").read_bytes() == b"old" * 1_000_000
        assert all((m.path / f"{number}").read_bytes() == b"%d" % number for number in range(0, count, 17))


@pytest.mark.soak
def test_memory_is_given_back(mount: MountFactory) -> None:
    """By a daemon that has nothing to do for five minutes."""
    m = mount("--max-size", "2G")
    idle = memory_of(m.pid)
    for number in range(3):
        (m.path / f"{number}").write_bytes(random.Random(number).randbytes(200 * MIB))
    assert memory_of(m.pid) > idle + 64 * MIB
    assert eventually(lambda: memory_of(m.pid) < idle + 32 * MIB, 400)
