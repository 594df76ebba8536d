"""Packed blocks come back byte for byte, pay for themselves, and damaged ones say so."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from cachefs.store import codec
from cachefs.store.codec import WHOLE, Layout, Packer
from cachefs.store.layout import footprint
from cachefs.store.records import CHUNK, KEPT, PLANES, RAW, ROWS, TILE, ZSTD

from .filling import noise

LAYOUTS = [WHOLE, Layout(2, 2), Layout(4, 4), Layout(34, 2), Layout(18, 2), Layout(22, 2)]


def numbers(type_: str, count: int, seed: int = 0) -> bytes:
    """Normally distributed numbers, as keys and values are."""
    values = np.random.default_rng(seed).normal(size=count).astype(np.float32)
    if type_ == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(type_).tobytes()


def q8_0(blocks: int) -> bytes:
    """Scales in f16 and quants that use their range unevenly."""
    rng = np.random.default_rng(1)
    out = np.empty((blocks, 34), np.uint8)
    scales = rng.uniform(0.01, 0.02, blocks).astype(np.float16)
    out[:, :2] = scales.view(np.uint8).reshape(-1, 2)
    out[:, 2:] = rng.normal(0, 30, (blocks, 32)).clip(-127, 127).astype(np.int8).view(np.uint8)
    return out.tobytes()


@pytest.mark.parametrize("level", [1, 6])
@pytest.mark.parametrize(
    ("raw", "kind", "width", "least"),
    [
        (numbers("f2", 98304), ROWS, 384, 1.15),
        (numbers("f2", 98304), TILE, 2, 1.15),
        (numbers("f2", 98304), CHUNK, 0, 1.15),
        (numbers("bf16", 98304), ROWS, 384, 1.3),
        (numbers("f4", 49152), ROWS, 768, 1.12),
        (numbers("f4", 49152) + b"odd", CHUNK, 0, 1.12),
        (q8_0(6000), ROWS, 204, 1.05),
        (bytes(200_000), ROWS, 500, 20.0),
    ],
)
def test_what_it_saves(raw: bytes, kind: int, width: int, least: float, level: int) -> None:
    codec_, payload = Packer(level).pack(raw, kind, width)
    assert codec_ in (ZSTD, PLANES)
    assert len(raw) / len(payload) > least
    assert bytes(codec.decode(payload, codec_, len(raw))) == raw


@pytest.mark.parametrize("raw", [noise(200_000), noise(10), b"", numbers("f2", 1600)[:2100]])
def test_what_is_not_worth_it(raw: bytes) -> None:
    """A block that would take as many pages as before stays as it is."""
    assert Packer().pack(raw, ROWS, 100) == (KEPT, raw)
    assert codec.decode(raw, KEPT, len(raw)) == raw
    assert codec.decode(raw, RAW, len(raw)) == raw


def test_another_type_of_the_same_width() -> None:
    """The layout that was best for other blocks costs at most what it fails to save."""
    packer = Packer()
    for number in range(40):
        raw = [numbers("f2", 69632, number), q8_0(4096), noise(139264, number)][number % 3]
        codec_, payload = packer.pack(raw, ROWS, 1088)
        assert footprint(len(payload)) <= footprint(len(raw))
        assert bytes(codec.decode(payload, codec_, len(raw))) == raw


@given(st.binary(max_size=600), st.sampled_from(LAYOUTS))
def test_splitting_loses_nothing(raw: bytes, layout: Layout) -> None:
    parts = codec.split(raw, layout)
    assert sum(map(len, parts)) == len(raw)
    if layout != WHOLE:
        out = np.empty(len(raw), np.uint8)
        codec.join(parts, layout, out)
        assert out.tobytes() == raw


def test_many_at_once() -> None:
    """Whatever their layouts, and with planes of which none, some or all are packed."""
    raws = [
        (numbers("f2", 98304), ROWS, 384),
        (numbers("f4", 49152) + b"odd", CHUNK, 0),
        (q8_0(6000), ROWS, 204),
        (numbers("bf16", 98304), TILE, 2),
    ]
    packed = [(*Packer().pack(*each), each[0]) for each in raws]
    assert {which for which, _, _ in packed} == {PLANES}
    outs = [np.empty(len(raw), np.uint8) for _, _, raw in packed]
    codec.decode_many([(payload, out) for (_, payload, _), out in zip(packed, outs, strict=True)])
    assert [out.tobytes() for out in outs] == [raw for _, _, raw in packed]
    stored = struct.pack("<BB3I", 2, 2, 4, 4, 1) + b"acegbdfhi"
    codec.decode_many([(stored, outs[0][:9])])
    assert outs[0][:9].tobytes() == b"abcdefghi"
    codec.decode_many([])


def test_a_frame_where_nothing_should_be() -> None:
    """Its own header says how long it is then."""
    frame = zstandard.ZstdCompressor().compress(b"more than was left over")
    stored = struct.pack("<BB3I", 2, 2, 4, 4, len(frame)) + b"acegbdfh" + frame
    with pytest.raises(codec.Broken):
        codec.decode_many([(stored, np.empty(8, np.uint8))])


@given(st.data())
def test_damage_is_told(data: st.DataObject) -> None:
    """Any payload at all: Broken, or bytes, whose digest the reader looks at."""
    raw = numbers("f2", 8192) + b"x"
    codec_, payload = Packer().pack(raw, CHUNK, 0)
    assert codec_ == PLANES
    damaged = bytearray(payload)
    for at in data.draw(st.lists(st.integers(0, len(damaged) - 1), max_size=3)):
        damaged[at] ^= data.draw(st.integers(1, 255))
    for at in data.draw(st.lists(st.integers(0, 13), max_size=3)):
        damaged[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))
    for which in (PLANES, ZSTD, 77):
        try:
            codec.decode(bytes(damaged[:cut]), which, len(raw))
        except codec.Broken:
            pass
        else:
            assert which == PLANES
    with contextlib.suppress(codec.Broken):
        codec.decode_many(
            [(payload, np.empty(len(raw), np.uint8)), (damaged[:cut], np.empty(len(raw), np.uint8))]
        )
