"""Headers: how to read them, and what is too odd to be one.

Every function here looks at bytes it is given and consumes nothing; a view may be short at the end of a file.
Layouts: llama.cpp, October 2026 (llama_kv_cache::state_write, llama_memory_recurrent::state_write,
llama_context::state_seq_get_data); see state-format.
"""

from itertools import pairwise
from struct import Struct, unpack_from
from typing import NamedTuple

from .types import GGML_TYPES

MAGICS = {
    "blob": (0xAF143CD8).to_bytes(4, "little"),
    "ggsq": (0x67677371).to_bytes(4, "little"),
    "ggsn": (0x6767736E).to_bytes(4, "little"),
}
SHARED_MAGIC_TAIL = MAGICS["ggsq"][1:]
DSV4_MAGIC = (0x34565344).to_bytes(4, "little")

# A row of K or V is a few KiB; a recurrent row can be a whole layer's state.
KV_ROW_MOST = 4 << 20
RECURRENT_ROW_MOST = 1 << 30
CELLS_MOST = 1 << 21
STREAMS_MOST = 256
LAYERS_MOST = 4096
SEQUENCES_MOST = 4096
TYPES_MOST = 4096
VERSIONS_MOST = 64
WORDS_MOST = 1 << 26
# Kv modules without cells in a row: no model has more caches.
EMPTY_MOST = 4

# Bytes that every test for a start wants to see: the counts of all streams and a few cells.
LOOK = 2048

# v_trans of ik_llama.cpp: 2 means that no layer has V.
V_PLAIN, V_TRANSPOSED, V_NONE = 0, 1, 2

_ROW = Struct("<iQ")
_TRANSPOSED = Struct("<iII")
ROW_HEADER = _ROW.size
TRANSPOSED_HEADER = _TRANSPOSED.size


def u32(view: bytes, at: int) -> int:
    """The u32 at ``at``; 2**32 (plausible nowhere) where the view ends before."""
    return int.from_bytes(view[at : at + 4], "little") if len(view) >= at + 4 else 1 << 32


class RowHeader(NamedTuple):
    """i32 type, u64 row_bytes. ``score``: 2 a known type that fits, 1 an unknown type, 0 implausible."""

    type: int
    row_bytes: int
    score: int

    def __str__(self) -> str:
        """For a report, which tells nothing of what is no header at all: that could be anybody's words."""
        kind = f"type {self.type}" if -1 <= self.type < TYPES_MOST else "no type"
        size = f"a row of {self.row_bytes} bytes" if self.row_bytes <= RECURRENT_ROW_MOST else "no size"
        return f"{kind}, {size}"


def row_header(view: bytes, at: int = 0, most: int = KV_ROW_MOST) -> RowHeader:
    """The section header at ``at``."""
    if len(view) < at + ROW_HEADER:
        return RowHeader(0, 0, 0)
    type_id, row = _ROW.unpack_from(view, at)
    known = GGML_TYPES.get(type_id)
    if not 1 <= row <= most:
        # A layer without attention heads (dense models with gaps, ik_llama.cpp's placeholders): empty rows.
        empty = row == 0 and (type_id == -1 or known is not None)
        return RowHeader(type_id, row, 2 if empty else 0)
    if known:
        return RowHeader(type_id, row, 2 if row % known.bytes == 0 else 0)
    return RowHeader(type_id, row, 1 if 0 <= type_id < TYPES_MOST else 0)


class TransposedHeader(NamedTuple):
    """i32 type, u32 el_bytes, u32 n_embd (embedding rows)."""

    type: int
    el_bytes: int
    rows: int
    score: int


def transposed_header(view: bytes) -> TransposedHeader:
    """The header of a transposed V section at the start of ``view``."""
    if len(view) < TRANSPOSED_HEADER:
        return TransposedHeader(0, 0, 0, 0)
    type_id, size, rows = _TRANSPOSED.unpack_from(view)
    known = GGML_TYPES.get(type_id)
    fits = size == known.bytes if known else 0 <= type_id < TYPES_MOST and 1 <= size <= 1024
    score = (2 if known else 1) if fits and rows <= KV_ROW_MOST else 0
    return TransposedHeader(type_id, size, rows, score)


