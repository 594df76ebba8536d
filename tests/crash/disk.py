"""Filesystems in a file, on loop devices: for disks that fill up, and for those whose power fails."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ..running import eventually

MAKE = {"xfs": ["mkfs.xfs", "-q"], "ext4": ["mkfs.ext4", "-q", "-F"]}


def _run(*command: object) -> None:
    subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=60)


class Disk:
    """One such filesystem, mounted at ``path``."""

    def __init__(self, folder: Path, kind: str, size: int) -> None:
        self.image, self.path = folder / "image", folder / "disk"
        self.path.mkdir()
        with self.image.open("wb") as file:
            file.truncate(size)
        _run(*MAKE[kind], self.image)
        self.up()

    def up(self) -> None:
        _run("mount", "-o", "loop", self.image, self.path)

    def fail(self, *, log: bool) -> None:
        """Nothing more reaches the disk. ``log``: what the filesystem has in its log by now does."""
        _run("xfs_io", "-x", "-c", "shutdown -f" if log else "shutdown", self.path)

    def down(self) -> None:
        """A process that was just killed may keep it busy a little longer."""

        def gone() -> bool:
            return subprocess.run(["umount", self.path], capture_output=True).returncode == 0

        assert eventually(gone)


class FailingDisk(Disk):
    """One whose disk, served by nbdkit, answers EIO to every write between `breaks` and `mends`.

    To every read, too, while the file `unreadable` exists.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._trigger, socket = folder / "broken", folder / "nbd"
        self._device = folder / "device"
        self._device.touch()
        self.unreadable = folder / "unreadable"
        errors = f"error-pwrite-rate=100% error-pwrite=EIO error-pwrite-file={self._trigger}"
        errors += f" error-pread-rate=100% error-pread=EIO error-pread-file={self.unreadable}"
        self._servers = [
            _start("nbdkit", "-f", "-U", socket, "--filter=error", "memory", size, *errors.split())
        ]
        assert eventually(socket.exists)
        self._servers.append(_start("nbdfuse", self._device, f"nbd+unix:///?socket={socket}"))
        assert eventually(lambda: self._device.stat().st_size == size)
        self.path = folder / "disk"
        self.path.mkdir()
        # Without a journal, which would turn the first error into a read-only filesystem.
        _run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", self._device)
        self.image = self._device
        self.up()

    def breaks(self) -> None:
        self._trigger.touch()

    def mends(self) -> None:
        self._trigger.unlink(missing_ok=True)
        self.unreadable.unlink(missing_ok=True)

    def forget(self) -> None:
        """Have nothing of it cached any more."""
        super().down()
        self.up()

    def down(self) -> None:
        self.mends()
        super().down()
        _run("umount", self._device)
        for server in reversed(self._servers):
            server.terminate()
            server.wait(30)


def _start(*command: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(map(str, command)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def make_failing_disk(folder: Path, size: int) -> FailingDisk:
    """Skips the test where it cannot be made."""
    missing = [tool for tool in ("nbdkit", "nbdfuse", "mkfs.ext4", "losetup") if not _is_there(tool)]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs root and {' and '.join(missing)}")
    return FailingDisk(folder, size)


def make_disk(folder: Path, kind: str, size: int) -> Disk:
    """Skips the test where there are no loop devices."""
    missing = [tool for tool in (MAKE[kind][0], "xfs_io", "losetup") if not _is_there(tool)]
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    try:
        return Disk(folder, kind, size)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop devices here: {error.stderr.decode(errors='replace').strip()}")


def _is_there(tool: str) -> bool:
    return shutil.which(tool, path="/sbin:/usr/sbin:/bin:/usr/bin") is not None
