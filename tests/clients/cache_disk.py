"""llama.cpp PR #28092: `--cache-dir`, pairs of `llama-prompt-cache-<id>.bin` and `.bin.meta`."""

from __future__ import annotations

import itertools
import os
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

from .cxxfs import exists, last_write_time, regular_files, remove
from .payload import State
from .stdio import Ofstream, ifstream_ate, ofstream_write

MAGIC = b"LLPCACHE"
HEADER = struct.Struct("<8s2I6Q")
CHECKPOINT = struct.Struct("<qiI2q6Q")


@dataclass
class Entry:
    """What the server knows of one pair from its `.meta`."""

    meta: Path
    tokens: bytes
    size: int
    target: int
    draft: int
    checkpoints: list[tuple[int, int]]

    @property
    def data(self) -> Path:
        return self.meta.with_suffix("")


@dataclass
class CacheDisk:
    directory: Path
    key: str = "model.gguf|f16|8192"
    limit: int = 1 << 40
    entries: list[Entry] = field(default_factory=list)
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(time.time_ns() // 1000))

    def start(self) -> None:
        """The start scan: temporary metas go, then entries of another model, then data without a meta."""
        metas: list[tuple[int, Path]] = []
        for path, _, mtime in regular_files(self.directory):
            if path.name.endswith(".bin.meta.tmp"):
                remove(path)
            elif path.name.endswith(".bin.meta"):
                metas.append((mtime, path))
        self.entries = []
        for _, meta in sorted(metas):
            entry = self._parse(meta)
            if entry is None:
                remove(meta)
                remove(meta.with_suffix(""))
            else:
                self.entries.append(entry)
        for path, _, _ in regular_files(self.directory):
            if path.suffix == ".bin" and not exists(path.with_name(path.name + ".meta")):
                remove(path)

    def save(self, state: State, draft: bytes = b"", checkpoints: tuple[bytes, ...] = ()) -> Entry:
        """Make room first, placeholder, data, meta by rename. Nothing is fsynced."""
        target = state.blob()
        size = len(target) + len(draft) + sum(map(len, checkpoints))
        self._make_room(state.packed_tokens, size)
        path = self.directory / f"llama-prompt-cache-{next(self._ids)}.bin"
        while exists(path):
            path = self.directory / f"llama-prompt-cache-{next(self._ids)}.bin"
        ofstream_write(path)
        with Ofstream(path) as out:
            for blob in (target, draft, *checkpoints):
                out.write(blob)
        meta = path.with_name(path.name + ".meta")
        temporary = meta.with_name(meta.name + ".tmp")
        ofstream_write(temporary, *self._meta(state, len(target), len(draft), checkpoints))
        os.rename(temporary, meta)
        entry = self._parse(meta)
        assert entry is not None
        self.entries.append(entry)
        return entry

    def restore(self, entry: Entry) -> list[bytes] | None:
        """Read the data whole and touch the meta only; a size that is not the meta's drops both files."""
        data = ifstream_ate(entry.data)
        if len(data) != entry.size:
            self._drop(entry)
            return None
        last_write_time(entry.meta, time.time_ns())
        self.entries.remove(entry)
        self.entries.append(entry)
        ends = [entry.target, entry.target + entry.draft, *(at + size for at, size in entry.checkpoints)]
        return [data[start:end] for start, end in itertools.pairwise([0, *ends])]

    def _make_room(self, tokens: bytes, size: int) -> None:
        """The allocator removes entries the new one contains, then the oldest, before a byte is written."""
        for entry in list(self.entries):
            if tokens[12:-4].startswith(entry.tokens[12:-4]):
                self._drop(entry)
        while self.entries and sum(entry.size for entry in self.entries) + size > self.limit:
            self._drop(self.entries[0])

    def _drop(self, entry: Entry) -> None:
        remove(entry.data)
        remove(entry.meta)
        self.entries.remove(entry)

    def _meta(self, state: State, target: int, draft: int, checkpoints: tuple[bytes, ...]) -> list[bytes]:
        key, tokens = self.key.encode(), state.packed_tokens
        size = target + draft + sum(map(len, checkpoints))
        head = (MAGIC, 1, 0, len(key), len(tokens), size, target, draft, len(checkpoints))
        parts = [HEADER.pack(*head), key, tokens]
        at = target + draft
        for blob in checkpoints:
            parts.append(CHECKPOINT.pack(state.cells, 0, 0, 0, state.cells - 1, at, len(blob), *[0] * 4))
            at += len(blob)
        return parts

    def _parse(self, meta: Path) -> Entry | None:
        data = ifstream_ate(meta)
        if len(data) < HEADER.size:
            return None
        magic, version, _, key, tokens, size, target, draft, count = HEADER.unpack_from(data)
        at = HEADER.size + key + tokens
        if (magic, version, at + count * CHECKPOINT.size) != (MAGIC, 1, len(data)):
            return None
        if data[HEADER.size : HEADER.size + key] != self.key.encode():
            return None
        found = [CHECKPOINT.unpack_from(data, at + n * CHECKPOINT.size)[5:7] for n in range(count)]
        return Entry(meta, data[HEADER.size + key : at], size, target, draft, found)
