"""The parser of recurrent states (llama_memory_recurrent::state_write)."""

from .headers import (
    LOOK,
    RECURRENT_ROW_MOST,
    ROW_HEADER,
    container_start,
    module_start,
    recurrent_start,
    row_header,
)
from .report import Module, Section
from .source import Source, Step

_PLE_HEADER = 8


def parse_recurrent(source: Source) -> Step[bool]:
    """One recurrent module from here on: R sections, then S sections, as long as headers are plausible.

    A recurrent row is new at every token, but checkpoints repeat whole sections at other offsets, so each
    section is cut from its own start. Layers without a state leave no trace, so the number of sections is
    known only by what follows.
    """
    start = recurrent_start((yield from source.peek(LOOK)))
    if start is None:
        return False
    module = source.report.add_module("recurrent", source.offset)
    module.cells, module.layers = start.cells, start.layers
    source.promise(source.offset + start.length + ROW_HEADER)
    source.chunk(start.length)
    kind = "R"
    first: tuple[int, int] | None = None
    layer = 0
    for _ in range(2 * start.layers):
        view = yield from source.peek(LOOK)
        header = row_header(view, 0, RECURRENT_ROW_MOST)
        if header.score < 2 or header.type < 0:
            break
        if first is not None and (container_start(view) or module_start(view)):
            break
        # All R rows have one width and all S rows another.
        if kind == "R" and first is not None and (header.type, header.row_bytes) != first:
            kind, layer = "S", 0
        first = first or (header.type, header.row_bytes)
        yield from _section(source, module, kind, layer, header.type, header.row_bytes, ROW_HEADER)
        if kind == "R" and header.row_bytes:
            row = _ple_row((yield from source.peek(_PLE_HEADER + ROW_HEADER)))
            if row:
                yield from _section(source, module, "P", layer, header.type, row, _PLE_HEADER)
        layer += 1
    source.promise(max(source.promised, source.offset))
    return True


def _section(
    source: Source, module: Module, kind: str, layer: int, type_id: int, row: int, header: int
) -> Step[None]:
    size = row * module.cells
    section = Section(layer, kind, type_id, row, module.cells, source.offset, module.cells)
    source.report.add_section(module, section)
    source.promise(source.offset + header + size)
    source.chunk(header)
    yield from source.fixed(size)


def _ple_row(view: bytes) -> int:
    """Row bytes of a PLE convolution's history, which follows an R section as a bare u64; 0 if none does.

    Read as such, any section header is enormous, and the other way round.
    """
    if len(view) < _PLE_HEADER:
        return 0
    row = int.from_bytes(view[:_PLE_HEADER], "little")
    fits = 4 <= row <= RECURRENT_ROW_MOST and row % 2 == 0
    return row if fits and not row_header(view, 0, RECURRENT_ROW_MOST).score else 0
