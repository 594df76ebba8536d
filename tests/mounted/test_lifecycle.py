"""From mounting to the daemon's end, with real mounts."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs.mount import mountpoint as places
from cachefs.mount.processes import daemons_of, wait_for_end

from ..running import TIMEOUT, Mounted, command, environment, eventually, run_cachefs

Mount = Callable[..., Mounted]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def put(path: Path, data: bytes) -> None:
    """Write as a careful client does."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """(store, mountpoint) for mounts made by hand; nothing of them is left."""
    store, mnt = tmp_path / "store", tmp_path / "mnt"
    mnt.mkdir()
    yield store, mnt
    if places.mounted_at(mnt):
        subprocess.run(["fusermount3", "-u", "-z", mnt], check=False)
    for pid in wait_for_end(daemons_of(store), 5):
        os.kill(pid, signal.SIGKILL)


# --- starting


def test_background_mount_is_usable_when_it_returns(mount: Mount) -> None:
    m = mount("--max-size", "100M")
    assert os.listdir(m.path) == []
    put(m.path / "a", b"hello")
    assert (m.path / "a").read_bytes() == b"hello"
    mounted = places.mounted_at(m.path)
    assert mounted is not None
    assert (mounted.fstype, mounted.source) == ("fuse.cachefs", str(m.store))
    assert f"at most 100 MiB, pid {m.pid}" in m.log()


@pytest.mark.parametrize("given", ["", "glibc.malloc.perturb=0", "glibc.malloc.hugetlb=0"])
def test_the_daemon_asks_for_huge_pages(given: str, folders: tuple[Path, Path]) -> None:
    """Unless its user has decided about them."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("needs glibc")
    store, mnt = folders
    done = subprocess.run(
        command("mount", store, mnt), env={**environment(), "GLIBC_TUNABLES": given}, timeout=TIMEOUT
    )
    assert done.returncode == 0
    (pid,) = daemons_of(store)
    of_daemon = Path(f"/proc/{pid}/environ").read_bytes()
    assert (b"glibc.malloc.hugetlb=1" in of_daemon) is ("hugetlb" not in given)
    assert given.encode() in of_daemon
    assert run_cachefs("umount", mnt).returncode == 0


