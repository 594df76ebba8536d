"""The `.llama-prompt-cache-v1` family: a run directory a server, held by flock, adopted once its owner died.

Found as copies in many llama.cpp forks (ROCmFPX, strix-llama.cpp and others). This client treats a failing
chmod or directory fsync as fatal, and syncs its data before each rename. `Persist` is the variant that keeps
entries.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
import struct
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from .cxxfs import exists, fsync_directory, last_write_time, remove_all
from .payload import u32, u64
from .stdio import FileReader, FileWriter, ofstream_write

CHECKPOINT_MAGIC = b"CKCP"
META = struct.Struct("<16s8Q2I")
_runs = itertools.count()


def hold(path: Path) -> int | None:
    """Open a lock file and flock it for life; None when another process has it."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def private(path: Path) -> Path:
    """permissions(): 0700 for a directory, 0600 for a file. A failure stops the server."""
    os.chmod(path, 0o700 if path.is_dir() else 0o600)
    return path


def write_synced(final: Path, fields: Iterable[bytes]) -> Path:
    """Stdio to `.tmp`, compare the size, fdatasync, fadvise, chmod, rename, and the directory's fsync."""
    temporary = final.with_name(final.name + ".tmp")
    with FileWriter(temporary) as out:
        for field in fields:
            out.fwrite(field)
        size = out.ftell()
        out.fclose_ignored()
    if os.stat(temporary).st_size != size:
        raise OSError(f"{temporary}: short save")
    fd = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    private(temporary)
    os.rename(temporary, final)
    fsync_directory(final.parent)
    drop_pages(final)
    return final


def drop_pages(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


class Run:
    """One server's directory `run-<pid>-<ns>-<k>` for as long as it lives."""

    def __init__(self, base: Path) -> None:
        self.base = base / ".llama-prompt-cache-v1"
        self.base.mkdir(parents=True, exist_ok=True)
        private(self.base)
        self.path = self.base / f"run-{os.getpid()}-{time.time_ns()}-{next(_runs)}"
        self.path.mkdir()
        private(self.path)
        lock = hold(private_new(self.path / ".lock"))
        assert lock is not None
        self._lock = lock
        ofstream_write(self.path / ".owner", b"llama-prompt-cache-v1\n", f"{os.getpid()}\n".encode())
        private(self.path / ".owner")
        ofstream_write(self.path / "identity.txt", b"model=SmolLM2-135M.gguf n_ctx=8192 type=f16\n")

    def save(
        self, number: int, target: Iterable[bytes], draft: bytes = b"", checkpoints: Iterable[bytes] = ()
    ) -> None:
        write_synced(self.path / f"state-{number}-target.bin", target)
        if draft:
            write_synced(self.path / f"state-{number}-draft.bin", [draft])
        for index, blob in enumerate(checkpoints):
            # Checkpoints are renamed into place but not synced.
            final = self.path / f"state-{number}-ckpt{index}.bin"
            temporary = final.with_name(final.name + ".tmp")
            with FileWriter(temporary) as out:
                out.fwrite(CHECKPOINT_MAGIC + u32(1) + u64(100) + struct.pack("<2i", 0, 99))
                out.fwrite(u64(len(blob), 0, 0))
                out.fwrite(blob)
                out.fclose()
            os.rename(temporary, final)

    def entry(self, number: int) -> list[Path]:
        return sorted(self.path.glob(f"state-{number}-*.bin"))

    def restore(self, number: int) -> dict[str, bytes]:
        """Read each file by stdio, tell the kernel to forget it, and touch the whole entry."""
        out = {}
        for path in self.entry(number):
            with FileReader(path) as file:
                assert file.size == os.stat(path).st_size
                out[path.name] = file.fread(file.size)
            drop_pages(path)
        now = time.time_ns()
        for path in self.entry(number):
            last_write_time(path, now)
        return out

    def adopt_stale(self) -> int:
        """Move the files of runs whose lock nobody holds into this one, and remove what is left of them."""
        adopted = 0
        for run in sorted(self.base.glob("run-*")):
            if run == self.path or not exists(run / ".lock"):
                continue
            lock = hold(run / ".lock")
            if lock is None:
                continue
            for path in sorted(run.glob("state-*.bin")):
                _, number, rest = path.name.split("-", 2)
                os.rename(path, self.path / f"state-{int(number) + 1000}-{rest}")
                adopted += 1
            remove_all(run)
            os.close(lock)
        return adopted

    def shutdown(self) -> None:
        """Rename the run out of the way, then remove it whole."""
        deleting = self.base / f".deleting-{self.path.name}"
        os.rename(self.path, deleting)
        remove_all(deleting)
        self.close()

    def close(self) -> None:
        """What is left of a server that ends without its shutdown: the lock goes with its descriptor."""
        fd, self._lock = self._lock, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # the mount may be dead
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def private_new(path: Path) -> Path:
    os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    return private(path)


class Persist:
    """`persist/entry-<id>/`: data first, then a meta with checksums that commits it."""

    def __init__(self, base: Path) -> None:
        self.path = base / ".llama-prompt-cache-v1" / "persist"
        self.path.mkdir(parents=True, exist_ok=True)
        private(self.path.parent)
        private(self.path)
        lock = hold(self.path / ".persist.lock")
        if lock is None:
            raise BlockingIOError("another server has the persistent cache")
        self._lock = lock

    def save(self, number: int, target: bytes, tokens: bytes) -> Path:
        entry = self.path / f"entry-{number}"
        entry.mkdir()
        private(entry)
        write_synced(entry / f"state-{number}-target.bin", [target])
        now = time.time_ns()
        head = META.pack(
            hashlib.md5(b"model").digest(), len(target), 0, 0, len(tokens), 0, now, now, 0,
            zlib.crc32(target), zlib.crc32(tokens),
        )  # fmt: skip
        temporary = entry / "meta.tmp"
        with FileWriter(temporary) as out:
            out.fwrite(head)
            out.fwrite(tokens)
            out.fflush()
            os.fsync(out.fd)
            out.fclose()
        private(temporary)
        os.rename(temporary, entry / "meta")
        fsync_directory(entry)
        fsync_directory(self.path)
        return entry

    def load(self, entry: Path) -> bytes | None:
        """One read() of the promised size and one more byte; None when anything disagrees."""
        with FileReader(entry / "meta") as file:
            head = META.unpack(file.fread(META.size))
            tokens = file.fread(head[4])
        fd = os.open(next(entry.glob("state-*-target.bin")), os.O_RDONLY | os.O_CLOEXEC)
        try:
            out = bytearray()
            while len(out) < head[1] and (data := os.read(fd, head[1] - len(out))):
                out += data
            surplus = os.read(fd, 1)
        finally:
            os.close(fd)
        if surplus or len(out) != head[1] or zlib.crc32(out) != head[-2] or zlib.crc32(tokens) != head[-1]:
            return None
        return bytes(out)

    def close(self) -> None:
        os.close(self._lock)
