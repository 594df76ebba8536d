"""ik_llama.cpp: slot files with two sidecars (PR #1584), and the block cache of PR #2377."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from .cxxfs import exists, regular_files, remove
from .payload import F16, SEQ_MAGIC, SEQ_VERSION, State, i32, noise, u32, u64
from .stdio import FileReader, FileWriter, ifstream_ate, ofstream_write

TOKENS_MAGIC = 0x6C6D7376
BLOCK = 64


def ik_fields(state: State) -> list[bytes]:
    """ik's own body under upstream's magic and version: no stream count, no rotation, 8-byte cells."""
    out = [u32(SEQ_MAGIC, SEQ_VERSION, state.cells), i32(*state.tokens), u32(state.cells)]
    for position in range(state.cells):
        out += [i32(position), u32(0)]
    out += [u32(0, state.layers)]
    for part in ("k", "v"):
        for layer in range(state.layers):
            out += [i32(F16), u64(2 * state.width), state.rows(layer, part)]
    return [*out, u32(0), u32(0)]


def sidecar(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def slot_save(path: Path, state: State, checkpoints: list[bytes]) -> None:
    """Tokens as JSON, checkpoints (no file when there are none), then the state. Errors go unseen."""
    tokens = {"magic": TOKENS_MAGIC, "version": 1, "tokens": state.tokens, "media": []}
    ofstream_write(sidecar(path, ".tokens.json"), json.dumps(tokens).encode())
    if checkpoints:
        parts = [u32(SEQ_MAGIC), u32(SEQ_VERSION), u64(len(checkpoints))]
        for blob in checkpoints:
            parts += [i32(0, state.cells - 1, 0, state.cells - 1), u64(len(blob)), blob]
        ofstream_write(sidecar(path, ".checkpoints"), *parts)
    with FileWriter(path) as out:
        for field in ik_fields(state):
            out.fwrite(field)
        out.fclose_ignored()


def slot_restore(path: Path) -> tuple[bytes, list[int], list[bytes]]:
    """The state, the tokens and the checkpoints, a stale file of an earlier save included."""
    with FileReader(path) as file:
        data = file.fread(file.size)
    tokens = json.loads(ifstream_ate(sidecar(path, ".tokens.json")))["tokens"]
    blobs: list[bytes] = []
    if exists(sidecar(path, ".checkpoints")):
        raw = ifstream_ate(sidecar(path, ".checkpoints"))
        (count,), at = struct.unpack_from("<Q", raw, 8), 16
        for _ in range(count):
            (size,) = struct.unpack_from("<Q", raw, at + 16)
            blobs.append(raw[at + 24 : at + 24 + size])
            at += 24 + size
    return data, tokens, blobs


def slot_list(directory: Path) -> dict[str, int]:
    """/list: the token count of every file with a state's magic, so `.checkpoints` files appear too."""
    out = {}
    for path, size, _ in regular_files(directory):
        if size < 12:
            continue
        with FileReader(path) as file:
            magic, _, count = struct.unpack("<3I", file.fread(12))
            if magic == SEQ_MAGIC:
                file.fread(min(4 * count, size - 12))
                out[path.name] = count
    return out


def slot_delete(path: Path) -> bool:
    """/delete_prompt: the state only; its sidecars stay."""
    return exists(path) and remove(path)


def slot_rename(source: Path, target: Path) -> int:
    """/rename_prompt: the HTTP status. A name that is taken is never replaced."""
    if exists(target):
        return 409
    os.rename(source, target)
    return 200


@dataclass
class BlockCache:
    """PR #2377: one sequence file for each 64 tokens, thousands of them in one flat directory."""

    directory: Path
    model: str = "/models/SmolLM2-135M.gguf"

    def path(self, conversation: str, block: int) -> Path:
        key = hashlib.sha256(f"{conversation}:{block}".encode()).hexdigest()
        model = hashlib.sha256(self.model.encode()).hexdigest()
        return self.directory / f"{key}_{block * BLOCK}_{model}_8192_49152_270590880_1730000000.bin"

    def save(self, conversation: str, blocks: int) -> int:
        """Write each block that is not there yet: probed by opening it, published by rename."""
        written = 0
        for block in range(blocks):
            path = self.path(conversation, block)
            try:
                os.close(os.open(path, os.O_RDONLY))
                continue
            except FileNotFoundError:
                pass
            temporary = sidecar(path, ".tmp")
            with FileWriter(temporary) as out:
                out.fwrite(u32(SEQ_MAGIC, SEQ_VERSION, BLOCK))
                out.fwrite(self.payload(conversation, block))
                out.fclose()
            os.rename(temporary, path)
            written += 1
        return written

    @staticmethod
    def payload(conversation: str, block: int) -> bytes:
        return noise((conversation, block), 6_000)

    def load(self, conversation: str, block: int) -> bytes | None:
        """The block's payload; a file without the right header is deleted."""
        path = self.path(conversation, block)
        with FileReader(path) as file:
            if file.size >= 12 and struct.unpack("<2I", file.fread(8)) == (SEQ_MAGIC, SEQ_VERSION):
                file.fread(4)
                return file.fread(file.size - 12)
        remove(path)
        return None

    def age(self, days: float) -> int:
        """Unlink, while iterating, what was written longer ago than `days`."""
        oldest = time.time_ns() - int(days * 86_400e9)
        return sum(remove(path) for path, _, mtime in regular_files(self.directory) if mtime < oldest)

    def shrink(self, limit: int) -> int:
        """Unlink oldest first until the logical sizes add up to `limit`."""
        files = sorted((mtime, path, size) for path, size, mtime in regular_files(self.directory))
        total = sum(size for _, _, size in files)
        gone = 0
        while files and total > limit:
            _, path, size = files.pop(0)
            gone += remove(path)
            total -= size
        return gone
