"""Small llama.cpp states, made up but laid out as the real ones, field by field as llama.cpp writes them.

A conversation is a list of turns, each a seed and a number of tokens. Rows depend on the turn's seed and
their place in it, so two conversations that begin with the same turns have equal first rows, as real ones do.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

SEQ_MAGIC = 0x67677371
SEQ_VERSION = 4
SESSION_MAGIC = 0x6767736E
SESSION_VERSION = 11
BLOB_MAGIC = 0xAF143CD8
F16 = 1


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def i32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def noise(seed: object, size: int) -> bytes:
    """Incompressible bytes that depend on nothing but `seed`; more of them begin with the fewer."""
    digest = hashlib.blake2b(repr(seed).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).bytes(size + -size % 4)[:size]


@dataclass(frozen=True)
class State:
    """The state of one conversation of a dense model with f16 keys and values."""

    turns: tuple[tuple[object, int], ...]
    layers: int = 4
    width: int = 128
    slot: int = 0
    transposed: bool = False

    @property
    def cells(self) -> int:
        return sum(count for _, count in self.turns)

    @property
    def tokens(self) -> list[int]:
        out: list[int] = []
        for seed, count in self.turns:
            out += np.frombuffer(noise((seed, "tokens"), 4 * count), "<u4").__mod__(49152).tolist()
        return out

    @property
    def packed_tokens(self) -> bytes:
        """The server's token payload (since PR #26640): a marker, the ids, and no media."""
        return i32(-1) + u32(1, self.cells) + i32(*self.tokens) + u32(0)

    def rows(self, layer: int, part: str) -> bytes:
        return b"".join(noise((seed, layer, part), count * self.width * 2) for seed, count in self.turns)

    def module(self) -> Iterator[bytes]:
        """The attention KV section: one item for each fwrite."""
        yield from (u32(1), u32(self.cells))
        for position in range(self.cells):
            yield from (i32(position), u32(1), i32(self.slot))
        yield from (u32(self.transposed), u32(self.layers), u32(0), u32(0))
        for layer in range(self.layers):
            yield from (i32(F16), u64(2 * self.width), self.rows(layer, "k"))
        for layer in range(self.layers):
            rows = self.rows(layer, "v")
            if not self.transposed:
                yield from (i32(F16), u64(2 * self.width), rows)
                continue
            yield from (i32(F16), u32(2), u32(self.width))
            columns = np.frombuffer(rows, "<u2").reshape(self.cells, self.width).T
            yield from (column.tobytes() for column in columns)

    def fields(self) -> Iterator[bytes]:
        """A sequence state file: llama_state_seq_save_file()."""
        tokens = self.packed_tokens
        yield from (u32(SEQ_MAGIC), u32(SEQ_VERSION), u32(len(tokens) // 4), tokens)
        yield from self.module()

    def session_fields(self) -> Iterator[bytes]:
        """A whole-context file, `--prompt-cache`: the architecture's name leaves what follows unaligned."""
        yield from (u32(SESSION_MAGIC), u32(SESSION_VERSION), u32(self.cells), i32(*self.tokens))
        yield from (u32(5), b"llama")
        yield from self.module()

    def file(self) -> bytes:
        return _joined(self, "file")

    def blob(self) -> bytes:
        """What llama_state_seq_get_data() gives and disk caches embed (since PR #22679)."""
        return _joined(self, "blob")


@cache
def _joined(state: State, what: str) -> bytes:
    if what == "file":
        return b"".join(state.fields())
    return u32(BLOB_MAGIC) + i32(state.slot) + b"".join(state.module())


def chat(*seeds: object, tokens: int = 320, slot: int = 0) -> State:
    """A conversation of a few turns, about 0.6 MiB each."""
    return State(tuple((seed, tokens) for seed in seeds), slot=slot)
