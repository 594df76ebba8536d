"""Every layout is recognised to its end and cut the same however it arrives."""

import pytest

from cachefs.states import Band, Chunk, Cutter, Piece, Rows

from . import build

LAYOUTS = build.every_layout()


def cut(data: bytes, size: int = 1 << 20, target: int = 16384) -> tuple[Cutter, list[Piece]]:
    cutter = Cutter(target=target)
    pieces: list[Piece] = []
    for at in range(0, len(data), size):
        pieces += cutter.feed(data[at : at + size])
        assert sum(len(piece.data) for piece in pieces) + cutter.held == min(len(data), at + size)
    pieces += cutter.finish()
    assert cutter.held == 0
    return cutter, pieces


def shape(pieces: list[Piece]) -> list[object]:
    return [(type(p).__name__, len(p.data), getattr(p, "width", 0), getattr(p, "cells", 0)) for p in pieces]


def joined(pieces: list[Piece]) -> bytes:
    return b"".join(piece.data for piece in pieces)


def row_bytes(pieces: list[Piece]) -> int:
    return sum(len(piece.data) for piece in pieces if not isinstance(piece, Chunk))


@pytest.mark.parametrize("name", LAYOUTS)
def test_recognised_to_the_end(name: str) -> None:
    data = LAYOUTS[name]
    cutter, pieces = cut(data)
    assert joined(pieces) == data
    assert cutter.report.stopped is None
    assert not cutter.torn
    assert cutter.promised == len(data)
    sections = [section for module in cutter.report.modules for section in module.sections]
    linear = sum(s.row_bytes * s.cells for s in sections if s.kind in "KV")
    transposed = sum(s.row_bytes * s.cells * s.rows for s in sections if s.kind == "VT")
    assert cutter.row_bytes == row_bytes(pieces) == linear + transposed
    for piece in pieces:
        if isinstance(piece, Rows):
            assert len(piece.data) % piece.width == 0
        elif isinstance(piece, Band):
            assert len(piece.data) == piece.rows * sum(piece.cells) * piece.width


@pytest.mark.parametrize("name", LAYOUTS)
def test_split_does_not_matter(name: str) -> None:
    data = LAYOUTS[name]
    expected = shape(cut(data)[1])
    for size in (1, 7, 4096, 12345):
        if size == 1 and len(data) > 120_000:
            continue
        cutter, pieces = cut(data, size)
        assert shape(pieces) == expected
        assert joined(pieces) == data
        assert cutter.report.stopped is None


@pytest.mark.parametrize("name", ["dense", "ext 12", "transposed", "hybrid, window", "deepseek4", "blobs"])
def test_inside_a_foreign_file(name: str) -> None:
    """A blob's bytes are cut the same wherever they stand; foreign bytes around it promise nothing."""
    state = LAYOUTS[name] if name == "blobs" else build.blob(LAYOUTS[name][12 + 4 * _words(LAYOUTS[name]) :])
    alone = shape(cut(state)[1])
    for lead in (1, 48, 70_001, 900_000):
        data = build.noise(lead, salt=lead) + state
        cutter, pieces = cut(data, 65_536)
        assert joined(pieces) == data
        assert shape(pieces)[-len(alone) :] == alone
        assert cutter.promised == 0
        assert not cutter.torn


def _words(data: bytes) -> int:
    return int.from_bytes(data[8:12], "little")


def test_report() -> None:
    p = list(range(300))
    cutter, _ = cut(
        build.ggsq(build.packed(p), build.kv(p, layers=3, width=68, type_id=8, ext=12), build.recurrent())
    )
    report = cutter.report
    assert (report.container, report.version, report.tokens) == ("ggsq", 4, 300)
    assert (report.cells, report.layers, report.types) == (300, 3, ["q8_0", "f32"])
    kv, recurrent = report.modules
    assert (kv.kind, kv.cells, [s.kind for s in kv.sections]) == ("kv", 300, ["K"] * 3 + ["V"] * 3)
    assert [s.kind for s in recurrent.sections] == ["R", "R", "S", "S"]
    assert report.to_dict()["modules"][0]["sections"][0]["row_bytes"] == 68
    cutter, _ = cut(LAYOUTS["all streams"])
    assert (cutter.report.container, cutter.report.architecture) == ("ggsn", "qwen3")
    assert cut(LAYOUTS["unknown type"])[0].report.types == ["type 77"]
    assert cut(LAYOUTS["recurrent, PLE"])[0].report.modules[0].sections[1].kind == "P"
    assert cut(build.ggsq(p, build.kv(p)))[0].report.tokens == 300
    assert cut(b"hello")[0].report.container is None


def test_report_is_bounded() -> None:
    data = build.blob(build.recurrent(layers=1)) * 5000
    cutter, pieces = cut(data)
    assert joined(pieces) == data
    assert len(cutter.report.modules) <= 4096
    assert cutter.report.dropped
    assert cutter.report.states == 5000


@pytest.mark.parametrize("v_state", [0, 2])
def test_ik_llama_body(v_state: int) -> None:
    """Its rows are found; its tail is foreign."""
    p = list(range(300))
    data = build.ggsq(p, build.ik_kv(p, v_state=v_state))
    cutter, pieces = cut(data)
    assert joined(pieces) == data
    assert cutter.row_bytes == 300 * 64 * (2 if v_state == 2 else 4)
    assert not cutter.torn


def test_look_alikes() -> None:
    """Same magic, other bodies: kept byte for byte, and not taken for torn."""
    p = list(range(300))
    state = build.blob(build.kv(p))[8:]
    checkpoints = build.ggsq([0, 4, 5], version=3)[:8] + (2).to_bytes(8, "little") + bytes(24) + state
    swac = build.ggsq(p, b"CAWS" + bytes(range(200)) * 50)
    for data in (checkpoints, swac, build.ggsq(p, build.noise(50_000)), build.noise(9, 3), b"", b"qsgg"):
        cutter, pieces = cut(data)
        assert joined(pieces) == data
        assert not cutter.torn