class KvHeader(NamedTuple):
    """v_trans, n_layer and, when ``rotations``, n_rot_k and n_rot_v; ``length`` in bytes.

    ``score``: 4 a known type follows, 2 an unknown one, 1 an empty row.
    """

    v_trans: int
    layers: int
    rotations: bool
    length: int
    score: int


def kv_header(view: bytes, at: int, prefer_rotations: bool) -> KvHeader | None:
    """The header between a kv module's cells and its first K section, None where nothing fits.

    Whether the rotation words are there (SEQ version 4 on) shows in which reading gives the better section
    header behind it; version numbers are not to be trusted (clients, 1.4 and 1.5).
    """
    v_trans, layers = u32(view, at), u32(view, at + 4)
    if v_trans > V_NONE or layers > LAYERS_MOST:
        return None
    if layers == 0:
        return KvHeader(v_trans, 0, prefer_rotations, 16 if prefer_rotations else 8, 0)
    without = _first_score(row_header(view, at + 8))
    rotated = _first_score(row_header(view, at + 16))
    if max(u32(view, at + 8), u32(view, at + 12)) > 1 << 20:
        rotated = 0
    if not without and not rotated:
        return None
    rotations = prefer_rotations if rotated == without else rotated > without
    return KvHeader(v_trans, layers, rotations, 16 if rotations else 8, max(rotated, without))


def _first_score(header: RowHeader) -> int:
    """Empty rows are the weakest sign: a row of zeros would pass for one."""
    return header.score * 2 if header.row_bytes else header.score and 1


def kv_start(view: bytes) -> bool:
    """Does a kv module with its n_stream word start here?  (All current versions.)

    u32 n_stream, u32 n_cell a stream, and the first cells must agree; they are 64 bits of evidence a cell.
    """
    streams = u32(view, 0)
    if not 1 <= streams <= STREAMS_MOST:
        return False
    return stream_start(view, 4, streams)


def stream_start(view: bytes, at: int, streams: int) -> bool:
    """Do ``streams`` streams start here, at least one of them with cells?"""
    for _ in range(streams):
        cells = u32(view, at)
        at += 4
        if cells:
            return cells <= CELLS_MOST and cells_start(view, at, cells)
    return False


def kv_empty(view: bytes, more: int = EMPTY_MOST - 1) -> int:
    """Length of a kv module without cells that starts here, 0 if none does.

    It is n_stream and as many zeros, which is little to go by: the file must end there, or something start,
    behind ``more`` further modules without cells at most.
    """
    streams = u32(view, 0)
    end = 4 + 4 * streams
    if not 1 <= streams <= STREAMS_MOST or len(view) < end or any(view[4:end]):
        return 0
    rest = view[end:]
    if not rest or rest[:4] in MAGICS.values() or module_start(rest):
        return end
    return end if more and kv_empty(rest, more - 1) else 0


def cells_start(view: bytes, at: int, cells: int) -> bool:
    """Do ``cells`` cells of an attention cache start here, one sequence or more each?"""
    return any(_cells_start(view, at, cells, ext) for ext in (0, 12, 8))


def _cells_start(view: bytes, at: int, cells: int, ext: int) -> bool:
    seen = 0
    while seen < min(cells, 8) and at + 8 <= len(view):
        pos, count = unpack_from("<iI", view, at)
        ids = at + 8 + ext
        at = ids + 4 * count
        if pos < 0 or not 1 <= count <= STREAMS_MOST:
            return False
        if at > len(view):
            break
        if not _ids_ascend(unpack_from(f"<{count}I", view, ids)):
            return False
        seen += 1
    # A view that ends among the first cells is the end of the file: what is there agrees.
    if seen < cells or len(view) < at + 28:
        return seen > 0 or len(view) < at + 12
    return kv_header(view, at, True) is not None


