"""Modes, owners and times; what the filesystem says of its size."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import time
from pathlib import Path

import pytest

from ..running import Mounted, eventually
from .conftest import MountFactory
from .kernel import elsewhere, fails, opened

UTIME_NOW, UTIME_OMIT = (1 << 30) - 1, (1 << 30) - 2
PIN = "user.cachefs.pin"
_libc = ctypes.CDLL(None, use_errno=True)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


class _Times(ctypes.Structure):
    _fields_ = [(f"{part}{n}", ctypes.c_long) for n in (0, 1) for part in ("seconds", "ns")]


def set_times(path: Path, atime: int | tuple[int, int], mtime: int | tuple[int, int]) -> None:
    """utimensat(2): each time UTIME_NOW, UTIME_OMIT or (seconds, nanoseconds)."""
    values = [value if isinstance(value, tuple) else (0, value) for value in (atime, mtime)]
    times = _Times(*values[0], *values[1])
    if _libc.utimensat(-100, os.fsencode(path), ctypes.byref(times), 0):
        raise OSError(ctypes.get_errno(), "utimensat")


def times_of(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_atime_ns, status.st_mtime_ns


def mode_of(path: Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


# --- modes and owners


def test_whatever_is_asked_for_stays_private(shared: Mounted, here: Path) -> None:
    old = os.umask(0)
    try:
        os.close(os.open(here / "file", os.O_CREAT | os.O_WRONLY, 0o666))
        (here / "dir").mkdir(0o777)
        os.mknod(here / "node", stat.S_IFREG | 0o644)
    finally:
        os.umask(old)
    expected = {"file": 0o600, "node": 0o600, "dir": 0o700}
    assert {name: mode_of(here / name) for name in expected} == expected
    for asked, kept in ((0o644, 0o600), (0o400, 0o400), (0o7755, 0o700), (0, 0), (0o600, 0o600)):
        os.chmod(here / "file", asked)
        assert mode_of(here / "file") == kept
    with opened(here / "file", os.O_RDONLY) as fd:
        os.fchmod(fd, 0o555)
        assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o500
    os.chmod(here / "dir", 0o1777)
    shared.remount()
    assert {name: mode_of(here / name) for name in expected} == expected | {"file": 0o500}
    assert mode_of(shared.path) == 0o700


@needs_root
def test_owners(shared: Mounted, here: Path) -> None:
    (here / "file").touch()
    os.chown(here / "file", 1234, 4321)
    os.chown(here / "file", -1, 77)
    os.chown(here, 5, -1)
    shared.remount()
    assert (os.stat(here / "file").st_uid, os.stat(here / "file").st_gid) == (1234, 77)
    assert (os.stat(here).st_uid, os.stat(here).st_gid) == (5, os.getgid())
    os.chown(here, 0, 0)


@needs_root
def test_other_users_stay_out(shared: Mounted, here: Path) -> None:
    (here / "file").write_bytes(b"secret")
    pid = os.fork()
    if pid == 0:
        refused = 0
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        for path in (shared.path, here, here / "file", shared.store, shared.store / "index"):
            for call in (os.stat, os.listdir):
                try:
                    call(path)
                except PermissionError:
                    refused += 1
        # The store's own directory may be looked at, like anything in its parent.
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) >= 9


# --- times


@pytest.mark.parametrize("kind", ["file", "dir"])
def test_times_are_set_and_left_alone(shared: Mounted, here: Path, kind: str) -> None:
    path = here / kind
    path.mkdir() if kind == "dir" else path.write_bytes(b"data")
    set_times(path, (1_000_000_000, 123_456_789), (2_000_000_000, 987_654_321))
    assert times_of(path) == (1_000_000_000_123_456_789, 2_000_000_000_987_654_321)
    set_times(path, UTIME_OMIT, (3, 4))
    set_times(path, (5, 6), UTIME_OMIT)
    set_times(path, UTIME_OMIT, UTIME_OMIT)
    shared.remount()
    assert times_of(path) == (5_000_000_006, 3_000_000_004)
    before = time.time_ns() - 50_000_000  # the kernel's clock goes in steps
    set_times(path, UTIME_NOW, UTIME_OMIT)
    atime, mtime = times_of(path)
    assert before <= atime <= time.time_ns()
    assert mtime == 3_000_000_004
    set_times(path, (7, 0), UTIME_NOW)
    atime, mtime = times_of(path)
    assert atime == 7_000_000_000
    assert before <= mtime <= time.time_ns()
    assert os.stat(path).st_ctime_ns >= before


def test_times_of_other_ages(shared: Mounted, here: Path) -> None:
    expected = {str(s): (s * 10**9 + 5, s * 10**9 + 7) for s in (-(10**9), -1, 0, 1 << 31, 1 << 33)}
    for name, times in expected.items():
        (here / name).touch()
        os.utime(here / name, ns=times)
    shared.remount()
    assert {name: times_of(here / name) for name in expected} == expected


def test_times_that_were_set_outlive_the_close(here: Path) -> None:
    with opened(here / "a", os.O_WRONLY | os.O_CREAT) as fd:
        os.write(fd, b"x" * 3_000_000)
        os.utime(fd, ns=(1, 2))
    assert times_of(here / "a") == (1, 2)
    with opened(here / "a", os.O_RDONLY) as fd:
        os.read(fd, 100)
    assert times_of(here / "a")[1] == 2


def test_a_write_moves_mtime_and_a_chmod_only_ctime(here: Path) -> None:
    (here / "a").write_bytes(b"1")
    os.utime(here / "a", ns=(1, 1))
    was = os.stat(here / "a").st_ctime_ns
    os.chmod(here / "a", 0o400)
    assert os.stat(here / "a").st_mtime_ns == 1
    assert os.stat(here / "a").st_ctime_ns >= was
    os.chmod(here / "a", 0o600)
    with opened(here / "a", os.O_WRONLY) as fd:
        os.write(fd, b"2")
        assert os.stat(here / "a").st_mtime_ns >= was
    assert os.stat(here / "a").st_mtime_ns >= was


CHANGES = {
    "create": lambda d: (d / "new").touch(),
    "mkdir": lambda d: (d / "new").mkdir(),
    "unlink": lambda d: os.unlink(d / "file"),
    "rmdir": lambda d: os.rmdir(d / "sub"),
    "rename": lambda d: os.rename(d / "file", d / "renamed"),
    "replace": lambda d: os.rename(d / "file", d / "other"),
    "move out": lambda d: os.rename(d / "file", d.parent / "outside"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_directorys_times_move_at_once_for_others(here: Path, change: str) -> None:
    """Programs that watch a directory by its mtime must see each change, while it is held open, too."""
    watched = here / "watched"
    (watched / "sub").mkdir(parents=True)
    (watched / "file").touch()
    (watched / "other").touch()
    os.utime(watched, ns=(1, 1))
    look = "s = os.stat(sys.argv[1]); print(s.st_mtime_ns, s.st_ctime_ns, s.st_nlink)"
    mtime, ctime, _ = map(int, elsewhere(look, watched).split())
    assert mtime == 1
    CHANGES[change](watched)
    now, then, nlink = map(int, elsewhere(look, watched).split())
    assert now > 1
    assert then >= ctime
    assert (now, then) == (os.stat(watched).st_mtime_ns, os.stat(watched).st_ctime_ns)
    assert nlink == 2 + sum(path.is_dir() for path in watched.iterdir())


def test_a_write_leaves_the_directory_alone(here: Path) -> None:
    (here / "a").touch()
    os.utime(here, ns=(1, 1))
    (here / "a").write_bytes(b"data")
    os.chmod(here / "a", 0o400)
    assert os.stat(here).st_mtime_ns == 1


def test_sizes_in_blocks(here: Path) -> None:
    """du and stdio go by these."""
    (here / "a").write_bytes(b"x" * 1_000_001)
    status = os.stat(here / "a")
    assert status.st_blocks == -(-1_000_001 // 512)
    assert status.st_blksize >= 8192
    assert len({os.stat(path).st_dev for path in (here, here / "a")}) == 1


# --- the whole filesystem


def free(path: Path) -> int:
    found = os.statvfs(path)
    assert found.f_bavail == found.f_bfree
    return found.f_bavail * found.f_frsize


def test_what_df_shows(shared: Mounted, here: Path) -> None:
    found = os.statvfs(here)
    assert found.f_blocks * found.f_frsize == 512 << 20
    assert 0 < found.f_bfree < found.f_blocks
    assert found.f_namemax == 255
    assert found.f_files > found.f_ffree > 0
    # As much can be written as it says, now or after eviction.
    assert free(here) > 400 << 20


def test_pinned_files_lower_what_is_free(here: Path) -> None:
    before = free(here)
    (here / "a").write_bytes(os.urandom(20 << 20))
    os.setxattr(here / "a", PIN, b"1")  # maybe before the close is through: it counts once all the same
    assert before - free(here) == pytest.approx(20 << 20, rel=0.1)
    os.removexattr(here / "a", PIN)
    assert eventually(lambda: free(here) > before - (2 << 20))
    os.setxattr(here / "a", PIN, b"1")
    assert before - free(here) == pytest.approx(20 << 20, rel=0.1)
    os.removexattr(here / "a", PIN)
    assert free(here) == pytest.approx(before, abs=1 << 20)
    os.setxattr(here / "a", PIN, b"1")
    os.unlink(here / "a")
    assert eventually(lambda: free(here) > before - (2 << 20))


def test_not_more_is_free_than_can_be_written(mount: MountFactory) -> None:
    """Once most is pinned, what df shows as free can be written, and little more."""
    m = mount("--max-size", "128M")
    for number in range(3):
        (m.path / f"pinned-{number}").write_bytes(os.urandom(20 << 20))
        os.setxattr(m.path / f"pinned-{number}", PIN, b"1")
    room = free(m.path)
    written = 0
    with opened(m.path / "a", os.O_WRONLY | os.O_CREAT) as fd:
        with fails(errno.ENOSPC):
            while written < 128 << 20:
                written += os.write(fd, os.urandom(1 << 20))
        # The last bytes are found out about late; what was taken is there.
        assert os.fstat(fd).st_size <= written
    assert written == pytest.approx(room, rel=0.1)
    assert all((m.path / f"pinned-{number}").stat().st_size == 20 << 20 for number in range(3))
