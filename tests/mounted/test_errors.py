"""Errors in the daemon's own code cost one call, never the mount."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..running import Mounted, environment, eventually
from ..states import build
from .kernel import fails, opened, sync_directory

SABOTAGE = """
import pathlib, sys
import lmdb
from cachefs.cli import main
from cachefs.mount.content import Content
from cachefs.states import Cutter
from cachefs.store import Store, assemble
from cachefs.store.place import Placer
from cachefs.store.tree import Tree
from cachefs.store.writer import Writer

switch = pathlib.Path(sys.argv[1])

def fail(when, owner, name, error=ValueError):
    real = getattr(owner, name)
    def wrapper(*args, **kwargs):
        if switch.exists() and switch.read_text() == when:
            raise error("made to fail")
        return real(*args, **kwargs)
    setattr(owner, name, wrapper)

for name in ("require", "create", "unlink", "children", "rename", "change"):
    fail("handlers", Tree, name, KeyError)
fail("handlers", Tree, "xattr", lmdb.CorruptedError)
fail("cutting", Cutter, "feed")
fail("cutting the end", Cutter, "finish")
fail("placing", Placer, "place")
fail("memory", Placer, "place", MemoryError)
fail("reading", assemble, "read")
fail("reading", assemble, "read_cached")
fail("committing", Writer, "commit")
fail("disk", Writer, "commit", OSError)
fail("closing", Content, "release")
fail("evicting", Store, "index_full")
sys.exit(main(["mount", "--max-size", "400M", *sys.argv[2:]]))
"""
"""The daemon with functions that fail while the switch, a file, says so."""


class Sabotaged(Mounted):
    """A mount whose daemon can be made to fail."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "store", folder / "mnt")
        self.path.mkdir()
        self.expect_errors()
        self._switch = folder / "fail"
        done = subprocess.run(
            [sys.executable, "-c", SABOTAGE, self._switch, self.store, self.path],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment(),
        )
        assert done.returncode == 0, done.stderr
        self._seen = 0

    def fail(self, what: str) -> None:
        self._seen = len(self.log())
        temporary = self._switch.with_suffix(".tmp")
        temporary.write_text(what)
        temporary.rename(self._switch)

    def mend(self) -> None:
        self._switch.unlink()

    def failed(self) -> bool:
        """Whether the log tells of a failure since `fail`."""
        return "made to fail" in self.log()[self._seen :]


@pytest.fixture(scope="module")
def m(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sabotaged]:
    mounted = Sabotaged(tmp_path_factory.mktemp("errors"))
    yield mounted
    wrong = mounted.clean_up()
    assert not wrong, wrong


HANDLERS: dict[str, Callable[[Path], object]] = {
    "lookup": lambda d: os.stat(d / "unknown"),
    "setattr": lambda d: os.chmod(d / "known", 0o400),
    "create": lambda d: (d / "new").touch(),
    "unlink": lambda d: os.unlink(d / "known"),
    "children": lambda d: os.listdir(d),
    "xattr": lambda d: os.getxattr(d / "known", "user.a"),
    "rename": lambda d: os.rename(d / "known", d / "other"),
}


def test_errors_in_handlers(m: Sabotaged) -> None:
    """Whatever a handler raises becomes EIO for its caller."""
    here = m.path / "handlers"
    here.mkdir()
    (here / "known").write_bytes(b"data")
    m.fail("handlers")
    for call in HANDLERS.values():
        with fails(errno.EIO):
            call(here)
    m.mend()
    assert m.alive
    assert (here / "known").read_bytes() == b"data"
    assert os.listdir(here) == ["known"]


WORKERS = {
    "cutting": {"save"},
    "cutting the end": set[str](),
    "placing": {"save"},
    "memory": {"save"},
    "reading": {"load"},
    "committing": {"save", "sync"},
    "disk": {"save", "sync"},
    "closing": set[str](),
    "evicting": set[str](),
}
"""What fails, and the calls that must say so."""


def save(path: Path, data: bytes) -> None:
    with opened(path, os.O_WRONLY | os.O_CREAT) as fd:
        os.write(fd, data)
        os.fsync(fd)


@pytest.mark.parametrize("worker", WORKERS)
def test_errors_in_the_background(m: Sabotaged, worker: str) -> None:
    """A worker that fails costs the call that needs it; afterwards all goes on."""
    here = m.path / worker
    here.mkdir()
    chance = random.Random(worker)
    old, new = chance.randbytes(6_000_000), chance.randbytes(6_000_000)
    (here / "old").write_bytes(old)
    sync_directory(here)
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: save(here / "new", new),
        "load": lambda: (here / "old").read_bytes(),
        "sync": lambda: sync_directory(here),
    }
    with opened(here / "old", os.O_RDONLY) as fd:  # not to be read from the page cache
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    m.fail(worker)
    wrong = {}
    for name, call in calls.items():
        try:
            call()
        except OSError as error:
            wrong[name] = error.errno
    assert set(wrong) == WORKERS[worker]
    assert set(wrong.values()) <= {errno.EIO, errno.ENOSPC}
    if worker == "evicting":
        assert eventually(m.failed)
    os.statvfs(m.path)
    m.mend()
    assert m.alive
    (here / "after").write_bytes(new)
    sync_directory(here)
    assert (here / "after").read_bytes() == new
    assert (here / "old").read_bytes() == old


def test_commits_go_on_after_errors(m: Sabotaged) -> None:
    """Those nobody waits for, too."""
    m.fail("committing")
    (m.path / "a").write_bytes(b"data")
    assert eventually(m.failed)
    m.mend()
    before = m.stats()["entries"]
    (m.path / "b").write_bytes(b"data")
    assert eventually(lambda: m.stats()["entries"] > before)
    assert m.alive


def test_a_close_that_fails_leaves_nothing_behind(m: Sabotaged) -> None:
    """The file is not taken for open for ever: its room comes back when it is removed."""
    sync_directory(m.path)
    before = m.stats()["stored_bytes"]
    data = os.urandom(4_000_000)
    (m.path / "a").write_bytes(data)
    with opened(m.path / "a", os.O_RDWR) as fd:
        os.pwrite(fd, b"changed", 5)
        os.fsync(fd)
        m.fail("closing")
    os.sync()
    assert eventually(m.failed)
    m.mend()
    assert (m.path / "a").read_bytes() == data[:5] + b"changed" + data[12:]
    os.unlink(m.path / "a")
    sync_directory(m.path)
    assert m.stats()["stored_bytes"] <= before


@pytest.mark.parametrize("what", ["placing", "cutting the end"])
def test_a_save_that_fails_leaves_the_version_before(m: Sabotaged, what: str) -> None:
    """As one that was cut off does. Its close was answered before that showed: the next sync says so."""
    positions = range(1_000)
    old, new = (build.ggsq(positions, build.kv(positions, width=1024, salt=salt)) for salt in (1, 2))
    path = m.path / "state"
    path.write_bytes(old)
    sync_directory(m.path)
    m.fail(what)
    path.write_bytes(new)
    assert eventually(m.failed)
    m.mend()
    assert eventually(lambda: path.read_bytes() == old)
    with fails(errno.EIO):
        sync_directory(m.path)
    sync_directory(m.path)
    path.write_bytes(new)
    assert path.read_bytes() == new
