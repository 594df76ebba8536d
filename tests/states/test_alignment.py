"""Equal prefixes give equal pieces."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.states import Band, Cutter, Piece, Rows
from cachefs.states.groups import Groups, group_length

from . import build

WIDTH = 64
TARGET = 64 * WIDTH


def pieces_of(data: bytes, target: int = TARGET) -> list[Piece]:
    cutter = Cutter(target=target)
    return [*cutter.feed(data), *cutter.finish()]


def groups_of(data: bytes) -> list[bytes]:
    return [bytes(piece.data) for piece in pieces_of(data) if isinstance(piece, Rows)]


def test_prefix_shares_whole_groups() -> None:
    short = build.ggsq(build.packed(range(200)), build.kv(range(200), layers=1, width=WIDTH))
    long = build.ggsq(range(333), build.kv(range(333), layers=1, width=WIDTH, slot=3, ext=12))
    a, b = groups_of(short), groups_of(long)
    assert [len(group) // WIDTH for group in a] == [64, 64, 64, 8] * 2
    assert a[:3] == b[:3]
    assert a[4:7] == b[6:9]


def test_slot_does_not_matter() -> None:
    p = range(500)
    assert groups_of(build.ggsq(p, build.kv(p, slot=0))) == groups_of(build.ggsq(p, build.kv(p, slot=7)))


def test_window_start_and_rotation_do_not_matter() -> None:
    full = set(groups_of(build.ggsq([], build.kv(range(1024), layers=1, v=None))))
    window = groups_of(build.ggsq([], build.kv(range(300, 900), layers=1, v=None)))
    rotated = groups_of(build.ggsq([], build.kv([*range(640, 900), *range(300, 640)], layers=1, v=None)))
    assert len(set(window) - full) == 2
    assert set(rotated) == set(window)


def test_a_window_smaller_than_a_group_is_cut_within() -> None:
    """Two windows of 128 rows, 24 apart, in groups of 1024 rows, share all whole groups but the ends."""
    a = Groups(np.arange(3000, 3128)).cut(1024)
    b = Groups(np.arange(3024, 3152)).cut(1024)
    assert a == (8, 32, 32, 32, 24)
    assert b == (16, 32, 32, 32, 16)
    turned = Groups(np.concatenate([np.arange(3100, 3128), np.arange(3000, 3100)])).cut(1024)
    assert sum(turned) == 128
    assert turned.count(32) == 2
    assert Groups(np.arange(128)).cut(1024) == (128,)


def test_checkpoints_share_whole() -> None:
    """A recurrent state cuts the same at any offset and in any container."""
    state = build.recurrent(layers=2, r_width=1000, s_width=50_000)
    a = pieces_of(build.ggsq(range(10), build.kv(range(10)), state))
    b = pieces_of(build.blob(build.kv(range(999))) + build.blob(state) + b"tail")
    big = {bytes(piece.data) for piece in a if len(piece.data) == TARGET}
    assert len(big) == 2 * (50_000 // TARGET)
    assert big <= {bytes(piece.data) for piece in b}


def test_bands() -> None:
    p = [*range(100, 400), *range(40, 100)]
    data = build.ggsq(p, build.kv(p, layers=1, width=300, v="transposed"))
    bands = [piece for piece in pieces_of(data, 64 * 2 * 128) if isinstance(piece, Band)]
    assert [band.rows for band in bands] == [64, 64, 22]
    assert bands[0].cells == (28, 128, 128, 16, 60)
    column = np.frombuffer(bands[1].data, np.uint8).reshape(64, len(p), 2)[:, 5].tobytes()
    assert column == build.rows(1, [105], 300)[0, 128:256].tobytes()


@pytest.mark.parametrize(("width", "target", "length"), [(384, 262_144, 512), (1, 100, 64), (999, 10, 1)])
def test_group_length(width: int, target: int, length: int) -> None:
    assert group_length(width, target) == length


runs = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 90)), min_size=1, max_size=40)


@given(runs, st.sampled_from([1, 2, 16, 64, 512]))
def test_cuts_cover_all_cells(parts: list[tuple[int, int]], length: int) -> None:
    pos = np.concatenate([np.arange(start, start + count) for start, count in parts]).astype(np.int64)
    cuts = Groups(pos).cut(length)
    assert sum(cuts) == len(pos)
    assert 0 < min(cuts) <= max(cuts) <= length


@given(st.integers(0, 3000), st.integers(1, 900))
@settings(max_examples=50)
def test_one_run_is_cut_at_multiples(start: int, count: int) -> None:
    edges = np.cumsum(Groups(np.arange(start, start + count)).cut(64))[:-1] + start
    small_window = start > 0 and count < 64
    assert (edges % (1 << max(0, count.bit_length() - 3) if small_window else 64) == 0).all()


def test_fragments_are_joined() -> None:
    pos = np.arange(4096).reshape(-1, 2)[np.random.default_rng(1).permutation(2048)].ravel()
    assert len(Groups(pos).cut(512)) < 150
    images = np.concatenate([np.full(300, 40), np.arange(41, 90)])
    assert Groups(images).cut(256) == (216, 133)
    assert Groups(np.zeros(0, np.int64)).cut(64) == ()
