"""llama.cpp PR #24004 and the forks that carry it: `--slot-save-auto`, `--slot-save-incremental`.

A unit is `auto-<fingerprint>-<chain hash>-<tokens>.bin` with `.bin.logits` and `.bin.meta`, later `.bin.dft`
and `.bin.pin`. Several servers share one directory and learn of each other's units from its mtime.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

from .cxxfs import exists, last_write_time, regular_files, remove
from .payload import State, i32, u32, u64
from .stdio import FileReader, FileWriter

META_MAGIC = b"LKMT"
TEXT, TEXT_DELTA = 1, 3
FINGERPRINT = struct.Struct("<Q10I2Q5IQI")
SIDECARS = (".logits", ".meta", ".dft", ".pin")


@dataclass
class Node:
    """What a `.meta` says: read without touching the data."""

    data: Path
    tokens: bytes
    chain: int
    parent: int = 0


@dataclass
class SlotSaveAuto:
    directory: Path
    limit: int = 1 << 40
    model: int = 0x5CB2A38F
    nodes: dict[int, Node] = field(default_factory=dict)
    _seen_mtime: int = -1
    _nonce: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def fingerprint(self) -> bytes:
        return FINGERPRINT.pack(self.model, *[8] * 10, 1, 2, *[0] * 5, 0, 0)

    def chain_hash(self, state: State) -> int:
        digest = hashlib.blake2b(self.fingerprint + i32(*state.tokens), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def save(self, state: State, parent: State | None = None, draft: bytes = b"") -> Node:
        """Publish data, logits and at last the meta, each under a name of its own and renamed into place.

        With a parent the data holds only what follows it.
        """
        chain = self.chain_hash(state)
        print16 = hashlib.blake2b(self.fingerprint, digest_size=8).hexdigest()
        data = self.directory / f"auto-{print16}-{chain:016x}-{state.cells}.bin"
        tail = State(state.turns[len(parent.turns) :], slot=state.slot) if parent else state
        self._publish(data, *tail.fields())
        self._publish(_beside(data, ".logits"), bytes(4 * 1024))
        meta = [META_MAGIC, u32(TEXT_DELTA if parent else TEXT), self.fingerprint]
        meta += [u32(state.cells), u64(chain), i32(*state.tokens)]
        if parent:
            meta += [u64(self.chain_hash(parent)), u32(parent.cells, state.cells)]
        self._publish(_beside(data, ".meta"), *meta)
        if draft:
            self._publish(_beside(data, ".dft"), draft)
        self.scan()
        return self.nodes[chain]

    def _publish(self, final: Path, *fields: bytes) -> None:
        temporary = _beside(final, f".{os.getpid()}.{next(self._nonce)}.tmp")
        with FileWriter(temporary) as out:
            for part in fields:
                out.fwrite(part)
            out.fclose()
        os.rename(temporary, final)

    def poll(self) -> bool:
        """Look at the directory's mtime and scan only if it moved: how peers' units are found."""
        mtime = os.stat(self.directory).st_mtime_ns
        if mtime == self._seen_mtime:
            return False
        self.scan()
        return True

    def scan(self) -> None:
        """Read the head of every meta; units of another fingerprint are left alone."""
        self._seen_mtime = os.stat(self.directory).st_mtime_ns
        self.nodes = {}
        for path, size, _ in regular_files(self.directory):
            if path.name.endswith(".bin.meta") and (node := self._read_meta(path, size)):
                self.nodes[node.chain] = node

    def _read_meta(self, path: Path, size: int) -> Node | None:
        with FileReader(path) as file:
            magic, version = file.fread(4), struct.unpack("<I", file.fread(4))[0]
            if magic != META_MAGIC or file.fread(FINGERPRINT.size) != self.fingerprint:
                return None
            count, chain = struct.unpack("<IQ", file.fread(12))
            node = Node(path.with_suffix(""), file.fread(4 * count), chain)
            if version == TEXT_DELTA:
                node.parent = struct.unpack("<Q2I", file.fread(16))[0]
            assert file.ftell() == size
        return node

    def restore(self, state: State) -> list[bytes]:
        """Load the chain from its root to the tip, then touch every member of it and their sidecars."""
        chain: list[Node] = []
        at = self.chain_hash(state)
        while at:
            chain.insert(0, self.nodes[at])
            at = chain[0].parent
        out = []
        for node in chain:
            with FileReader(node.data) as file:
                out.append(file.fread(file.size))
        now = time.time_ns()
        for node in chain:
            for path in unit(node.data):
                last_write_time(path, now)
        return out

    def pin(self, state: State) -> None:
        _beside(self.nodes[self.chain_hash(state)].data, ".pin").touch()

    def evict(self) -> None:
        """Over the whole directory, whoever wrote it: oldest first, leaves before parents, orphans reaped."""
        self.scan()
        files = {path: (size, mtime) for path, size, mtime in regular_files(self.directory)}
        total = sum(size for size, _ in files.values())
        heads = [p for p in files if p.suffix not in SIDECARS and p.suffix != ".tmp"]
        for path in files:
            if path.suffix in SIDECARS and path.with_suffix("") not in files:
                total -= files[path][0]
                remove(path)
        while total > self.limit:
            by_data = {node.data: node for node in self.nodes.values()}
            parents = {node.parent for node in self.nodes.values()}
            leaves = [p for p in heads if p not in by_data or by_data[p].chain not in parents]
            leaves = [p for p in leaves if not exists(_beside(p, ".pin"))]
            if not leaves:
                return
            victim = min(leaves, key=lambda path: files[path][1])
            for path in unit(victim):
                total -= files[path][0]
                remove(path)
            heads.remove(victim)
            self.nodes = {chain: node for chain, node in self.nodes.items() if node.data != victim}


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def unit(data: Path) -> list[Path]:
    """The files of a unit that are there."""
    return [path for path in (data, *(_beside(data, s) for s in SIDECARS)) if exists(path)]
