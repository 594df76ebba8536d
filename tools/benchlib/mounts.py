"""The filesystems that are measured: cachefs, and one that stores nothing. None is left mounted."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cachefs.mount.processes import daemons_of, wait_for_end
from cachefs.store.home import disk_bytes

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
TIMEOUT = 300


def cachefs(*arguments: object) -> str:
    """Run ``cachefs ARGUMENTS`` of this checkout; what it printed."""
    command = [sys.executable, "-m", "cachefs", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"cachefs {arguments[0]}: {done.stderr.strip()}")
    return done.stdout


class CacheMount:
    """A store below ``folder`` and its mount; a context manager that takes both away."""

    def __init__(self, folder: Path, max_bytes: int, *options: str) -> None:
        self.store = folder / "store"
        self.path = folder / "mnt"
        self.path.mkdir(parents=True, exist_ok=True)
        self._max_bytes = max_bytes
        self._options = options
        self._folder = folder

    def __enter__(self) -> Self:
        self.mount()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.umount()
        shutil.rmtree(self._folder, ignore_errors=True)

    def mount(self) -> float:
        """Mount; seconds until the command returned."""
        start = time.perf_counter()
        cachefs("mount", "--max-size", self._max_bytes, *self._options, self.store, self.path)
        return time.perf_counter() - start

    def umount(self) -> None:
        pids = daemons_of(self.store)
        if os.path.ismount(self.path):
            try:
                cachefs("umount", self.path)
            except (RuntimeError, subprocess.TimeoutExpired):
                subprocess.run(["fusermount3", "-u", "-z", self.path], capture_output=True)
        for pid in wait_for_end(pids, 60):
            os.kill(pid, signal.SIGKILL)

    @property
    def pid(self) -> int:
        (pid,) = daemons_of(self.store)
        return pid

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(cachefs("stats", "--json", self.path))
        return found

    def cpu(self) -> float:
        """Seconds of processor time that the daemon has used so far, the kernel's work for it included."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> dict[str, int]:
        """The daemon's memory: RssAnon, RssFile, VmHWM (peak of both), in bytes."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        lines = {key: value for key, _, value in (line.partition(":") for line in text.splitlines())}
        return {name: int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile", "VmHWM")}

    def disk(self) -> int:
        return disk_bytes(self.store)


class EmptyMount:
    """The filesystem of emptyfs.py, as a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "empty"
        self.path.mkdir(parents=True, exist_ok=True)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen([sys.executable, HERE / "emptyfs.py", self.path])
        deadline = time.monotonic() + 20
        while not os.path.ismount(self.path):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise RuntimeError("the empty filesystem could not be mounted")
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        subprocess.run(["fusermount3", "-u", self.path], capture_output=True)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            subprocess.run(["fusermount3", "-u", "-z", self.path], capture_output=True)


class LoopDisk:
    """A disk of its own for one store, in a file: its counters are nobody else's. Needs root."""

    def __init__(self, folder: Path, size: int) -> None:
        self.path = folder / "disk"
        self._image = folder / "disk.img"
        self._size = size
        self._device = ""

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        with self._image.open("wb") as file:
            file.truncate(self._size)
        _command("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", self._image)
        _command("mount", "-o", "loop", self._image, self.path)
        self._device = _command("findmnt", "-n", "-o", "SOURCE", self.path).strip().removeprefix("/dev/")
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", self.path], capture_output=True)
        self._image.unlink()

    def written(self) -> int:
        """Bytes that reached the device so far, the filesystem's own included."""
        os.sync()
        return int(Path(f"/sys/block/{self._device}/stat").read_text().split()[6]) * 512


def _command(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout


class Sampler:
    """Calls a function every ``pause`` seconds while the block runs; ``peak`` is its greatest value."""

    def __init__(self, function: Any, pause: float = 0.05) -> None:
        self._function = function
        self._pause = pause
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.peak = 0

    def _run(self) -> None:
        while not self._stop.wait(self._pause):
            self.peak = max(self.peak, self._function())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, self._function())
