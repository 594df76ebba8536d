"""Who can look at what: other users at nothing, the log's readers at no content and no names."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..clients.processes import child, expect
from ..running import Mounted, eventually
from ..states import build
from .conftest import MountFactory
from .kernel import fails
from .test_damage import damage
from .test_overwrite import NEW, OLD, half_a_save

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
NOBODY = 65534


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that everybody may enter, so that it is not its parent that keeps them out."""
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


def as_nobody(calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    """What each call ends with for another user: an errno's name, or ``done``."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            for name, call in calls.items():
                try:
                    call()
                    result = "done"
                except OSError as error:
                    result = errno.errorcode[error.errno or 0]
                os.write(theirs, f"{name}={result}\n".encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours) as pipe:
        results = dict(line.rsplit("=", 1) for line in pipe.read().splitlines())
    os.waitpid(pid, 0)
    assert results.keys() == calls.keys()
    return results


@needs_root
@pytest.mark.parametrize("options", [(), ("--allow-other",)])
def test_other_users_stay_out(open_place: Path, options: tuple[str, ...]) -> None:
    """Promise P15. Whatever modes the client asked for; with --allow-other, too, unless they own it."""
    old = os.umask(0)
    m = Mounted(open_place / "store", open_place / "mnt")
    m.path.mkdir(mode=0o755)
    m.mount("--max-size", "64M", *options)
    try:
        folder, file = m.path / "folder", m.path / "folder" / "file"
        folder.mkdir(mode=0o777)
        file.write_bytes(b"secret")
        for path in (m.path, folder, file):
            path.chmod(0o777)
        os.setxattr(file, "user.note", b"secret")
        places = [folder, file, m.store / "index", m.store / "index" / "data.mdb", m.store / "format"]
        places += [*(m.store / "volumes").rglob("*"), m.store / "lock", m.store / "cachefs.log"]
        calls: dict[str, Callable[[], object]] = {
            f"list {m.path}": lambda: os.listdir(m.path),
            f"list {m.store}": lambda: os.listdir(m.store),
            f"create in {m.path}": lambda: (m.path / "mine").touch(),
            f"create in {m.store}": lambda: (m.store / "mine").touch(),
            "rename": lambda: os.rename(file, m.path / "taken"),
            "unlink": lambda: os.unlink(file),
            "xattr": lambda: os.getxattr(file, "user.note"),
            "truncate": lambda: os.truncate(file, 0),
        }
        for path in places:
            calls[f"stat {path}"] = lambda path=path: os.stat(path)  # type: ignore[misc]
            calls[f"open {path}"] = lambda path=path: os.open(path, os.O_RDONLY)  # type: ignore[misc]
        results = as_nobody(calls)
        assert set(results.values()) == {"EACCES"}, results
        for path in (m.path, folder, file):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
        assert file.read_bytes() == b"secret"
        for path in [m.store, *m.store.rglob("*")]:
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    finally:
        os.umask(old)
        wrong = m.clean_up()
    assert not wrong, wrong


def test_the_log_tells_nothing(mount: MountFactory) -> None:
    """Promise P16. Most verbose, and with everything in it that can go wrong: no names, tokens or content."""
    m = mount("--max-size", "64M", "--debug")
    m.expect_errors()
    secret = "the-name-is-a-prompts-hash"
    folder = m.path / f"{secret}-folder"
    folder.mkdir()
    text = b"Once upon a time there was a secret. " * 3_000
    tokens = [0x5EC0000 + number for number in range(100)]
    state = build.ggsq(build.packed(tokens), build.kv(range(100), width=512))
    (folder / f"{secret}-state").write_bytes(state)
    (folder / f"{secret}-text").write_bytes(text)
    os.setxattr(folder / f"{secret}-text", "user.secret-key", b"secret-value")
    blocks = random.Random(5).randbytes(1_000_000)
    (folder / f"{secret}-damaged").write_bytes(blocks)
    (folder / f"{secret}-torn").write_bytes(OLD)
    with child(half_a_save, folder / f"{secret}-torn", False) as (process, pipe):
        expect(pipe)
        process.kill()
    assert eventually(lambda: "torn" in m.log())
    m.umount()
    damage(m.store, blocks[500_000:500_064])
    m.mount("--debug")
    with fails(errno.EIO):
        (folder / f"{secret}-damaged").read_bytes()
    with fails(errno.ENOSPC), (folder / f"{secret}-large").open("wb", buffering=0) as file:
        for _ in range(100):
            file.write(os.urandom(1 << 20))
    os.kill(m.pid, signal.SIGUSR1)
    assert eventually(lambda: "trio tasks" in m.log())
    m.umount()
    log = m.log()
    for word in (secret, "secret-key", "secret-value", "Once upon", str(tokens[5]), hex(tokens[5])[2:]):
        assert word not in log
    raw = b"".join(path.read_bytes() for path in m.store.glob("cachefs.log*"))
    for part in (tokens[5].to_bytes(4, "little"), NEW[-64:], OLD[-64:], blocks[500_000:500_016]):
        assert part not in raw
        assert part.hex() not in log
