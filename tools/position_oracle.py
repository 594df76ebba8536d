"""The position oracle: the least a store of prefix-sharing states can keep.

Each distinct row of a section at a position is counted once over all files, and everything that is no row is
counted whole, in every file. A row's key is (which module of its kind, section kind, layer, row bytes,
position, content); of a transposed section a "row" is a cell's column over all embedding rows.
"""

import hashlib
import mmap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from kvparse import NotAState, Section, State, parse
from numpy.typing import NDArray

Key = tuple[int, str, int, int]
Hashes = NDArray[np.uint64]

RUN = 32
"""Rows; fewer are not worth a slice of their own."""


@dataclass(frozen=True)
class FileRows:
    """One file: how it was read, and which of its bytes are rows."""

    path: Path
    state: State
    total: int
    row_bytes: int
    spans: tuple[tuple[int, int], ...]
    """(offset, length) of each section's rows, in bytes, in file order."""


@dataclass(frozen=True)
class Result:
    """Sums over all files, in bytes."""

    total: int
    row_bytes: int
    distinct_row_bytes: int
    run_row_bytes: int
    """Like distinct_row_bytes, but a row counts as repeated only in a run of RUN rows that repeat."""
    files: tuple[FileRows, ...]
    errors: tuple[tuple[Path, str], ...]
    """Files that could not be read to their last byte; they are in none of the sums."""

    @property
    def other_bytes(self) -> int:
        """Bytes that are no rows: tokens, headers, cell tables, recurrent states."""
        return self.total - self.row_bytes

    @property
    def stored(self) -> int:
        """Bytes stored if every distinct row at a position is stored once and all else whole."""
        return self.distinct_row_bytes + self.other_bytes

    @property
    def stored_in_runs(self) -> int:
        """``stored``, when repeated rows that stand alone among different ones are stored again.

        Where a server computes the same prefix in another order (several slots in one unified cache),
        rounding makes most rows of the deeper layers differ and leaves single equal rows between
        them. To share those is no longer to share a prefix.
        """
        return self.run_row_bytes + self.other_bytes

    @property
    def ratio(self) -> float:
        """Bytes written for each byte stored."""
        return self.total / self.stored if self.stored else 1.0


def _rows(data: memoryview, section: Section) -> Iterator[memoryview]:
    """The rows of a section, one a cell."""
    raw = data[section.offset : section.offset + section.size]
    if section.embd:
        # Embedding rows of one element a cell: a cell's row is a column.
        count = len(section.positions)
        cells = np.frombuffer(raw, np.uint8).reshape(section.embd, count, -1)
        raw = memoryview(cells.transpose(1, 0, 2).tobytes())
    for at in range(0, section.size, section.width):
        yield raw[at : at + section.width]


def _hashes(data: memoryview, section: Section) -> Hashes:
    """64-bit hashes of (position, row): among a million rows two collide once in 37 million sets."""
    digest = hashlib.blake2b
    digests = b"".join([digest(row, digest_size=8).digest() for row in _rows(data, section)])
    places = section.positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return np.frombuffer(digests, np.uint64) ^ places


def _keyed_sections(state: State) -> Iterator[tuple[Key, Section]]:
    seen: dict[str, int] = defaultdict(int)
    for module in state.modules:
        if module.kind == "blob":
            # Blobs hold the same modules again (checkpoints, a draft model): count from the start.
            seen.clear()
        for section in module.sections:
            yield (seen[module.kind], section.kind, section.layer, section.width), section
        seen[module.kind] += 1


def _spans(state: State) -> tuple[tuple[int, int], ...]:
    return tuple((s.offset, s.size) for module in state.modules for s in module.sections if s.size)


def _rows_in_runs(many: list[Section], hashes: list[Hashes]) -> int:
    """Rows to store when only runs of RUN rows, equal to those of one earlier section, are shared."""
    stored = 0
    for number, (section, mine) in enumerate(zip(many, hashes, strict=True)):
        order = np.argsort(section.positions, kind="stable")
        shared = np.zeros(len(mine), bool)
        for earlier in hashes[:number]:
            # The hash covers the position, so a member is equal there and not just anywhere.
            equal = np.concatenate(([False], np.isin(mine[order], earlier), [False]))
            starts, ends = np.flatnonzero(~equal[:-1] & equal[1:]), np.flatnonzero(equal[:-1] & ~equal[1:])
            for start, end in zip(starts, ends, strict=True):
                if end - start >= RUN:
                    shared[start:end] = True
        stored += int(np.count_nonzero(~shared))
    return stored


def oracle(paths: Iterable[Path]) -> Result:
    """Read every file and count; files that are not understood to the last byte land in ``errors``."""
    hashes: dict[Key, list[Hashes]] = defaultdict(list)
    sections: dict[Key, list[Section]] = defaultdict(list)
    files: list[FileRows] = []
    errors: list[tuple[Path, str]] = []
    for path in paths:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                errors.append((path, "empty"))
                continue
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        try:
            state = parse(data)
        except NotAState as error:
            errors.append((path, str(error)))
            continue
        for key, section in _keyed_sections(state):
            if section.size:
                hashes[key].append(_hashes(data, section))
                sections[key].append(section)
        spans = _spans(state)
        files.append(FileRows(path, state, len(data), sum(size for _, size in spans), spans))
    distinct = sum(len(np.unique(np.concatenate(many))) * key[3] for key, many in hashes.items())
    in_runs = sum(_rows_in_runs(sections[key], many) * key[3] for key, many in hashes.items())
    total, row_bytes = sum(f.total for f in files), sum(f.row_bytes for f in files)
    return Result(total, row_bytes, distinct, in_runs, tuple(files), tuple(errors))
