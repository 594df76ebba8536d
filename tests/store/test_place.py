"""Placing pieces: the bytes come back, and what is stored already is borrowed instead of stored again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.states.pieces import Band, Chunk, Piece, Rows
from cachefs.store import Store, recipe
from cachefs.store import place as place_module
from cachefs.store.place import _BORROWS, BLOCK_LIMIT, INLINE_LIMIT
from cachefs.store.recipe import Recipe

from .filling import fill, make, noise, place, remove, temporary_store
from .recount import assert_exact, assert_nothing_leaks

WIDTH = 1024
G = 64


def rows(keys: Sequence[int], width: int = WIDTH) -> bytes:
    """One row of noise for each key."""
    return b"".join(noise(width, key + 1_000_000) for key in keys)


def group(keys: Sequence[int], width: int = WIDTH) -> Rows:
    return Rows(rows(keys, width), width)


def tile(keys: Sequence[int], height: int = 8, width: int = 2) -> Band:
    """A band of one tile whose columns are functions of their keys."""
    columns = [np.frombuffer(noise(height * width, key), np.uint8).reshape(height, width) for key in keys]
    return Band(np.hstack(columns).tobytes(), height, width, (len(keys),))


@pytest.fixture(autouse=True)
def single_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles here are tiny: let even one of their columns be worth borrowing."""
    monkeypatch.setattr(place_module, "_LEAST", 16)


class Saver:
    """Saves pieces as files and tells what was new."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.files: dict[bytes, tuple[int, bytes]] = {}

    def save(self, name: bytes, *pieces: Piece) -> Recipe:
        data = b"".join(piece.data for piece in pieces)
        ino = make(self.store, name)
        fill(self.store, ino, pieces)
        self.files[name] = ino, data
        return self.store.tree.recipe(ino)

    def new(self, name: bytes, *pieces: Piece) -> int:
        """Raw bytes of the blocks that a file needed beside what there was."""
        pool = self.store.blocks.pool.by_id
        before = sum(block.row.raw for block in pool.values())
        self.save(name, *pieces)
        return sum(block.row.raw for block in pool.values()) - before

    def check(self) -> None:
        """Every file is as it was saved, before and after a commit, and all counts agree."""
        for _ in range(2):
            for ino, data in self.files.values():
                source = self.store.tree.recipe(ino)
                assert bytes(self.store.read(source, 0, source.size)) == data
            self.store.commit()
        assert_exact(self.store)
        assert_nothing_leaks(self.store)


@pytest.fixture
def saver(store: Store) -> Saver:
    return Saver(store)


def parts(source: Recipe) -> list[tuple[int, int, int]]:
    """Slices (block, offset, length) of a recipe and parts of its bands."""
    out = []
    for extent in source.extents(0, source.size):
        out += extent.parts or [(extent.a, extent.b, extent.length)]
    return out


@pytest.mark.parametrize("committed", [False, True])
def test_a_group_seen_before_costs_nothing(saver: Saver, committed: bool) -> None:
    """Whether the twin waits in memory or lies on disk."""
    assert saver.new(b"a", group(range(G)), tile(range(G)), Chunk(noise(9000))) == G * WIDTH + G * 16 + 9000
    if committed:
        saver.store.commit()
    assert saver.new(b"b", group(range(G)), tile(range(G)), Chunk(noise(9000))) == 0
    saver.check()


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("make_piece", [group, tile])
def test_heads_and_tails_are_borrowed(saver: Saver, make_piece: type, committed: bool) -> None:
    """Chats that part within a group, or come together at its end, share the rows (columns) they have."""
    row = len(make_piece([0]).data)
    saver.save(b"a", make_piece(range(G)))
    if committed:
        saver.store.commit()
    parted = [*range(40), *range(1000, 1000 + G - 40)]
    assert saver.new(b"branch", make_piece(parted)) == (G - 40) * row
    joined = [*range(2000, 2010), *range(10, G)]
    assert saver.new(b"joined", make_piece(joined)) == 10 * row
    middle = [*range(10), *range(3000, 3004), *range(14, G)]
    assert saver.new(b"middle", make_piece(middle)) == 4 * row
    assert saver.new(b"shorter", make_piece(range(17))) == 0
    assert saver.new(b"last rows", make_piece(range(60, G))) == 0
    assert saver.new(b"longer", make_piece([*range(G), *range(5000, 5003)])) == 3 * row
    saver.check()


@pytest.mark.parametrize("make_piece", [group, tile])
def test_branches_of_branches(saver: Saver, make_piece: type) -> None:
    """A group put together from three others' rows is found row for row in them."""
    row = len(make_piece([0]).data)
    saver.save(b"a", make_piece(range(G)))
    saver.new(b"b", make_piece([*range(20), *range(100, 120)]))
    assert saver.new(b"c", make_piece([*range(20), *range(100, 110), *range(200, 205)])) == 5 * row
    assert saver.new(b"d", make_piece([*range(20), *range(100, 110), *range(200, 205)])) == 0
    saver.check()


