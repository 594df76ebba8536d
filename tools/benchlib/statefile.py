"""Made-up states of any size, laid out as llama.cpp writes them, and the calls that write them.

A conversation is a list of turns (seed, cells). Rows follow from a turn's seed, the section and the
position, so conversations that begin with the same turns have equal first rows. Values are f16 noise
with the entropy of real ones (about 1.15 under zstd): every section is the same noise under another mask.
"""

import random
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Turn = tuple[int, int]
Call = tuple[int, int]
Bytes = NDArray[np.uint8]

F16 = 1
ALIGN = 4
"""Cells of a turn are a multiple of this: masks are eight bytes wide."""


@dataclass(frozen=True)
class Shape:
    """A model: layers, bytes of a K (and V) row, and whether V is transposed (-fa off)."""

    layers: int
    width: int
    transposed: bool = False

    def cells_for(self, size: int) -> int:
        """Cells whose state takes about ``size`` bytes."""
        return max(ALIGN, size // (2 * self.layers * self.width) // ALIGN * ALIGN)


BIG = Shape(32, 2048)
"""Like a model of eight billion parameters: 128 KiB a token."""


@cache
def _noise(size: int) -> Bytes:
    """f16 values, normally distributed."""
    values = np.random.default_rng(1).standard_normal(size // 2, dtype=np.float32)
    return values.astype(np.float16).view(np.uint8)


def _mask(seed: int, section: int) -> np.uint64:
    return np.uint64(random.Random(seed << 20 | section).getrandbits(64))


def _rows(turns: list[Turn], section: int, width: int) -> Bytes:
    """All rows of a section, cell after cell."""
    cells = sum(count for _, count in turns)
    noise = _noise(1 << (cells * width - 1).bit_length())[: cells * width].view(np.uint64)
    out, at = np.empty(len(noise), np.uint64), 0
    for seed, count in turns:
        stop = at + count * width // 8
        np.bitwise_xor(noise[at:stop], _mask(seed, section), out=out[at:stop])
        at = stop
    return out.view(np.uint8)


def _columns(turns: list[Turn], section: int, embd: int) -> Bytes:
    """A transposed section: ``embd`` runs of one f16 value a cell."""
    cells = sum(count for _, count in turns)
    # A cell's values must not depend on how many cells follow it.
    pitch = 1 << (cells - 1).bit_length() if cells > 4096 else 4096
    noise = _noise(pitch * embd * 2).reshape(embd, -1)[:, : cells * 2].view(np.uint64)
    out, at = np.empty(noise.shape, np.uint64), 0
    for seed, count in turns:
        stop = at + count // ALIGN
        np.bitwise_xor(noise[:, at:stop], _mask(seed, section), out=out[:, at:stop])
        at = stop
    return out.reshape(-1).view(np.uint8)


def _tokens(turns: list[Turn]) -> bytes:
    ids: list[int] = []
    for seed, count in turns:
        rng = random.Random(seed)
        ids += [rng.randrange(32000) for _ in range(count)]
    return struct.pack(f"<{len(ids)}i", *ids)


def parts(shape: Shape, turns: list[Turn]) -> Iterator[memoryview]:
    """The state's bytes, in order: what one fwrite each hands over, but for the cell table."""
    cells = sum(count for _, count in turns)
    yield memoryview(struct.pack("<III", 0x67677371, 4, cells))
    yield memoryview(_tokens(turns))
    yield memoryview(struct.pack("<II", 1, cells))
    table = np.zeros((cells, 3), "<i4")
    table[:, 0], table[:, 1] = np.arange(cells), 1
    yield memoryview(table.tobytes())
    yield memoryview(struct.pack("<IIII", int(shape.transposed), shape.layers, 0, 0))
    for section in range(2 * shape.layers):
        is_v = section >= shape.layers
        if is_v and shape.transposed:
            yield memoryview(struct.pack("<iII", F16, 2, shape.width // 2))
            yield memoryview(_columns(turns, section, shape.width // 2).data)
        else:
            yield memoryview(struct.pack("<iQ", F16, shape.width))
            yield memoryview(_rows(turns, section, shape.width).data)


@dataclass(frozen=True)
class State:
    """A whole state in memory, and the sizes of the fwrite calls that llama.cpp writes it with."""

    data: memoryview
    pieces: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.data)


def make(shape: Shape, turns: list[Turn]) -> State:
    """Build a state of these turns."""
    cells = sum(count for _, count in turns)
    run = cells * 2
    made = list(parts(shape, turns))
    pieces: list[int] = []
    for number, part in enumerate(made):
        if number == 3:  # the cell table: a position, a count, a sequence
            pieces += [4] * (len(part) // 4)
        elif shape.transposed and number > 5 + 2 * shape.layers and len(part) > run:
            pieces += [run] * (len(part) // run)
        else:
            pieces.append(len(part))
    return State(memoryview(b"".join(made)), tuple(pieces))


def stdio_calls(pieces: Iterable[int], block: int) -> list[Call]:
    """(offset, size) of the write() calls that glibc makes of fwrite calls of these sizes.

    The buffer of ``block`` bytes is filled first; once full it goes out, then whole blocks straight from
    the caller's memory, and the rest waits in the buffer.
    """
    calls: list[Call] = []
    at = buffered = 0
    for size in pieces:
        room = block - buffered
        if size <= room:
            buffered += size
            continue
        calls.append((at, block))
        at += block
        whole = (size - room) // block * block
        if whole:
            calls.append((at, whole))
            at += whole
        buffered = size - room - whole
    if buffered:
        calls.append((at, buffered))
    return calls


def big_calls(size: int, step: int) -> list[Call]:
    """(offset, size) of calls of ``step`` bytes."""
    return [(at, min(step, size - at)) for at in range(0, size, step)]
