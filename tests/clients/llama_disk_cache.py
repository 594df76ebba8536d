"""llama-cpp-python's LlamaDiskCache: diskcache 5.6, an SQLite index beside a tree of pickles."""

from __future__ import annotations

import os
import secrets
import sqlite3
from dataclasses import dataclass
from pathlib import Path

PIECE = 4096


@dataclass
class DiskCache:
    directory: Path
    journal: str = "wal"

    def __post_init__(self) -> None:
        self.directory.mkdir(exist_ok=True)
        self.db = sqlite3.connect(self.directory / "cache.db", timeout=60, isolation_level=None)
        (self.granted,) = self.db.execute(f"PRAGMA journal_mode = {self.journal}").fetchone()
        self.db.execute("PRAGMA synchronous = 1")
        self.db.execute("PRAGMA mmap_size = 67108864")
        self.db.execute(
            "CREATE TABLE IF NOT EXISTS Cache (rowid INTEGER PRIMARY KEY, key BLOB UNIQUE, size INTEGER,"
            " filename TEXT, access_time REAL DEFAULT 0)"
        )

    def __setitem__(self, key: str, value: bytes) -> None:
        """The value in thousands of unaligned writes to a new file, then the row that names it."""
        stem = secrets.token_hex(16)
        name = f"{stem[:2]}/{stem[2:4]}/{stem[4:]}.val"
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            at = 0
            while at < len(value):
                at += os.write(fd, value[at : at + PIECE - at % 7])
        finally:
            os.close(fd)
        self.db.execute("BEGIN IMMEDIATE")
        self.db.execute(
            "INSERT OR REPLACE INTO Cache (key, size, filename) VALUES (?, ?, ?)", (key, len(value), name)
        )
        self.db.execute("COMMIT")

    def keys(self) -> list[str]:
        return [key for (key,) in self.db.execute("SELECT key FROM Cache ORDER BY rowid")]

    def pop(self, key: str) -> bytes:
        """Read whole, delete the row, unlink, then the empty directories upward."""
        row = self.db.execute("SELECT filename, size FROM Cache WHERE key = ?", (key,)).fetchone()
        path: Path = self.directory / row[0]
        value = path.read_bytes()
        assert len(value) == row[1]
        self.db.execute("DELETE FROM Cache WHERE key = ?", (key,))
        path.unlink()
        os.removedirs(path.parent)
        return value

    def close(self) -> None:
        self.db.close()