def test_growing_turns_store_each_row_once(saver: Saver) -> None:
    """A conversation saved at every length costs its rows once, however it is grouped."""
    stored = 0
    for n in range(1, 3 * G, 7):
        pieces = [group(range(start, min(n, start + G))) for start in range(0, n, G)]
        stored += saver.new(b"turn%d" % n, *pieces)
        assert stored == n * WIDTH
    saver.check()


@pytest.mark.parametrize("make_piece", [group, tile])
@pytest.mark.parametrize("keys", [[7] * G, [1, 2] * (G // 2), [1, 2, 3, 2, 1] * 12])
def test_repeated_rows_do_not_crumble(saver: Saver, make_piece: type, keys: list[int]) -> None:
    """Rows that repeat in odd orders must not fall apart into slices of one row."""
    saver.save(b"a", make_piece([1]), make_piece([2]), make_piece([7]))
    for number in range(5):
        for count in (G, G - 3, G // 2):
            source = saver.save(b"%d.%d" % (number, count), make_piece((keys * 2)[number : number + count]))
            assert len(parts(source)) <= _BORROWS + 1
    saver.check()


def test_zero_rows_are_rows_like_others(saver: Saver) -> None:
    """Empty cells (all zeros) share, and do not crumble what stands beside them."""
    zeros = bytes(G * WIDTH)
    assert saver.new(b"a", Rows(zeros, WIDTH)) == len(zeros)
    assert saver.new(b"b", Rows(zeros[: 5 * WIDTH], WIDTH)) == 0
    mixed = Rows(zeros[: 30 * WIDTH] + rows(range(4)) + zeros[: 30 * WIDTH], WIDTH)
    assert saver.new(b"c", mixed) == 4 * WIDTH
    assert saver.new(b"d", Rows(zeros + zeros, WIDTH)) == 0
    assert len(saver.store.tree.recipe(saver.files[b"d"][0])) <= 3
    flat = Band(bytes(8 * 2 * G), 8, 2, (G,))
    saver.new(b"e", flat)
    assert saver.new(b"f", Band(bytes(8 * 2 * G), 8, 2, (G // 2, G // 2))) == 0
    saver.check()


def test_rows_of_another_width_are_not_confused(saver: Saver) -> None:
    """The same bytes as rows of two widths, as a tile and as a chunk: shared whole or not at all."""
    data = rows(range(G))
    saver.save(b"rows", Rows(data, WIDTH))
    assert saver.new(b"narrow", Rows(data, WIDTH // 2)) == 0
    assert saver.new(b"tile", Band(data, 64, 2, (len(data) // 128,))) == 0
    assert saver.new(b"chunk", Chunk(data)) == 0
    saver.save(b"other", Rows(data[: 9 * WIDTH] + noise(WIDTH), WIDTH // 4), Rows(data[WIDTH:], 3 * WIDTH))
    saver.check()


def test_short_chunks_live_in_the_recipe(saver: Saver) -> None:
    assert saver.new(b"a", Chunk(b"x" * INLINE_LIMIT), Chunk(b"y")) == 0
    assert saver.new(b"b", Chunk(b"x" * (INLINE_LIMIT + 1))) == INLINE_LIMIT + 1
    kinds = {extent.kind for extent in saver.store.tree.recipe(saver.files[b"a"][0]).extents(0, 99)}
    assert kinds == {recipe.INLINE}
    saver.check()


def test_bytes_of_any_length(saver: Saver) -> None:
    """`place_bytes` makes blocks of the limit at most."""
    placer = saver.store.placer()
    data = noise(3 * BLOCK_LIMIT + 5)
    placer.place_bytes(memoryview(data))
    one = Recipe(placer.take())
    assert bytes(saver.store.read(one, 0, one.size)) == data
    assert max(extent.length for extent in one.extents(0, one.size)) == BLOCK_LIMIT
    assert placer.placed_bytes == len(data)
    assert placer.new_bytes == len(data) - 5
    saver.store.blocks.release(placer.take_holds())
    saver.store.commit()
    assert_exact(saver.store)
    assert_nothing_leaks(saver.store)


def test_a_band_of_more_parts_than_a_record_counts(saver: Saver) -> None:
    """A fragmented cache may fall into more tiles than a recipe can name in one band."""
    count = 70_000
    saver.save(b"a", Band(noise(count), 1, 1, (1,) * count))
    saver.check()


def test_borrowed_blocks_outlive_their_first_file(saver: Saver) -> None:
    saver.save(b"a", group(range(G)), tile(range(G)))
    saver.save(b"b", group([*range(30), 99]), tile([*range(30), 99]))
    saver.store.commit()
    remove(saver.store, b"a")
    del saver.files[b"a"]
    saver.store.commit()
    saver.store.writer.purge(1 << 30)
    saver.check()


PIECES = st.lists(
    st.one_of(
        st.builds(group, st.lists(st.integers(0, 5), min_size=1, max_size=30), st.sampled_from([4, 64, 100])),
        st.builds(tile, st.lists(st.integers(0, 5), min_size=1, max_size=30), st.sampled_from([1, 4, 8])),
        st.builds(Chunk, st.builds(noise, st.integers(0, 300), st.integers(0, 3))),
        st.builds(
            lambda a, b: Band(
                np.hstack([np.frombuffer(t.data, np.uint8).reshape(4, -1) for t in (a, b)]).tobytes(),
                4,
                2,
                (*a.cells, *b.cells),
            ),
            st.builds(tile, st.lists(st.integers(0, 5), min_size=1, max_size=20), st.just(4)),
            st.builds(tile, st.lists(st.integers(0, 5), min_size=1, max_size=20), st.just(4)),
        ),
    ),
    max_size=6,
)


def _place_and_compare(store: Store, files: list[list[Piece]], commits: list[bool]) -> None:
    for number, (pieces, commit) in enumerate(zip(files, commits, strict=False)):
        data = b"".join(piece.data for piece in pieces)
        placed, holds = place(store, pieces)
        assert placed.size == len(data)
        assert bytes(store.read(placed, 0, len(data))) == data
        third = len(data) // 3
        assert bytes(store.read(placed, third, third + 1)) == data[third : 2 * third + 1]
        ino = make(store, b"%d" % number)
        store.tree.set_content(ino, placed, 0, None)
        store.index.active.holds.append(holds)
        if commit:
            store.commit()
    store.commit()
    for number, (pieces, _) in enumerate(zip(files, commits, strict=False)):
        dirent = store.tree.require(1, b"%d" % number)
        source = store.tree.recipe(dirent.ino)
        assert bytes(store.read(source, 0, source.size)) == b"".join(piece.data for piece in pieces)
    assert_nothing_leaks(store)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(PIECES, min_size=1, max_size=5), st.lists(st.booleans(), min_size=5, max_size=5))
def test_any_pieces_come_back(files: list[list[Piece]], commits: list[bool]) -> None:
    with temporary_store() as store:
        _place_and_compare(store, files, commits)
        assert_exact(store)


@pytest.mark.parametrize("function", ["xxh3_128_digest", "xxh3_64_intdigest"])
def test_colliding_digests_never_mix_bytes(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """Promise P13. Equality is decided by bytes: digests and row keys that all collide cost sharing only."""
    constant = bytes(16) if "digest" in function and "128" in function else 5
    monkeypatch.setattr(xxhash, function, lambda *arguments, **options: constant)

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(st.lists(PIECES, min_size=1, max_size=5), st.lists(st.booleans(), min_size=5, max_size=5))
    def run(files: list[list[Piece]], commits: list[bool]) -> None:
        with temporary_store() as store:
            _place_and_compare(store, files, commits)

    run()


def test_a_stray_row_is_not_borrowed(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    """One equal row of a few hundred bytes would cost a read of another block at every restore."""
    monkeypatch.setattr(place_module, "_LEAST", 512)
    saver.save(b"a", group(range(8), 256))
    assert saver.new(b"b", group([0, *range(100, 107)], 256)) == 8 * 256
    assert saver.new(b"c", group([0, 1, *range(200, 206)], 256)) == 6 * 256


def test_the_longest_of_several_candidates_is_borrowed(saver: Saver) -> None:
    """V of the first layer depends on the token alone, so groups of unrelated chats begin alike."""
    saver.save(b"a", group([*range(30), *range(100, 130)]))
    monkey = [1, *range(200, 210)]
    saver.save(b"b", group([0, *monkey]))
    saver.save(b"c", group([0, *monkey][1:]))
    assert saver.new(b"d", group([*range(30), *range(300, 305)])) == 5 * WIDTH
