"""Cell tables of attention caches: where each cell's record ends, and the positions in it.

A record is i32 pos, u32 n_seq, ext, i32 seq_id[n_seq] (llama_kv_cache::state_write_meta). n_seq is the same
in every cell of a sequence state, any number in a session file; ext is 0, 8 or 12 bytes in the whole table.
"""

import numpy as np
from numpy.typing import NDArray

from .headers import SEQUENCES_MOST, STREAMS_MOST

TABLE_MOST = 64 << 20
# Changes of n_seq from cell to cell that a table may have: each costs a step in Python.
_CHANGES_MOST = 1 << 16
_STEP = 4096


class CellWalk:
    """Walks a table of ``cells`` records as its bytes come in.

    ``at`` is the offset behind the records walked so far, ``need`` how many bytes from the table's start are
    wanted to go on (never more than twice what is there, so that a wrong count costs little, nor more than
    one record beyond TABLE_MOST), ``failed`` that this is no such table.
    """

    def __init__(self, cells: int, ext: int, bare: bool) -> None:
        self.cells = cells
        self.ext = ext
        self.failed = False
        self.at = 0
        self.need = 8
        self._least = 0 if bare else 1
        self._left = cells
        self._changes = 0
        self._pos: list[NDArray[np.int32]] = []

    @property
    def done(self) -> bool:
        return not self._left

    def positions(self) -> NDArray[np.int64]:
        """int64[cells], in the order of the table."""
        return np.concatenate(self._pos).astype(np.int64) if self._pos else np.zeros(0, np.int64)

    def promise(self) -> int:
        """Least length of the whole table, in bytes."""
        return self.at + self._left * (8 + self.ext + 4 * self._least)

    def advance(self, table: bytes) -> None:
        """Walk on in ``table``, the bytes from the table's start that are there."""
        while self._left and not self.failed:
            if len(table) < self.at + 8:
                self._want(8)
                return
            count = int.from_bytes(table[self.at + 4 : self.at + 8], "little")
            if not self._least <= count <= STREAMS_MOST:
                self.failed = True
                return
            stride = 8 + self.ext + 4 * count
            there = min(self._left, (len(table) - self.at) // stride)
            if not there:
                self._want(stride)
                return
            self._take(table, count, stride, there)

    def _take(self, table: bytes, count: int, stride: int, there: int) -> None:
        """Take the records from ``at`` on that have ``count`` sequences, in growing steps."""
        step = min(there, 16)
        while there:
            words = np.frombuffer(table, "<i4", step * stride // 4, self.at).reshape(step, -1)
            other = np.flatnonzero(words[:, 1] != count)
            same = int(other[0]) if len(other) else step
            words = words[:same]
            ids = words[:, 2 + self.ext // 4 :]
            odd = (words[:, 0] < 0).any() or ((ids < 0) | (ids >= SEQUENCES_MOST)).any()
            if odd or self.at + same * stride > TABLE_MOST:
                self.failed = True
                return
            self._pos.append(words[:, 0].copy())
            self.at += same * stride
            self._left -= same
            there -= same
            if same < step:
                self._changes += 1
                self.failed = self._changes > _CHANGES_MOST
                return
            step = min(there, step * 4)

    def _want(self, record: int) -> None:
        rest = self._left * max(record, 8 + self.ext + 4 * self._least)
        self.need = self.at + max(record, min(rest, self.at + _STEP, TABLE_MOST - self.at))
