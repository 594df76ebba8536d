"""Running cachefs from tests, as a program of its own, like a user would."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from cachefs.mount import mountpoint as places
from cachefs.mount.processes import daemons_of, wait_for_end

ROOT = Path(__file__).parent.parent
TIMEOUT = 120


def command(*arguments: object) -> list[str]:
    """``cachefs ARGUMENTS``, of this checkout."""
    return [sys.executable, "-m", "cachefs", *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    """In which `command` finds this checkout from any directory."""
    # Huge pages asked for already: `mount` need not start over, a twentieth of a second each.
    tunables = os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    return {**os.environ, "PYTHONPATH": str(ROOT), "GLIBC_TUNABLES": tunables, **more}


def run_cachefs(
    *arguments: object, timeout: float = TIMEOUT, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``cachefs ARGUMENTS`` as a program of its own."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=timeout, env=environment(), **options
    )


def eventually(condition: Callable[[], object], seconds: float = 10) -> bool:
    """Whether ``condition`` comes true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class Mounted:
    """A store, mounted in the background; the object lives on over remounts."""

    plain = False

    def __init__(self, store: Path, path: Path) -> None:
        self.store = store
        self.path = path
        self._errors_expected = False

    def mount(self, *options: str) -> Mounted:
        done = run_cachefs("mount", *options, self.store, self.path)
        assert done.returncode == 0, done.stderr
        self.notes = done.stderr
        return self

    @property
    def pid(self) -> int:
        """The daemon's."""
        (pid,) = daemons_of(self.store)
        return pid

    @property
    def alive(self) -> bool:
        return bool(daemons_of(self.store))

    def stats(self) -> dict[str, Any]:
        done = run_cachefs("stats", "--json", self.store)
        assert done.returncode == 0, done.stderr
        figures: dict[str, Any] = json.loads(done.stdout)
        return figures

    def umount(self) -> None:
        """Unmount; nothing if it is not mounted. (os.path.ismount would not see a dead mount.)"""
        if places.mounted_at(self.path) is None:
            return
        done = run_cachefs("umount", self.path)
        assert done.returncode == 0, done.stderr

    def remount(self, *options: str) -> Mounted:
        self.umount()
        return self.mount(*options)

    def kill(self) -> None:
        """End the daemon with SIGKILL and take away the dead mount."""
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        assert not wait_for_end([pid], TIMEOUT)
        dead = places.mounted_at(self.path)
        assert dead is not None
        places.clear_dead(dead)

    def log(self) -> str:
        files = [self.store / "cachefs.log.1", self.store / "cachefs.log"]
        return "".join(file.read_text(errors="replace") for file in files if file.exists())

    def expect_errors(self) -> None:
        """Errors in the daemon's log belong to the test."""
        self._errors_expected = True

    def clean_up(self) -> list[str]:
        """Leave no mount and no daemon; what was not as it should be."""
        wrong = []
        pids = daemons_of(self.store)
        if places.mounted_at(self.path) is not None:
            try:
                done = run_cachefs("umount", self.path, timeout=30)
                left = "" if done.returncode == 0 else done.stderr
            except subprocess.TimeoutExpired:
                left = "umount hangs"
            if left:
                wrong.append(f"could not be unmounted: {left}")
                subprocess.run(["fusermount3", "-u", "-z", self.path], capture_output=True, timeout=30)
        for pid in wait_for_end(pids, 30):
            wrong.append(f"the daemon (pid {pid}) did not end")
            os.kill(pid, signal.SIGKILL)
        bad = [line for line in self.log().splitlines() if re.search(r"\b(ERROR|CRITICAL|Traceback)\b", line)]
        if bad and not self._errors_expected:
            wrong.append(f"the daemon's log holds errors:\n{self.log()}")
        return wrong


def disk_use(store: Path) -> int:
    """What du says, in bytes."""
    total = 0
    for folder, _, files in os.walk(store):
        for name in (".", *files):
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def memory_of(pid: int) -> int:
    """Bytes of a process that are neither of a file nor shared, as far as in memory; 0 if it ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon"))


def sampled_use(store: Path) -> AbstractContextManager[list[int]]:
    """What the store takes, every 50 ms while the block runs and at its end."""
    return _sampled(lambda: disk_use(store))


def sampled_memory(m: Mounted) -> AbstractContextManager[list[int]]:
    """`memory_of` the daemon, every 50 ms while the block runs and at its end; also over remounts."""
    pids = daemons_of(m.store)

    def figure() -> int:
        nonlocal pids
        pids = [pid for pid in pids if memory_of(pid)] or daemons_of(m.store)
        return sum(map(memory_of, pids))

    return _sampled(figure)


@contextmanager
def _sampled(figure: Callable[[], int]) -> Iterator[list[int]]:
    samples: list[int] = []
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(0.05):
            samples.append(figure())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()
        samples.append(figure())
