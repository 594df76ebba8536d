"""Putting a file's bytes together from its recipe."""

from collections.abc import Iterator

import numpy as np

from cachefs.states.pieces import Buffer
from cachefs.store import recipe
from cachefs.store.blocks import BlockReader, Blocks, Now
from cachefs.store.errors import Damaged
from cachefs.store.recipe import Extent, Recipe

_AHEAD_FROM = 1 << 20
"""Bytes asked for at once from which the disk is told of all their blocks first."""


def read(blocks: Blocks, source: Recipe, start: int, size: int) -> Buffer:
    """Bytes start … start + size of a file, fewer at its end. Raises Damaged.

    Measured warm: 0.15 ms a MiB of linear extents, 0.4 of bands.
    """
    stop = min(start + size, source.size)
    if start >= stop:
        return b""
    # Not a bytearray: that would be filled with zeros first, a tenth of the whole cost.
    view = np.empty(stop - start, np.uint8).data
    extents = list(source.extents(start, stop))
    with blocks.reader() as reader:
        if len(extents) > 1 and size >= _AHEAD_FROM:
            reader.will_need(_blocks(extents))
        parts = [_part(extent, start, stop, view) for extent in extents]
        whole = [n for n, extent in enumerate(extents) if extent.kind == recipe.SLICE and extent.b == 0]
        done = {whole[n] for n in reader.unpack((extents[n].a, parts[n][2]) for n in whole)}
        for number, (extent, (low, high, into)) in enumerate(zip(extents, parts, strict=True)):
            if number not in done:
                _fill(reader, extent, low, high, into)
    return view


def _part(extent: Extent, start: int, stop: int, view: memoryview) -> tuple[int, int, memoryview]:
    """From where to where bytes start … stop take up the extent, and their place in ``view``."""
    low, high = max(start, extent.start), min(stop, extent.start + extent.length)
    return low - extent.start, high - extent.start, view[low - start : high - start]


def _blocks(extents: list[Extent]) -> Iterator[int]:
    for extent in extents:
        if extent.kind == recipe.SLICE:
            yield extent.a
        for part in extent.parts:
            yield part[0]


def read_cached(blocks: Blocks, source: Recipe, start: int, into: memoryview) -> Now:
    """Fill ``into`` with the file's bytes from ``start``, if that needs no waiting and mere copying.

    Measured: 0.12 ms a MiB, of which 0.1 is the copy; 0.2 where blocks must be verified.
    """
    stop = start + len(into)
    extents = source.simple(start, stop)
    for kind, begin, end, a, b in extents:
        low, high = max(start, begin), min(stop, end)
        part = into[low - start : high - start]
        if kind == recipe.SLICE:
            if (now := blocks.copy_cached(a, b + low - begin, part)) is not Now.DONE:
                return now
        elif kind == recipe.INLINE:
            part[:] = (a | b << 64).to_bytes(recipe.INLINE_BYTES, "little")[low - begin : high - begin]
        else:
            np.frombuffer(part, np.uint8)[:] = 0
    return Now.DONE if extents else Now.OTHERWISE


def will_need(blocks: Blocks, source: Recipe, start: int, stop: int) -> None:
    """Have the disk read what bytes start … stop of a file lie in, unless that is in memory."""
    with blocks.reader() as reader:
        reader.will_need(_blocks(list(source.extents(start, stop))))


def _fill(reader: BlockReader, extent: Extent, low: int, high: int, into: memoryview) -> None:
    if extent.kind == recipe.SLICE:
        reader.copy(extent.a, extent.b + low, into)
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