def test_a_program_that_loses_the_setting(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """As the C library takes it from a python with capabilities of its own: no reason to ask for ever."""
    store, mnt = folders
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ.pop('GLIBC_TUNABLES', None)\n")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    done = subprocess.run(command("mount", store, mnt), env=environment(PYTHONPATH=path), timeout=10)
    assert done.returncode == 0
    assert run_cachefs("umount", mnt).returncode == 0


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_caller_that_closed_its_streams(closed: str, folders: tuple[Path, Path]) -> None:
    """The daemon has its own all the same: what is written there must not end in a file of the store."""
    store, mnt = folders
    line = f"{shlex.join(command('mount', store, mnt))} {closed}"
    assert subprocess.run(["sh", "-c", line], env=environment(), timeout=TIMEOUT).returncode == 0
    (pid,) = daemons_of(store)
    assert [os.readlink(f"/proc/{pid}/fd/{number}") for number in (0, 1, 2)] == ["/dev/null"] * 3
    assert run_cachefs("umount", mnt).returncode == 0


def test_the_daemon_belongs_to_nobody(mount: Mount) -> None:
    m = mount()
    process = Path(f"/proc/{m.pid}")
    status = (process / "status").read_text()
    assert os.getsid(m.pid) != os.getsid(0)
    assert os.readlink(process / "cwd") == "/"
    assert {os.readlink(process / "fd" / fd) for fd in "012"} == {"/dev/null"}
    assert re.search(r"^Umask:\s0077$", status, re.MULTILINE)


def test_the_daemon_keeps_nothing_of_its_caller_open(mount: Mount, tmp_path: Path) -> None:
    """Like the lock in `flock FILE cachefs mount …`."""
    with (tmp_path / "lock").open("w") as lock:
        os.set_inheritable(lock.fileno(), True)
        store, mnt = tmp_path / "store", tmp_path / "mnt"
        mnt.mkdir()
        done = run_cachefs("mount", "--max-size", "64M", store, mnt, close_fds=False)
        assert done.returncode == 0
        (pid,) = daemons_of(store)
        fds = Path(f"/proc/{pid}/fd")
        assert str(tmp_path / "lock") not in {os.readlink(fd) for fd in fds.iterdir() if fd.is_symlink()}
    assert run_cachefs("umount", mnt).returncode == 0


def test_a_new_store_says_its_bound(mount: Mount) -> None:
    m = mount()
    assert re.fullmatch(r"cachefs: new store .*, at most .* \(--max-size sets another bound\)\n", m.notes)
    assert m.remount().notes == ""


def test_the_bound_is_remembered(mount: Mount) -> None:
    m = mount("--max-size", "100M")
    assert m.remount().stats()["max_bytes"] == 100 << 20
    assert m.remount("-o", "max_size=120M").stats()["max_bytes"] == 120 << 20
    assert m.remount().stats()["max_bytes"] == 120 << 20


def test_a_smaller_bound_evicts_and_says_so(mount: Mount) -> None:
    m = mount("--max-size", "200M")
    for number in range(8):
        put(m.path / f"{number}.bin", os.urandom(12 << 20))
    m.remount("--max-size", "64M")
    assert "cachefs: evicted " in m.notes
    assert "than the bound of 64 MiB allows" in m.notes
    left = sorted(os.listdir(m.path))
    assert left[-1] == "7.bin"
    assert "0.bin" not in left
    assert (m.path / "7.bin").stat().st_size == 12 << 20


def test_names_in_the_mount_table(mount: Mount, tmp_path: Path) -> None:
    m = mount("--fsname", "my,kv", "--max-size", "64M")
    mounted = places.mounted_at(m.path)
    assert mounted is not None
    assert mounted.source == "my,kv"
    assert {"nosuid", "nodev", "noatime"} <= set(options_at(m.path))
    # Nothing tells the store now but the daemon's own files.
    assert run_cachefs("stats", "--json", m.path).returncode == 0
    assert m.remount("-o", "fsname=other").pid
    awkward = mount("--max-size", "64M", store=tmp_path / "a b,c\\d")
    mounted = places.mounted_at(awkward.path)
    assert mounted is not None
    assert mounted.source == str(tmp_path / "a b,c\\d")


def options_at(path: Path) -> list[str]:
    done = subprocess.run(["findmnt", "-no", "OPTIONS", path], capture_output=True, text=True, check=True)
    return done.stdout.strip().split(",")


# --- refused, or replaced


def test_a_second_daemon_is_refused_and_told_who_is_first(mount: Mount, tmp_path: Path) -> None:
    """Promise P12."""
    m = mount("--max-size", "64M")
    (tmp_path / "second").mkdir()
    done = run_cachefs("mount", m.store, tmp_path / "second")
    assert done.returncode == 1
    assert str(m.pid) in done.stderr
    assert str(m.path) in done.stderr
    assert done.stderr.count("\n") == 1
    assert places.mounted_at(tmp_path / "second") is None


def test_a_second_mount_at_one_place_is_refused(mount: Mount, tmp_path: Path) -> None:
    """Promise P12."""
    m = mount("--max-size", "64M")
    done = run_cachefs("mount", tmp_path / "other", m.path)
    assert done.returncode == 1
    assert f"already a cachefs mount of {m.store}; unmount it first: cachefs umount {m.path}" in done.stderr
    assert not (tmp_path / "other").exists()


def test_a_dead_mount_is_replaced(mount: Mount) -> None:
    """Promise P5."""
    m = mount("--max-size", "64M")
    put(m.path / "a", b"kept")
    pid = m.pid
    os.kill(pid, signal.SIGKILL)
    assert not wait_for_end([pid], TIMEOUT)
    with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
        os.listdir(m.path)
    assert m.stats()["entries"] == 1  # readable all the same
    m.mount()
    assert m.notes == f"cachefs: replaced the dead mount at {m.path}\n"
    assert (m.path / "a").read_bytes() == b"kept"
    m.umount()
    assert places.mounted_at(m.path) is None


def test_umount_takes_a_dead_mount_away(mount: Mount) -> None:
    m = mount("--max-size", "64M")
    pid = m.pid
    os.kill(pid, signal.SIGKILL)
    assert not wait_for_end([pid], TIMEOUT)
    m.umount()
    assert places.mounted_at(m.path) is None


# --- mount(8)


@needs_root
@pytest.mark.skipif(shutil.which("mount.fuse3", path="/sbin:/usr/sbin") is None, reason="no mount.fuse3")
@pytest.mark.parametrize("way", ["type", "program"])
def test_mount_8(way: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    """`mount -t fuse.cachefs STORE MNT`, and `mount -t fuse CACHEFS#STORE MNT`.

    mount(8) clears the PATH, so the first finds only what is installed for all;
    in a mount namespace of its own this checkout is.
    """
    store, mnt = folders
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/cachefs"
    program.write_text(
        f'#!/bin/sh\nexec env PYTHONPATH={environment()["PYTHONPATH"]} {" ".join(command())} "$@"\n'
    )
    program.chmod(0o755)
    source = f"-t fuse.cachefs {store}" if way == "type" else f"-t fuse {program}#{store}"
    script = f"""
        set -e
        mount --make-rprivate /
        mount --bind {tmp_path}/bin /usr/local/sbin
        mount {source} {mnt} -o max_size=100M,noauto,nofail,x-systemd.automount
        findmnt -no FSTYPE,SOURCE,OPTIONS {mnt}
        echo hello > {mnt}/a
        cat {mnt}/a
        umount {mnt}
    """
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.split()[:2] == ["fuse.cachefs", str(store)]
    assert {"nodev", "nosuid"} <= set(first.split()[2].split(","))
    assert second == "hello"
    assert eventually(lambda: not daemons_of(store))
    assert "at most 100 MiB" in (store / "cachefs.log").read_text()


@needs_root
def test_the_mount_helper_form(folders: tuple[Path, Path]) -> None:
    store, mnt = folders
    done = run_cachefs(store, mnt, "-o", "rw,max_size=64M,dev,suid")
    assert done.returncode == 0, done.stderr
    assert "nosuid" in options_at(mnt)
    assert run_cachefs("umount", mnt).returncode == 0


# --- unmounting


def test_the_store_is_free_when_umount_returns(mount: Mount) -> None:
    m = mount("--max-size", "64M")
    for number in range(5):
        (m.path / str(number)).write_bytes(os.urandom(1 << 20))  # left for the daemon to write
        m.umount()
        assert not m.alive
        assert m.mount().notes == ""
    assert sorted(os.listdir(m.path)) == list("01234")


def test_busy_says_who(mount: Mount) -> None:
    m = mount("--max-size", "64M")
    with subprocess.Popen(["sleep", "60"], cwd=m.path) as sleeper:
        done = run_cachefs("umount", m.path)
        assert done.returncode == 1
        assert f"is busy: sleep (pid {sleeper.pid})" in done.stderr
        assert done.stderr.count("\n") == 1
        assert os.listdir(m.path) == []
        sleeper.kill()
    m.umount()


def test_lazy_umount(mount: Mount) -> None:
    m = mount("--max-size", "64M")
    pid = m.pid
    with (m.path / "a").open("wb") as file:
        done = run_cachefs("umount", "--lazy", m.path)
        assert done.returncode == 0
        assert places.mounted_at(m.path) is None
        file.write(b"still")
    assert not wait_for_end([pid], TIMEOUT)
    m.mount()
    assert (m.path / "a").read_bytes() == b"still"


@needs_root
def test_unmounted_by_others(mount: Mount) -> None:
    m = mount("--max-size", "64M")
    for tool in (["umount"], ["fusermount3", "-u"]):
        (m.path / tool[0]).write_bytes(b"data")
        pid = m.pid
        subprocess.run([*tool, m.path], check=True)
        assert not wait_for_end([pid], TIMEOUT)
        assert "closed" in m.log().splitlines()[-1]
        m.mount()
        assert (m.path / tool[0]).read_bytes() == b"data"


@needs_root
def test_a_cut_connection_leaves_no_dead_mount(mount: Mount, tmp_path: Path) -> None:
    m = mount("--max-size", "64M")
    mounted = places.mounted_at(m.path)
    assert mounted is not None
    pid, control = m.pid, tmp_path / "control"
    control.mkdir()
    subprocess.run(["mount", "-t", "fusectl", "fusectl", control], check=True)
    try:
        (control / mounted.device.split(":")[1] / "abort").write_text("1")
    finally:
        subprocess.run(["umount", control], check=True)
    assert not wait_for_end([pid], TIMEOUT)
    assert places.mounted_at(m.path) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_unmount(mount: Mount, number: signal.Signals) -> None:
    m = mount("--max-size", "64M")
    (m.path / "a").write_bytes(b"x" * 5_000_000)
    pid = m.pid
    os.kill(pid, number)
    assert not wait_for_end([pid], TIMEOUT)
    assert places.mounted_at(m.path) is None
    assert f"{number.name}: unmounting" in m.log()
    m.mount()
    assert (m.path / "a").read_bytes() == b"x" * 5_000_000


def test_a_signal_while_files_are_open(mount: Mount) -> None:
    """Clients lose their files, but nothing that they have written."""
    m = mount("--max-size", "64M")
    pid = m.pid
    descriptor = os.open(m.path / "a", os.O_RDWR | os.O_CREAT)
    try:
        os.write(descriptor, b"before")
        os.kill(pid, signal.SIGTERM)
        assert not wait_for_end([pid], TIMEOUT)
        assert places.mounted_at(m.path) is None
        with pytest.raises(OSError, match=os.strerror(errno.ENOTCONN)):
            os.pwrite(descriptor, b"after", 0)
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    assert "has open files" in m.log()
    m.mount()
    assert (m.path / "a").read_bytes() == b"before"


# --- in the foreground


def start(*arguments: object, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("mount", "--foreground", *arguments),
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**more),
    )


def test_foreground_under_a_supervisor(folders: tuple[Path, Path], tmp_path: Path) -> None:
    store, mnt = folders
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.settimeout(TIMEOUT)
        with start("--max-size", "64M", store, mnt, NOTIFY_SOCKET=str(tmp_path / "notify")) as daemon:
            told = supervisor.recv(4096).decode().splitlines()
            assert "READY=1" in told
            assert f"MAINPID={daemon.pid}" in told
            assert f"STATUS={store} at {mnt}, at most 64 MiB" in told
            assert os.listdir(mnt) == []
            daemon.send_signal(signal.SIGTERM)
            assert "STOPPING=1" in supervisor.recv(4096).decode().splitlines()
            _, log = daemon.communicate(timeout=TIMEOUT)
        assert daemon.returncode == 0
    assert f"mounted {store} at {mnt}, at most 64 MiB, pid {daemon.pid}" in log
    assert not (store / "cachefs.log").exists()
    assert places.mounted_at(mnt) is None


def test_foreground_ends_with_the_mount(folders: tuple[Path, Path]) -> None:
    store, mnt = folders
    with start("-o", "max_size=64M", store, mnt) as daemon:
        assert eventually(lambda: places.mounted_at(mnt))
        assert os.listdir(mnt) == []
        assert run_cachefs("umount", mnt).returncode == 0
        daemon.communicate(timeout=TIMEOUT)
    assert daemon.returncode == 0


def test_a_refusal_in_the_foreground_is_one_line(folders: tuple[Path, Path]) -> None:
    _, mnt = folders
    (mnt / "file").touch()
    done = run_cachefs("mount", "--foreground", folders[0], mnt)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_end_of_a_failing_filesystem(moment: str, folders: tuple[Path, Path]) -> None:
    """An error in the main loop is logged, unmounts, and is the exit status."""
    store, mnt = folders
    code = f"""
import sys, pyfuse3, trio
from cachefs.cli import main
async def failing(real=pyfuse3.main):
    if {moment!r} == "after":
        with trio.move_on_after(1):
            await real()
    raise ValueError("made to fail")
pyfuse3.main = failing
sys.exit(main(["mount", "--foreground", "--max-size", "64M", {str(store)!r}, {str(mnt)!r}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, env=environment()
    )
    assert done.returncode == 1
    assert "CRITICAL the filesystem failed" in done.stderr
    assert "ValueError: made to fail" in done.stderr
    assert places.mounted_at(mnt) is None
    assert run_cachefs("stats", store).returncode == 0


# --- its log


def test_a_signal_dumps_what_all_are_doing(mount: Mount) -> None:
    m = mount("--max-size", "64M")
    os.kill(m.pid, signal.SIGUSR1)
    assert eventually(lambda: "trio tasks:" in m.log() and "Life._listen" in m.log())
    assert "Current thread" in m.log()
    assert os.listdir(m.path) == []


def test_unmounting_during_a_long_close_is_no_error(mount: Mount) -> None:
    """The kernel does not wait for a release; what it was is taken in all the same."""
    m = mount()
    data = random.Random(1).randbytes(24 << 20)
    fd = os.open(m.path / "a", os.O_RDWR | os.O_CREAT)
    for start in reversed(range(0, len(data), 1 << 20)):
        os.pwrite(fd, data[start : start + (1 << 20)], start)
    os.close(fd)
    m.umount()
    assert "ERROR" not in m.log()
    m.mount()
    assert (m.path / "a").read_bytes() == data


def test_log_file_elsewhere(mount: Mount, tmp_path: Path) -> None:
    m = mount("--max-size", "64M", "--log-file", str(tmp_path / "my.log"))
    assert f"pid {m.pid}" in (tmp_path / "my.log").read_text()
    assert not (m.store / "cachefs.log").exists()


def test_the_log_is_bounded(tmp_path: Path) -> None:
    code = f"""
import logging, pathlib
from cachefs import log
log.start(pathlib.Path({str(tmp_path)!r}) / "cachefs.log", debug=False)
for number in range(40000):
    logging.getLogger("cachefs").info("line %d of many that fill the log", number)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 1 << 20
    assert "line 39999" in (tmp_path / "cachefs.log").read_text()
