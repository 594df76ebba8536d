"""Recipes: which slices of which blocks make up a file.

A recipe is an array of 24-byte records, three unsigned 64-bit words each: the
kind (top byte) and length in bytes of the first, and two words that depend on
the kind:

======  ==========================  =====================================
kind    a                           b
======  ==========================  =====================================
HOLE    0                           0
SLICE   block id                    offset in the block's raw bytes
INLINE  up to 16 bytes themselves   (continued)
BAND    embedding rows              parts << 48 | bytes skipped
PART    block id                    offset in each of the tile's rows
======  ==========================  =====================================

A BAND stands for a rectangle, embedding rows × cells, laid out row after row;
the PARTs that follow it are its columns, left to right, with their length in
bytes a row. They take no room in the file of their own. The record covers
``length`` bytes of the rectangle from ``skipped`` on, so that any record can be
cut anywhere.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

HOLE, SLICE, INLINE, BAND, PART = range(5)

INLINE_BYTES = 16
Records = npt.NDArray[np.uint64]

_KIND_SHIFT = 56
_LENGTH = (1 << _KIND_SHIFT) - 1
_SKIP = (1 << 48) - 1
MAX_SIZE = 1 << 47
"""Largest file, in bytes (128 TiB)."""
MAX_PARTS = (1 << 16) - 1
"""Most parts of one band."""

EMPTY: Records = np.empty((0, 3), np.uint64)
Word3 = tuple[int, int, int]


def hole(length: int) -> Word3:
    return (HOLE << _KIND_SHIFT | length, 0, 0)


def slice_of(block: int, offset: int, length: int) -> Word3:
    return (SLICE << _KIND_SHIFT | length, block, offset)


def inline(data: bytes) -> list[Word3]:
    """Records that hold ``data`` themselves."""
    out = []
    for start in range(0, len(data), INLINE_BYTES):
        part = data[start : start + INLINE_BYTES]
        word = int.from_bytes(part.ljust(INLINE_BYTES, b"\0"), "little")
        out.append((INLINE << _KIND_SHIFT | len(part), word & (1 << 64) - 1, word >> 64))
    return out


def band(rows: int, length: int, parts: list[tuple[int, int, int]], skip: int = 0) -> list[Word3]:
    """A rectangle of ``rows`` rows; parts are (block, offset in the tile's row, bytes a row)."""
    head = (BAND << _KIND_SHIFT | length, rows, len(parts) << 48 | skip)
    return [head, *((PART << _KIND_SHIFT | width, block, offset) for block, offset, width in parts)]


def records(words: list[Word3]) -> Records:
    return np.array(words, np.uint64).reshape(-1, 3)


def columns(recs: Records) -> tuple[Records, Records, Records, Records]:
    """Kinds, lengths, a and b of all records."""
    return recs[:, 0] >> np.uint64(_KIND_SHIFT), recs[:, 0] & np.uint64(_LENGTH), recs[:, 1], recs[:, 2]


class Extent(NamedTuple):
    """One record, decoded: ``length`` bytes of the file from ``start``. Parts as for `band`."""

    start: int
    length: int
    kind: int
    a: int
    b: int
    parts: list[tuple[int, int, int]]

    @property
    def data(self) -> bytes:
        """An INLINE extent's bytes."""
        return (self.a | self.b << 64).to_bytes(INLINE_BYTES, "little")[: self.length]

    @property
    def skip(self) -> int:
        return self.b & _SKIP

    def words(self, start: int, stop: int) -> list[Word3]:
        """The records for bytes start … stop of this extent (offsets from its own start)."""
        length = stop - start
        if self.kind == SLICE:
            return [slice_of(self.a, self.b + start, length)]
        if self.kind == INLINE:
            return inline(self.data[start:stop])
        if self.kind == BAND:
            return band(self.a, length, self.parts, self.skip + start)
        return [hole(length)]


class Recipe:
    """An immutable sequence of records that covers a file of ``size`` bytes."""

    __slots__ = ("_ends", "records", "size")

    def __init__(self, recs: Records = EMPTY) -> None:
        self.records = recs
        lengths = recs[:, 0] & np.uint64(_LENGTH)
        lengths[recs[:, 0] >> np.uint64(_KIND_SHIFT) == PART] = 0
        self._ends = np.cumsum(lengths, dtype=np.uint64)
        self.size = int(self._ends[-1]) if len(recs) else 0

    def __len__(self) -> int:
        return len(self.records)

    @classmethod
    def from_pages(cls, pages: list[bytes]) -> "Recipe":
        return cls(np.frombuffer(b"".join(pages), np.uint64).reshape(-1, 3).copy())

    def pages(self, records_a_page: int) -> list[bytes]:
        step = records_a_page
        return [self.records[i : i + step].tobytes() for i in range(0, len(self.records), step)]

    def blocks(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Distinct block ids and how many records name each."""
        kinds = self.records[:, 0] >> np.uint64(_KIND_SHIFT)
        ids = self.records[(kinds == SLICE) | (kinds == PART), 1]
        unique, counts = np.unique(ids, return_counts=True)
        return unique, counts.astype(np.int64)

    def bytes_in(self, blocks: set[int]) -> int:
        """Bytes of the file that lie in these blocks; what lies in the recipe itself counts too."""
        total = 0
        rows = 0
        for word, a, _ in self.records.tolist():
            kind, length = word >> _KIND_SHIFT, word & _LENGTH
            if kind == BAND:
                rows = a
            elif kind == PART:
                total += length * rows if a in blocks else 0
            elif kind == INLINE or (kind == SLICE and a in blocks):
                total += length
        return total

    def simple(self, start: int, stop: int) -> list[tuple[int, int, int, int, int]]:
        """What bytes start … stop consist of: (kind, begin, end, a, b) for each record they touch.

        Empty where a band or the file's end is among it. Four times as fast as `extents`.
        """
        first = int(np.searchsorted(self._ends, np.uint64(start), side="right"))
        last = int(np.searchsorted(self._ends, np.uint64(stop), side="left"))
        if last == len(self.records):
            return []
        begin = int(self._ends[first - 1]) if first else 0
        found = []
        for (word, a, b), end in zip(
            self.records[first : last + 1].tolist(), self._ends[first : last + 1].tolist(), strict=True
        ):
            kind = word >> _KIND_SHIFT
            if kind in (BAND, PART):
                return []
            found.append((kind, begin, end, a, b))
            begin = end
        return found

    def extents(self, start: int, stop: int) -> Iterator[Extent]:
        """The extents that touch bytes start … stop, in order."""
        stop = min(stop, self.size)
        if start >= stop:
            return
        i = int(np.searchsorted(self._ends, np.uint64(start), side="right"))
        while i < len(self.records):
            word, a, b = self.records[i].tolist()
            length = word & _LENGTH
            end = int(self._ends[i])
            if end - length >= stop:
                return
            count = b >> 48 if word >> _KIND_SHIFT == BAND else 0
            parts = [(p[1], p[2], p[0] & _LENGTH) for p in self.records[i + 1 : i + 1 + count].tolist()]
            yield Extent(end - length, length, word >> _KIND_SHIFT, a, b, parts)
            i += 1 + count

    def _span(self, start: int, stop: int) -> Records:
        """Records for the bytes start … stop, whole records copied as they stand."""
        if start >= stop:
            return EMPTY
        first = int(np.searchsorted(self._ends, np.uint64(start), side="right"))
        last = int(np.searchsorted(self._ends, np.uint64(stop), side="left"))
        begin = int(self._ends[first - 1]) if first else 0
        out: list[Records] = []
        if begin < start or int(self._ends[last]) > stop:
            edge = next(self.extents(start, start + 1))
            out.append(
                records(edge.words(start - edge.start, min(stop, edge.start + edge.length) - edge.start))
            )
            first += 1 + len(edge.parts)
            if last < first:
                return out[0]
            tail = next(self.extents(stop - 1, stop))
            out.append(self.records[first:last])
            out.append(records(tail.words(0, stop - tail.start)))
        else:
            after = int(np.searchsorted(self._ends, np.uint64(stop), side="right"))
            out.append(self.records[first:after])
        return np.concatenate(out)

    def cut(self, size: int) -> "Recipe":
        """The first ``size`` bytes; grown by a hole if there are fewer."""
        if size <= self.size:
            return Recipe(self._span(0, size))
        return self.append(records([hole(size - self.size)]))

    def append(self, recs: Records) -> "Recipe":
        return Recipe(np.concatenate([self.records, recs])) if len(recs) else self

    def replace(self, edits: list[tuple[int, int, Records]]) -> "Recipe":
        """Replace byte ranges (start, stop, records of stop - start bytes), ascending and disjoint.

        A range may start beyond the end (a hole fills the gap) and may pass the end.
        """
        out: list[Records] = []
        at = 0
        for start, stop, recs in edits:
            out.append(self._span(at, min(start, self.size)))
            if start > max(self.size, at):
                out.append(records([hole(start - max(self.size, at))]))
            out.append(recs)
            at = stop
        out.append(self._span(at, self.size))
        return Recipe(np.concatenate(out))
