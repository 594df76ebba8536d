"""The disk under the store answers with I/O errors: said as what it is, and nothing kept is lost."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ..crash.disk import FailingDisk, make_failing_disk
from ..crash.sound import complaints
from ..running import Mounted, eventually, run_cachefs
from .kernel import can_put, fails, opened, put, sync_directory

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FailingDisk]:
    made = make_failing_disk(tmp_path, 160 * MIB)
    yield made
    made.down()


@pytest.fixture
def m(disk: FailingDisk, tmp_path: Path) -> Iterator[Mounted]:
    mounted = Mounted(disk.path / "store", tmp_path / "mnt")
    mounted.path.mkdir()
    # On the broken disk the log may be lost with all else.
    mounted.mount("--max-size", "100M", "--log-file", str(tmp_path / "log"))
    yield mounted
    disk.mends()
    wrong = mounted.clean_up()
    assert not wrong, wrong


def numbers(seed: int) -> bytes:
    """3 MiB that compress a little."""
    return np.random.default_rng(seed).normal(size=3 << 19).astype(np.float16).tobytes()


def content(number: int, size: int = 3 * MIB) -> bytes:
    return random.Random(number).randbytes(size)


def test_a_broken_disk_is_no_full_disk(m: Mounted, disk: FailingDisk, tmp_path: Path) -> None:
    """Promise P10. write, fsync and close say EIO; once the disk works again, so does the mount."""
    put(m.path / "kept", content(1))
    disk.breaks()
    with fails(errno.EIO):
        put(m.path / "new", content(2))
    fd = os.open(m.path / "new", os.O_WRONLY)
    with fails(errno.EIO):
        os.write(fd, b"more")
    with fails(errno.EIO):
        os.fsync(fd)
    with fails(errno.EIO):
        os.close(fd)
    with fails(errno.EIO):
        sync_directory(m.path)
    assert (m.path / "kept").read_bytes() == content(1)
    done = run_cachefs("stats", m.path)
    assert done.returncode == 0
    assert "cannot write to its store (Input/output error; see " in done.stderr
    log = tmp_path / "log"
    assert log.read_text().count("the store cannot be written") == 1
    assert "Traceback" not in log.read_text()
    disk.mends()
    assert eventually(lambda: "can be written again" in log.read_text())
    # The kernel tells of a failed write once for each file, be it later.
    assert eventually(lambda: can_put(m.path / "after", content(3)))
    m.umount()
    disk.forget()  # what seems to be there may lie in the page cache only
    m.mount()
    assert (m.path / "kept").read_bytes() == content(1)
    assert (m.path / "after").read_bytes() == content(3)


@pytest.mark.parametrize("mode", ["off", "always"])
def test_a_disk_that_cannot_be_read(m: Mounted, disk: FailingDisk, mode: str, tmp_path: Path) -> None:
    """Is an error of the reads that need it, not the end of the mount; nor is removing what lies there."""
    m.expect_errors()
    m.remount("--compress", mode)
    data = {name: numbers(n) for n, name in enumerate("abc")}
    for name, each in data.items():
        put(m.path / name, each)
    m.umount()
    disk.forget()
    m.mount("--log-file", str(tmp_path / "log"))
    put(m.path / "copy", data["a"])  # compared with what lies there, so the pages that lead there are mapped
    for path in (m.store / "volumes/0001/data.mdb", disk.image):
        with opened(path, os.O_RDONLY) as fd:  # what is mapped stays
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    disk.unreadable.touch()
    for _ in range(2):
        with fails(errno.EIO):
            (m.path / "c").read_bytes()
    (m.path / "b").unlink()
    assert run_cachefs("stats", m.path).returncode == 0
    assert m.alive
    disk.mends()
    assert (m.path / "c").read_bytes() == data["c"]


@pytest.mark.soak
def test_a_disk_that_breaks_again_and_again(m: Mounted, disk: FailingDisk) -> None:
    """Whenever it breaks: what was synced stays, and the store is sound after each time."""
    m.expect_errors()
    chance = random.Random(7)
    kept: dict[str, int] = {}
    for turn in range(30):
        for name in map(str, range(6)):
            if name == "3":
                disk.breaks()
            number = turn * 10 + int(name)
            try:
                put(m.path / f"{turn}-{name}", content(number, chance.randrange(MIB)))
                kept[f"{turn}-{name}"] = number
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
            time.sleep(chance.random() / 5)
        disk.mends()
        assert eventually(lambda: not fails_to_sync(m.path))
        if turn % 5 == 4:
            m.umount()
            disk.forget()
            assert complaints(m.store) == []
            m.mount()
        for name, number in kept.items():
            data = (m.path / name).read_bytes()
            assert data
            assert content(number, len(data)) == data
        for name in list(kept)[:-10]:
            os.unlink(m.path / name)
            del kept[name]


def fails_to_sync(directory: Path) -> bool:
    try:
        sync_directory(directory)
    except OSError:
        return True
    return False
