"""The parser of a deepseek4 state's own parts (llama_kv_cache_dsv4::state_write)."""

from struct import Struct
from typing import NamedTuple

from .groups import Groups, group_length
from .headers import (
    CELLS_MOST,
    EMPTY_MOST,
    KV_ROW_MOST,
    LAYERS_MOST,
    LOOK,
    STREAMS_MOST,
    TYPES_MOST,
    kv_empty,
    kv_start,
    u32,
)
from .kv import parse_kv
from .report import Module, Section
from .source import Source, Step
from .types import GGML_TYPES

_HEAD = 12
# A state has eight: two kv modules, three compressed K caches, three compressor states.
_PARTS_MOST = 16
_EMPTY_KV = (1).to_bytes(8, "little")
# u32 layer id, then i32 type, u64 ne0, u64 rows, u64 row_bytes.
_TENSOR = Struct("<iQQQ")
_LAYER = 4
_K_HEAD = 16
_STATE_HEAD = 24


class Tensor(NamedTuple):
    type: int
    rows: int
    row_bytes: int


class Part(NamedTuple):
    """Header of a compressed K cache (``tensors`` 1 a layer) or a compressor state (2 a layer)."""

    tensors: int
    rows: int
    streams: int
    layers: int
    length: int


def parse_dsv4(source: Source) -> Step[bool]:
    """From the magic DSV4 on: kv modules, compressed K caches, compressor states, while they make sense."""
    source.report.add_module("dsv4", source.offset)
    yield from source.fill(_HEAD)
    source.chunk(_HEAD)
    for _ in range(_PARTS_MOST):
        view = yield from source.peek(LOOK)
        # A K cache with one row can read like the cells of a kv module; its tensor's sizes decide.
        if part := _part(view):
            if not (yield from _parse_part(source, part)):
                return False
        elif kv_start(view):
            if not (yield from parse_kv(source, old=False)):
                return False
        elif empty := _empty_kv(view):
            source.report.add_module("kv", source.offset)
            source.chunk(empty)
        else:
            break
    return True


def _empty_kv(view: bytes, more: int = EMPTY_MOST - 1) -> int:
    """Length of a kv module without cells, when one of the state's own parts or another such comes next."""
    if view[:8] == _EMPTY_KV:
        rest = view[8:]
        if _part(rest) or kv_start(rest) or (more and _empty_kv(rest, more - 1)):
            return 8
    return kv_empty(view)


def _part(view: bytes) -> Part | None:
    for part in (
        Part(1, u32(view, 4), u32(view, 8), u32(view, 12), _K_HEAD),
        Part(2, u32(view, 8), u32(view, 16), u32(view, 20), _STATE_HEAD),
    ):
        versions = (1, 2) if part.tensors == 1 else (1,)
        if u32(view, 0) not in versions or part.rows > CELLS_MOST:
            continue
        if not (1 <= part.streams <= STREAMS_MOST and part.layers <= LAYERS_MOST):
            continue
        if not part.layers or _tensor(view, part.length + _LAYER, part.rows):
            return part
    return None


def _tensor(view: bytes, at: int, rows: int) -> Tensor | None:
    """The tensor header at ``at``, if it says ``rows`` rows and its sizes add up."""
    if len(view) < at + _TENSOR.size:
        return None
    type_id, width, count, row_bytes = _TENSOR.unpack_from(view, at)
    if count != rows or not 1 <= row_bytes <= KV_ROW_MOST or not 0 <= type_id < TYPES_MOST:
        return None
    known = GGML_TYPES.get(type_id)
    if known and row_bytes * known.block != width * known.bytes:
        return None
    return Tensor(type_id, count, row_bytes)


def _parse_part(source: Source, part: Part) -> Step[bool]:
    compressed = part.tensors == 1
    module = source.report.add_module("dsv4-k" if compressed else "dsv4-state", source.offset)
    module.cells, module.layers = part.rows, part.layers
    source.promise(source.offset + part.length + part.layers * (_LAYER + part.tensors * _TENSOR.size))
    source.chunk(part.length)
    groups = Groups.counted(part.rows) if compressed else None
    for layer in range(part.layers):
        for number in range(part.tensors):
            lead = 0 if number else _LAYER
            view = yield from source.peek(lead + _TENSOR.size)
            tensor = _tensor(view, lead, part.rows)
            if tensor is None:
                if len(view) < lead + _TENSOR.size:
                    source.chunk(len(view))
                    return True
                source.stop(f"tensor {number} of layer {layer} of a deepseek4 {module.kind}")
                return False
            layers, tensors = part.layers - layer - 1, part.tensors - number - 1
            size = _TENSOR.size + part.streams * tensor.rows * tensor.row_bytes
            rest = layers * (_LAYER + part.tensors * size) + tensors * size
            source.promise(source.offset + lead + size + rest)
            yield from _tensor_rows(source, module, part, layer, tensor, lead, groups)
    return True


def _tensor_rows(
    source: Source, module: Module, part: Part, layer: int, tensor: Tensor, lead: int, groups: Groups | None
) -> Step[None]:
    kind = "K" if groups else "S"
    section = Section(layer, kind, tensor.type, tensor.row_bytes, part.rows, source.offset, part.rows)
    source.report.add_section(module, section)
    size = tensor.rows * tensor.row_bytes
    source.chunk(lead + _TENSOR.size)
    for _ in range(part.streams):
        if groups:
            yield from source.rows(
                groups.cut(group_length(tensor.row_bytes, source.target)), tensor.row_bytes
            )
        else:
            yield from source.fixed(size)
