"""The fork with `--prompt-cache-dir`: `PCD2` containers named by content, published by fsync and rename.

The server verifies a file itself before it uses it, so the filesystem has to hand back what was there, damage
included.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .cxxfs import last_write_time, regular_files, remove
from .payload import u32, u64
from .stdio import FileWriter, ifstream_ate

MAGIC = b"PCD2"
VERSION = 2


class Rejected(Exception):
    """The client's verdict on a file: it is not what was saved."""


@dataclass(frozen=True)
class Fingerprint:
    """What has to agree between the server that saved and the one that loads."""

    n_ctx: int = 8192
    n_embd: int = 576
    n_layer: int = 30
    n_head: int = 9
    n_vocab: int = 49152
    model: str = "/models/SmolLM2-135M.gguf"
    build: str = "5cb2a38f"

    def pack(self) -> bytes:
        strings = b"".join(u32(len(text)) + text.encode() for text in (self.model, self.build))
        return u32(self.n_ctx, self.n_embd, self.n_layer, self.n_head, self.n_vocab) + strings


@dataclass
class PromptCacheDir:
    directory: Path
    limit: int = 1 << 40
    fingerprint: Fingerprint = field(default_factory=Fingerprint)

    def __post_init__(self) -> None:
        """Start: what a killed server left half written goes."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.lock():
            for path, _, _ in regular_files(self.directory):
                if path.suffix == ".tmp":
                    remove(path)

    @contextmanager
    def lock(self, flags: int = fcntl.LOCK_EX) -> Iterator[None]:
        fd = os.open(self.directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, flags)
            yield
        finally:
            os.close(fd)

    def save(self, *blobs: bytes) -> Path:
        """Write `<hash>.bin.tmp`, fsync, rename, then prune; the same content again is only a touch."""
        body = self.fingerprint.pack() + b"".join(u64(len(blob)) + blob for blob in blobs)
        path = self.directory / f"{hashlib.sha256(body).hexdigest()}.bin"
        with self.lock():
            if path.exists():
                os.utime(path)
                return path
            temporary = path.with_name(path.name + ".tmp")
            out = FileWriter(temporary)
            out.fwrite(MAGIC)
            out.fwrite(u32(VERSION))
            out.fwrite(u64(16 + len(body)))
            out.fwrite(self.fingerprint.pack())
            for blob in blobs:
                out.fwrite(u64(len(blob)))
                out.fwrite(blob)
            out.fflush()
            os.fsync(out.fd)
            out.fclose()
            os.rename(temporary, path)
            self.prune(keep=path)
        return path

    def prune(self, keep: Path) -> None:
        """Least recently used by mtime, until the sum of st_size is below the limit."""
        files = sorted((mtime, size, path) for path, size, mtime in regular_files(self.directory))
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total <= self.limit:
                break
            if path.suffix == ".bin" and path != keep:
                remove(path)
                total -= size

    def load(self, path: Path) -> list[bytes]:
        """Read the file, check every field and the hash in its name, and mark it as used."""
        with self.lock(fcntl.LOCK_SH):
            data = ifstream_ate(path)
        if len(data) < 16 or data[:8] != MAGIC + u32(VERSION):
            raise Rejected("not a container of this version")
        if struct.unpack_from("<Q", data, 8) != (len(data),):
            raise Rejected(f"{len(data)} bytes are not what the header says")
        expected = self.fingerprint.pack()
        if data[16 : 16 + len(expected)] != expected:
            raise Rejected("saved by another model or build")
        if hashlib.sha256(data[16:]).hexdigest() != path.stem:
            raise Rejected("content does not match its name")
        blobs, at = [], 16 + len(expected)
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            blobs.append(data[at + 8 : at + 8 + size])
            at += 8 + size
        last_write_time(path, os.stat(path).st_mtime_ns + 1_000_000)
        return blobs
