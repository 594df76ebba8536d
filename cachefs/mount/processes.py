"""Which processes use a directory, seen through /proc."""

import json
import os
import select
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cachefs.mount.mountpoint import FUSE_DEVICE


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


_PF_SIGNALED = 0x400  # linux/sched.h: killed by a signal


def process_of(thread: int) -> int:
    """The process that a thread belongs to; 0 if it cannot be told."""
    try:
        status = Path(f"/proc/{thread}/status").read_bytes()
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith(b"Tgid:"):
            return int(line.split()[1])
    return 0


def was_killed(pid: int) -> bool:
    """Whether a signal ended the process, which the kernel is still taking apart."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return bool(int(stat.rpartition(b")")[2].split()[6]) & _PF_SIGNALED)


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _links(pid: int, *names: str) -> Iterator[str]:
    """Where the links of /proc/PID point; nothing for what may not be read or just ended."""
    for name in names:
        base = f"/proc/{pid}/{name}"
        try:
            paths = [f"{base}/{entry}" for entry in os.listdir(base)] if name == "fd" else [base]
        except OSError:
            continue
        for path in paths:
            try:
                yield os.readlink(path)
            except OSError:
                continue


def _maps(pid: int) -> Iterator[str]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6:
            yield os.fsdecode(fields[5])


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return "a process"


def _under(links: Iterable[str], directory: str) -> bool:
    return any(link == directory or link.startswith(directory + "/") for link in links)


def users_of(directory: Path) -> list[Process]:
    """Processes with an open file, a mapping or their working directory in ``directory``.

    Only those that the caller may look at: its own, or all for root.
    """
    path, found = os.fspath(directory), []
    for pid in _pids():
        links = _links(pid, "fd", "cwd", "root", "exe")
        if pid != os.getpid() and (_under(links, path) or _under(_maps(pid), path)):
            found.append(Process(pid, _name(pid)))
    return found


def daemons_of(store: Path) -> list[int]:
    """The processes that serve FUSE requests from files in ``store``: one, or none."""
    path, found = os.fspath(store), []
    for pid in _pids():
        links = list(_links(pid, "fd"))
        if FUSE_DEVICE in links and _under(links, path):
            found.append(pid)
    return found


def wait_for_end(pids: Iterable[int], seconds: float) -> list[int]:
    """Wait until the processes have ended; return those that have not."""
    deadline, left = time.monotonic() + seconds, []
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                left.append(pid)
        finally:
            os.close(handle)
    return left


def store_served_at(mountpoint: Path) -> Path | None:
    """The store whose daemon says, in its lock file, that it serves ``mountpoint``."""
    for pid in _pids():
        links = set(_links(pid, "fd"))
        if FUSE_DEVICE not in links:
            continue
        for lock in (Path(link) for link in links if link.endswith("/lock")):
            try:
                holder = json.loads(lock.read_bytes())
                if isinstance(holder, dict) and holder.get("mountpoint") == str(mountpoint):
                    return lock.parent
            except (OSError, ValueError):
                continue
    return None
