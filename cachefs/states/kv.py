"""The parser of attention caches (llama_kv_cache::state_write and its older and foreign forms)."""

from dataclasses import dataclass

from .cells import CellWalk
from .groups import Groups, group_length
from .headers import (
    CELLS_MOST,
    LAYERS_MOST,
    LOOK,
    ROW_HEADER,
    STREAMS_MOST,
    TRANSPOSED_HEADER,
    V_NONE,
    V_TRANSPOSED,
    KvHeader,
    container_start,
    dsv4_start,
    kv_header,
    module_start,
    row_header,
    stream_start,
    transposed_header,
    u32,
)
from .report import Module, Section
from .source import BAND_ROWS, Source, Step

# What a section costs at least, in bytes cut in that time.
_SECTION = 512
# What another stream of a module costs at least, likewise: its cell table is tried in three forms.
_STREAM = 16384


@dataclass(slots=True)
class Table:
    """One stream's cells and the header behind them; ``length`` in bytes, n_cell and header included."""

    groups: Groups
    header: KvHeader
    length: int
    ext: int


@dataclass(slots=True)
class Seen:
    """What the sections of a module had so far, to judge the next one by."""

    types: set[int]
    least_row: int = 1 << 62
    empty_rows: bool = False

    def add(self, type_id: int, row_bytes: int) -> None:
        self.types.add(type_id)
        if row_bytes:
            self.least_row = min(self.least_row, row_bytes)
        else:
            self.empty_rows = True


def parse_kv(source: Source, old: bool) -> Step[bool]:
    """One kv module from here on; ``old``: without the n_stream word.

    False when it is none after all (nothing was given out), or when it stops to make sense midway.
    """
    head = yield from source.peek(8)
    streams = 1 if old else u32(head, 0)
    if not 1 <= streams <= STREAMS_MOST:
        return False
    module: Module | None = None
    start = source.offset
    before = 0 if old else 4
    for stream in range(streams):
        source.promise(max(source.promised, source.offset + before + 4 * (streams - stream)))
        word = yield from source.peek(4, before)
        if len(word) < 4:
            source.chunk(before + len(word))
            return True
        cells = u32(word, 0)
        if not cells:
            before += 4
            continue
        if cells > CELLS_MOST:
            return False
        table = yield from _table(source, before, cells, old)
        if table is None:
            return False
        begin = source.offset
        first = module is None
        if module is None:
            module = source.report.add_module("kv", start)
        module.cells += cells
        if isinstance(table, CellWalk):
            yield from source.chunks(source.window.have)
            return True
        module.layers = max(module.layers, table.header.layers)
        module.form = _form(old, table)
        yield from source.chunks(before + table.length)
        before = 0
        if not (yield from _sections(source, module, table, cells, streams - stream - 1)):
            return False
        if not first:
            source.charge(_STREAM, source.offset - begin)
        if source.eof and not source.window.have:
            source.promise(max(source.promised, source.offset + 4 * (streams - stream - 1)))
            return True
    if module is None:
        module = source.report.add_module("kv", start)
    source.chunk(before)
    source.promise(source.offset)
    return True


def _form(old: bool, table: Table) -> str:
    parts = ["no n_stream" if old else "", f"ext {table.ext}", "rotations" if table.header.rotations else ""]
    return ", ".join(part for part in parts if part)


def _table(source: Source, before: int, cells: int, old: bool) -> Step[Table | CellWalk | None]:
    """The cell table ``before`` bytes ahead; a CellWalk when the file ends in it, None when it is none."""
    start = before + 4
    torn: CellWalk | None = None
    weak: Table | None = None
    version = source.report.version
    prefer_rotations = not old and (source.report.container == "blob" or version is None or version >= 4)
    for ext in (0, 12, 8):
        walk = CellWalk(cells, ext, old)
        while not walk.done and not walk.failed:
            source.promise(source.offset + start + walk.promise() + 8)
            wanted = walk.need
            view = yield from source.peek(wanted, start)
            walk.advance(view)
            if len(view) < wanted:
                break
        if walk.failed:
            continue
        if walk.done:
            source.promise(source.offset + start + walk.at + 8)
            view = yield from source.peek(16 + ROW_HEADER, start + walk.at)
            header = kv_header(view, 0, prefer_rotations)
            if header is not None:
                table = Table(Groups(walk.positions()), header, 4 + walk.at + header.length, ext)
                if header.score > 1 or not header.layers:
                    return table
                weak = weak or table
                continue
            if len(view) == 16 + ROW_HEADER or (len(view) >= 4 and u32(view, 0) > V_NONE):
                continue
            if len(view) >= 8 and u32(view, 4) > LAYERS_MOST:
                continue
            source.promise(max(source.promised, source.offset + start + walk.at + len(view) + 1))
        torn = torn or walk
    if weak is not None:
        return weak
    if torn is None:
        source.promise(source.offset)
        source.wasted += walk.at
    else:
        end = source.offset + start + torn.promise() + 8 + ROW_HEADER
        source.promise(max(end, source.offset + source.window.have + 1))
    return torn


