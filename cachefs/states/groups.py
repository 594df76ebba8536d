"""Where a section's rows are cut: runs of consecutive positions, cut at multiples of a power of two.

The cut depends on positions alone, so neither the length of what stands before a section nor the first
position of a window moves it, and cells in rotated or fragmented order still meet their twins (design,
section 3).
"""

import numpy as np
from numpy.typing import NDArray


def group_length(width: int, target: int) -> int:
    """Rows a group: the largest power of two with ``length * width <= target``, at least 1."""
    return 1 << (max(1, target // max(1, width)).bit_length() - 1)


class Groups:
    """The cuts of one cell table, for every group length its sections ask for.

    ``pos``: int64[n_cell], in the order of the cells.
    """

    def __init__(self, pos: NDArray[np.int64]) -> None:
        self.cells = len(pos)
        step = np.diff(pos)
        breaks = np.flatnonzero((step != 0) & (step != 1)) + 1
        self._starts: NDArray[np.int64] = np.concatenate(([0], breaks, [len(pos)])).astype(np.int64)
        self._first: NDArray[np.int64] = pos[self._starts[:-1]] if len(pos) else pos
        self._window = bool(self.cells) and int(pos.min()) > 0
        self._cuts: dict[int, tuple[int, ...]] = {}

    @classmethod
    def counted(cls, rows: int) -> "Groups":
        """The cuts of ``rows`` rows whose positions are 0, 1, 2 …"""
        return cls(np.arange(rows, dtype=np.int64))

    def cut(self, length: int) -> tuple[int, ...]:
        """Cells of each group, left to right, for groups of at most ``length`` cells (a power of two)."""
        if self._window and self.cells < length:
            # Both ends of a sliding window smaller than a group move, so neither its first nor its last row
            # would ever be met again: it needs cuts within. Not below 1/64 of a group, or blocks get tiny.
            length = max(1 << max(0, self.cells.bit_length() - 3), length // 64, 1)
        cuts = self._cuts.get(length)
        if cuts is None:
            edges = self._edges(length) if self.cells else [0]
            cuts = self._cuts[length] = tuple(np.diff(np.array(edges, dtype=np.int64)).tolist())
        return cuts

    def _edges(self, length: int) -> list[int]:
        """Cell indices of all cuts, 0 and the end included.

        A run shorter than a sixteenth of a group is joined with its neighbours that are as short, so that a
        fragmented cache does not fall into single rows; a short run between long ones stays alone.
        """
        least = max(1, length // 16)
        starts = self._starts
        long = np.flatnonzero(np.diff(starts) >= least)
        edges = [0]
        run = 0
        for index in [*long.tolist(), len(starts) - 1]:
            if run < index:
                self._join_short(run, index, length, least, edges)
            if index < len(starts) - 1:
                begin, end = int(starts[index]), int(starts[index + 1])
                ahead = -int(self._first[index]) % length or length
                edges.extend(range(begin + ahead, end, length))
                edges.append(end)
            run = index + 1
        return edges

    def _join_short(self, run: int, stop: int, length: int, least: int, edges: list[int]) -> None:
        """Cut the short runs ``run … stop - 1``, where a position block ends or a group is full."""
        starts = self._starts[: stop + 1]
        block = self._first[:stop] // length
        while run < stop:
            begin = int(starts[run])
            full = int(np.searchsorted(starts, begin + length, "right")) - 1
            near = max(run + 1, int(np.searchsorted(starts, begin + least)))
            other = np.flatnonzero(block[near : min(full, stop)] != block[run])
            run = near + int(other[0]) if len(other) else full
            edges.append(int(starts[run]))
