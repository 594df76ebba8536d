"""The pieces a file is cut into.

The concatenated ``data`` of all pieces is the file, byte for byte; what kind a
piece is only tells the store how to look for its twins.
"""

from dataclasses import dataclass

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes that are no KV rows: tokens, cell tables, recurrent rows, foreign files."""

    data: Buffer


@dataclass(frozen=True, slots=True)
class Rows:
    """A group of whole rows of one linear section, one row a cell.

    ``len(data)`` is a multiple of ``width`` (bytes a row). The cells of a group
    have consecutive positions and a group never crosses a multiple of its
    section's group length, so equal prefixes give equal groups.
    """

    data: Buffer
    width: int


@dataclass(frozen=True, slots=True)
class Band:
    """A band of a transposed V section: ``rows`` embedding rows of all cells.

    ``data`` is ``rows * sum(cells) * width`` bytes, embedding row after embedding
    row, ``width`` bytes an element. ``cells`` splits the columns into position
    groups, left to right; each group of columns is one tile.
    """

    data: Buffer
    rows: int
    width: int
    cells: tuple[int, ...]


Piece = Chunk | Rows | Band
