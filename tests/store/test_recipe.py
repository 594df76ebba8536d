"""Recipes against plain bytes: however records are cut, joined and replaced, they mean the same file."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.store import recipe
from cachefs.store.recipe import Extent, Recipe, Word3

QUICK = settings(max_examples=150, deadline=None, derandomize=True)
BLOCK = 64


def block(number: int) -> bytes:
    """The raw bytes of block ``number``."""
    return np.random.default_rng(number).bytes(BLOCK)


def resolve(extent: Extent) -> bytes:
    """The bytes an extent stands for, put together the slow way."""
    if extent.kind == recipe.SLICE:
        return block(extent.a)[extent.b : extent.b + extent.length]
    if extent.kind == recipe.INLINE:
        return extent.data
    if extent.kind == recipe.BAND:
        lines = []
        for row in range(extent.a):
            for number, offset, width in extent.parts:
                line = BLOCK // extent.a
                lines.append(block(number)[row * line + offset : row * line + offset + width])
        return b"".join(lines)[extent.skip : extent.skip + extent.length]
    assert extent.kind == recipe.HOLE
    return bytes(extent.length)


def expand(source: Recipe) -> bytes:
    return b"".join(resolve(extent) for extent in source.extents(0, source.size))


def slices() -> st.SearchStrategy[list[Word3]]:
    return st.tuples(st.integers(1, 9), st.integers(0, BLOCK - 1), st.integers(1, BLOCK)).map(
        lambda t: [recipe.slice_of(t[0], t[1], min(t[2], BLOCK - t[1]))]
    )


@st.composite
def bands(draw: st.DrawFn) -> list[Word3]:
    rows = draw(st.sampled_from([1, 2, 4, 8]))
    line = BLOCK // rows
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        offset = draw(st.integers(0, line - 1))
        parts.append((draw(st.integers(1, 9)), offset, draw(st.integers(1, line - offset))))
    pitch = sum(part[2] for part in parts)
    skip = draw(st.integers(0, rows * pitch - 1))
    return recipe.band(rows, draw(st.integers(1, rows * pitch - skip)), parts, skip)


WORDS = st.one_of(
    slices(),
    bands(),
    st.binary(min_size=1, max_size=40).map(recipe.inline),
    st.integers(1, 50).map(lambda n: [recipe.hole(n)]),
)


def joined(groups: list[list[Word3]]) -> Recipe:
    return Recipe(recipe.records([word for group in groups for word in group]))


RECIPES = st.lists(WORDS, max_size=8).map(joined)


class Edit(NamedTuple):
    gap: int
    words: list[Word3]


EDITS = st.lists(st.builds(Edit, st.integers(0, 60), WORDS), max_size=4)


@QUICK
@given(RECIPES)
def test_extents_cover_the_file_in_order(one: Recipe) -> None:
    at = 0
    for extent in one.extents(0, one.size):
        assert extent.start == at
        assert extent.length > 0
        at += extent.length
    assert at == one.size


@QUICK
@given(RECIPES, st.data())
def test_extents_of_a_range_are_those_that_touch_it(one: Recipe, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, one.size + 3))
    stop = data.draw(st.integers(0, one.size + 30))
    every = list(one.extents(0, one.size))
    touching = [e for e in every if e.start < min(stop, one.size) and e.start + e.length > start]
    assert list(one.extents(start, stop)) == (touching if start < stop else [])


@QUICK
@given(RECIPES, st.data())
def test_span_and_cut_are_slices_of_the_bytes(one: Recipe, data: st.DataObject) -> None:
    whole = expand(one)
    start = data.draw(st.integers(0, one.size))
    stop = data.draw(st.integers(0, one.size))
    assert expand(Recipe(one._span(start, stop))) == whole[start:stop]
    size = data.draw(st.integers(0, one.size + 40))
    cut = one.cut(size)
    assert cut.size == size
    assert expand(cut) == whole[:size].ljust(size, b"\0")
    assert expand(one) == whole


@QUICK
@given(RECIPES, st.data())
def test_a_file_cut_anywhere_joins_again(one: Recipe, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, one.size))
    again = one.cut(at).append(one._span(at, one.size))
    assert expand(again) == expand(one)


@QUICK
@given(RECIPES, EDITS)
def test_replace_is_assignment_of_slices(one: Recipe, edits: list[Edit]) -> None:
    model = bytearray(expand(one))
    prepared = []
    at = 0
    for gap, words in edits:
        records = recipe.records(words)
        new = expand(Recipe(records))
        start = at + gap
        model += bytes(max(0, start - len(model)))
        model[start : start + len(new)] = new
        at = start + len(new)
        prepared.append((start, at, records))
    assert expand(one.replace(prepared)) == model


@QUICK
@given(RECIPES, st.integers(1, 5))
def test_pages_give_the_same_recipe(one: Recipe, records_a_page: int) -> None:
    pages = one.pages(records_a_page)
    assert len(pages) == -(-len(one) // records_a_page)
    again = Recipe.from_pages(pages)
    assert again.size == one.size
    assert np.array_equal(again.records, one.records)


@QUICK
@given(RECIPES, st.sets(st.integers(1, 9)))
def test_blocks_and_the_bytes_in_them(one: Recipe, chosen: set[int]) -> None:
    """`blocks` counts records, `bytes_in` the bytes that they cover where no band is cut."""
    named: dict[int, int] = {}
    for extent in one.extents(0, one.size):
        for number in [extent.a] if extent.kind == recipe.SLICE else [p[0] for p in extent.parts]:
            named[number] = named.get(number, 0) + 1
    ids, counts = one.blocks()
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == named
    whole = [e for e in one.extents(0, one.size) if e.kind != recipe.BAND]
    expected = sum(
        e.length for e in whole if e.kind == recipe.INLINE or (e.kind == recipe.SLICE and e.a in chosen)
    )
    for extent in one.extents(0, one.size):
        expected += sum(width * extent.a for number, _, width in extent.parts if number in chosen)
    assert one.bytes_in(chosen) == expected


def test_an_empty_recipe() -> None:
    empty = Recipe()
    assert empty.size == 0
    assert empty.pages(10) == []
    assert Recipe.from_pages([]).size == 0
    assert list(empty.extents(0, 10)) == []
    assert expand(empty.cut(5)) == bytes(5)
    assert expand(empty.replace([(3, 5, recipe.records(recipe.inline(b"ab")))])) == b"\0\0\0ab"


def test_the_largest_numbers_fit() -> None:
    """Lengths up to the largest file, offsets and ids of 63 bits."""
    size = recipe.MAX_SIZE
    one = joined([[recipe.hole(size - 10)], [recipe.slice_of((1 << 63) - 1, (1 << 40), 10)]])
    assert one.size == size
    last = next(one.extents(size - 1, size))
    assert (last.start, last.a, last.b) == (size - 10, (1 << 63) - 1, 1 << 40)
    rows, parts = 64, [(1, 0, 1 << 20)] * 65535
    tall = joined([recipe.band(rows, (1 << 47) - 5, parts, 5)])
    (band,) = tall.extents(0, tall.size)
    assert (band.a, band.skip, len(band.parts), band.length) == (rows, 5, 65535, (1 << 47) - 5)