def _sections(source: Source, module: Module, table: Table, cells: int, streams_left: int) -> Step[bool]:
    """All K sections, then the V sections; False when a header makes no sense."""
    layers = table.header.layers
    seen = Seen(set())
    source.promise(source.offset + layers * ROW_HEADER)
    for layer in range(layers):
        view = yield from source.peek(ROW_HEADER)
        if len(view) < ROW_HEADER:
            source.chunk(len(view))
            return True
        header = row_header(view)
        if not header.score or (header.score == 1 and seen.types and header.type not in seen.types):
            source.stop(f"no header of K section {layer} of {layers}: {header}")
            return False
        seen.add(header.type, header.row_bytes)
        end = source.offset + ROW_HEADER + cells * header.row_bytes
        row = min(seen.least_row, header.row_bytes)
        source.promise(end + (layers - layer - 1) * (ROW_HEADER + cells * row))
        yield from _linear(source, module, table, "K", layer, header.type, header.row_bytes)
    if table.header.v_trans == V_NONE:
        return True
    for layer in range(layers):
        if not (yield from _next_is_v(source, table, seen, layer, streams_left)):
            break
        if table.header.v_trans == V_TRANSPOSED:
            yield from _transposed(source, module, table, layer, cells, seen)
        else:
            header = row_header((yield from source.peek(ROW_HEADER)))
            seen.add(header.type, header.row_bytes)
            source.promise(source.offset + ROW_HEADER + cells * header.row_bytes)
            yield from _linear(source, module, table, "V", layer, header.type, header.row_bytes)
    source.expected = b""
    return True


def _linear(
    source: Source, module: Module, table: Table, kind: str, layer: int, type_id: int, row: int
) -> Step[None]:
    cells = table.groups.cells
    source.report.add_section(module, Section(layer, kind, type_id, row, cells, source.offset, cells))
    source.charge(_SECTION, row * cells)
    source.chunk(ROW_HEADER)
    if row:
        yield from source.rows(table.groups.cut(group_length(row, source.target)), row)


def _transposed(
    source: Source, module: Module, table: Table, layer: int, cells: int, seen: Seen
) -> Step[None]:
    header = transposed_header((yield from source.peek(TRANSPOSED_HEADER)))
    seen.types.add(header.type)
    section = Section(layer, "VT", header.type, header.el_bytes, cells, source.offset, header.rows)
    source.report.add_section(module, section)
    source.charge(_SECTION, header.rows * cells * header.el_bytes)
    source.promise(source.offset + TRANSPOSED_HEADER + header.rows * cells * header.el_bytes)
    source.chunk(TRANSPOSED_HEADER)
    length = group_length(BAND_ROWS * header.el_bytes, source.target)
    yield from source.bands(table.groups.cut(length), header.rows, header.el_bytes)


def _next_is_v(source: Source, table: Table, seen: Seen, layer: int, streams_left: int) -> Step[bool]:
    """Is the next header that of a V section, rather than the start of what follows the module?

    Caches without V (MLA) and layers without V leave no trace, and a module that starts with the words
    1, n_cell, 0 reads like the header of f16 rows; so what could start here is asked first.
    """
    source.expected = min(seen.types).to_bytes(4, "little", signed=True) if len(seen.types) == 1 else b""
    view = yield from source.peek(LOOK)
    if len(view) < ROW_HEADER:
        if view and source.expected and view[:4] == source.expected[: len(view)]:
            source.promise(source.offset + ROW_HEADER)
            source.chunk(len(view))
        return False
    if table.header.v_trans == V_TRANSPOSED:
        transposed = transposed_header(view)
        score, empty = transposed.score, transposed.rows == 0
    else:
        linear = row_header(view)
        score, empty = linear.score, linear.row_bytes == 0
    if not score or (empty and not seen.empty_rows):
        return False
    if score == 1 and layer and int.from_bytes(view[:4], "little") not in seen.types:
        return False
    if streams_left:
        return not _streams_go_on(view, streams_left)
    return container_start(view) is None and not module_start(view)


def _streams_go_on(view: bytes, streams: int) -> bool:
    """Do the remaining streams of the module start here: cells, or zeros up to what follows the module?"""
    if stream_start(view, 0, streams):
        return True
    rest = view[4 * streams :]
    if any(view[: 4 * streams]):
        return False
    return not rest or container_start(rest) is not None or module_start(rest) or dsv4_start(rest)