def _ids_ascend(ids: tuple[int, ...]) -> bool:
    return ids[-1] < SEQUENCES_MOST and all(a < b for a, b in pairwise(ids))


def old_kv_start(view: bytes) -> bool:
    """Does a kv module without n_stream start here?  (Before July 2025, and ik_llama.cpp.)

    u32 n_cell, cells of {i32 pos, u32 n_seq} with n_seq 0, or 1 and a sequence id. Zeros would pass for cells
    without sequences, so the first positions must rise by one.
    """
    cells = u32(view, 0)
    if not 2 <= cells <= CELLS_MOST:
        return False
    count = u32(view, 8)
    if count > 1:
        return False
    stride = 8 + 4 * count
    seen = min(cells, 4)
    if len(view) < 4 + seen * stride:
        return False
    pos = [u32(view, 4 + i * stride) for i in range(seen)]
    same = all(view[8 + i * stride : 4 + (i + 1) * stride] == view[8 : 4 + stride] for i in range(seen))
    if not same or pos != list(range(pos[0], pos[0] + seen)) or pos[0] >= 1 << 31:
        return False
    end = 4 + cells * stride
    return len(view) < end + 28 or kv_header(view, end, False) is not None


class RecurrentStart(NamedTuple):
    """A recurrent module's head: cells, n_layer and the bytes up to its first section header."""

    cells: int
    layers: int
    length: int


def recurrent_start(view: bytes) -> RecurrentStart | None:
    """Does a recurrent module start here?

    u32 n_cell (one a sequence), cells {i32 pos, u32 n_seq, ids}, u32 s_trans = 0, u32 n_layer, and a section
    header of a known type.
    """
    cells = u32(view, 0)
    if cells > STREAMS_MOST:
        return None
    at = 4
    for _ in range(cells):
        count = u32(view, at + 4)
        if u32(view, at) >= 1 << 31 or count > STREAMS_MOST:
            return None
        at += 8
        if count and not (at + 4 * count <= len(view) and _ids_ascend(unpack_from(f"<{count}I", view, at))):
            return None
        at += 4 * count
    layers = u32(view, at + 4)
    if u32(view, at) != 0 or not 1 <= layers <= LAYERS_MOST:
        return None
    # Models with only one of R and S write empty rows for the other.
    for section in range(layers + 1):
        first = row_header(view, at + 8 + section * ROW_HEADER, RECURRENT_ROW_MOST)
        if first.score < 2 or first.type < 0:
            return None
        if first.row_bytes:
            return RecurrentStart(cells, layers, at + 8)
    return None


def dsv4_start(view: bytes) -> bool:
    """Does a deepseek4 state start here?  u32 magic, u32 version, u32 mode (llama_kv_cache_dsv4)."""
    return view[:4] == DSV4_MAGIC and 1 <= u32(view, 4) <= VERSIONS_MOST and u32(view, 8) <= 1


def module_start(view: bytes) -> bool:
    """Does a module with something in it start here?"""
    return kv_start(view) or old_kv_start(view) or recurrent_start(view) is not None or dsv4_start(view)


def container_start(view: bytes) -> str | None:
    """The container that starts here: blob, ggsq, ggsn or None."""
    magic = view[:4]
    if magic == MAGICS["blob"]:
        sequence = u32(view, 4)
        if sequence >= SEQUENCES_MOST and sequence != 0xFFFFFFFF:
            return None
        rest = view[8:]
        return "blob" if not rest or module_start(rest) or kv_empty(rest) else None
    if magic in (MAGICS["ggsq"], MAGICS["ggsn"]):
        if not 1 <= u32(view, 4) <= VERSIONS_MOST or u32(view, 8) > WORDS_MOST:
            return None
        return "ggsq" if magic == MAGICS["ggsq"] else "ggsn"
    return None
