"""Whatever the bytes: all come out again, in bounded memory, and torn saves are told from whole ones."""

import random
import time
from itertools import accumulate
from pathlib import Path
from struct import pack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.states import Cutter

from . import build, mutate
from .properties import check, check_followed, check_input, cut

LAYOUTS = build.every_layout()
CORPUS = sorted((Path(__file__).parents[1] / "data" / "fuzz").glob("*.bin"))
SMALL = {
    "dense": build.ggsq(range(20), build.kv(range(20), width=32)),
    "window": build.ggsq(range(20), build.kv(range(20), width=32, ext=12), build.kv(range(12, 20), width=32)),
    "K only": build.ggsq(
        range(20), build.kv(range(20), width=32, v=None), build.kv(range(20), width=64, v=None)
    ),
    "transposed": build.ggsq(range(20), build.kv(range(20), width=32, v="transposed")),
    "hybrid": build.ggsq(range(20), build.kv(range(20), width=32), build.recurrent(s_width=64, ple=8)),
    "streams": build.ggsq(range(9), build.kv(range(9), width=32, streams=3, at=1)),
    "deepseek4": build.ggsq(range(20), build.dsv4(range(20), range(12, 20), width=16)),
    "session": build.ggsn(range(20), build.kv(range(20), width=16, seqs=[[0, 1], [1]] * 10)),
    "blobs": build.blob(build.kv(range(20), width=16)) + build.blob(build.recurrent(s_width=64)),
    "old": build.ggsq(range(20), build.old_kv(range(20), width=16), version=2),
    "ik": build.ggsq(range(20), build.ik_kv(range(20), width=16), version=3),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_truncation(name: str) -> None:
    data = SMALL[name]
    for end in range(0, len(data) + 1, 1 + len(data) // 700):
        cutter = Cutter(target=1024)
        pieces = [*cutter.feed(data[:end]), *cutter.finish()]
        assert b"".join(piece.data for piece in pieces) == data[:end]
        stopped = cutter.report.stopped
        assert stopped is None or not stopped[1].startswith("error")
        assert not cutter.torn or cutter.promised > end


@pytest.mark.parametrize(("name", "v"), [("plain", "plain"), ("transposed", "transposed")])
def test_torn_inside_a_module(name: str, v: str) -> None:
    """Everywhere but where K ends and where a V section ends: there a model without more V would end."""
    p = range(20)
    header = 12 + 4 * 20
    module = build.kv(p, layers=2, width=32, v=v)
    data = build.ggsq(p, module)
    table = 4 + 4 + 20 * 12 + 16
    ends = set(accumulate([header + table + 2 * (12 + 20 * 32), 12 + 20 * 32, 12 + 20 * 32]))
    assert max(ends) == len(data)
    for end in range(header + 1, len(data) + 1):
        cutter = Cutter(target=1024)
        cutter.feed(data[:end])
        cutter.finish()
        assert cutter.torn == (end not in ends), end
    for end in range(13, header):
        cutter = Cutter(target=1024)
        cutter.feed(data[:end])
        cutter.finish()
        assert cutter.torn, end


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n not in ("bare blob",)])
def test_torn_in_the_middle_of_sections(name: str) -> None:
    data = LAYOUTS[name]
    whole = Cutter()
    whole.feed(data)
    whole.finish()
    for module in whole.report.modules:
        for section in module.sections:
            size = section.row_bytes * section.cells * (section.rows if section.kind == "VT" else 1)
            if not size:
                continue
            head = 28 if module.kind.startswith("dsv4") else 8 if section.kind == "P" else 12
            cutter = Cutter()
            cutter.feed(data[: section.offset + head + size // 2])
            if size > 8192:
                assert cutter.torn
            cutter.finish()
            assert cutter.torn
            assert cutter.promised > section.offset + head + size // 2


def test_promised_grows_to_the_size() -> None:
    p = range(1000)
    data = build.ggsq(p, build.kv(p, layers=4, width=512))
    half = len(data) // 2
    cutter = Cutter()
    first_row = 12 + 4000 + 8 + 12_000 + 16 + 12
    cutter.feed(data[:3000])
    assert cutter.promised == 12 + 4 * 1000
    cutter.feed(data[3000:first_row])
    assert half <= cutter.promised < half + 10_000
    assert cutter.torn
    cutter.feed(data[first_row:])
    assert cutter.promised == len(data)
    assert not cutter.torn


@given(st.binary(max_size=3000), st.lists(st.integers(1, 700), min_size=1, max_size=5))
@settings(max_examples=100)
def test_any_bytes(data: bytes, sizes: list[int]) -> None:
    assert not check(data, sizes).row_bytes


words = st.sampled_from(
    [0, 1, 2, 3, 4, 8, 16, 20, 64, 0x67677371, 0x6767736E, 0xAF143CD8, 0x34565344, 1 << 21, 0xFFFFFFFF]
)


@given(st.lists(words, max_size=300), st.lists(st.integers(1, 700), min_size=1, max_size=5))
@settings(max_examples=100)
def test_any_words(values: list[int], sizes: list[int]) -> None:
    check(pack(f"<{len(values)}I", *values), sizes)


@given(
    st.sampled_from(sorted(SMALL)),
    st.lists(
        st.tuples(st.floats(0, 1), st.sampled_from(["flip", "insert", "drop", "cut", "word"]), words),
        max_size=4,
    ),
    st.lists(st.integers(1, 3000), min_size=2, max_size=4),
)
@settings(max_examples=200, deadline=None)
def test_mutated_states(name: str, edits: list[tuple[float, str, int]], sizes: list[int]) -> None:
    data = bytearray(SMALL[name])
    for where, how, value in edits:
        # Most of the structure is in the first bytes.
        at = int(where**3 * len(data))
        word = value.to_bytes(4, "little")
        if how == "flip" and data:
            data[at % len(data)] ^= 1 << value % 8
        elif how == "insert":
            data[at:at] = word
        elif how == "drop":
            del data[at : at + 4]
        elif how == "word":
            data[at : at + 4] = word
        elif how == "cut":
            del data[at:]
    check(bytes(data), sizes)


def test_counts_that_lie() -> None:
    """A header that promises much and brings little holds back no more than was fed."""
    p = range(50)
    for words, cells in ((1 << 31, 50), (50, 1 << 21), (50, 1 << 30)):
        data = bytearray(build.ggsq(p, build.kv(p)))
        data[8:12] = pack("<I", words)
        data[216:220] = pack("<I", cells)
        check(bytes(data) + build.noise(100_000), [4096])


def test_held_is_bounded() -> None:
    """Foreign bytes, bare magics, and a state's rows: half a MiB and a call's bytes at most."""
    p = range(3000)
    inputs = [
        build.noise(3 << 20),
        pack("<I", 0xAF143CD8) * (1 << 18),
        build.blob(b"")[:8] * (1 << 17),
        build.ggsq(p, build.kv(p, width=512)),
        build.ggsq(p, build.noise(2 << 20)),
    ]
    for data in inputs:
        cutter = Cutter()
        out = 0
        for at in range(0, len(data), 50_000):
            out += sum(len(piece.data) for piece in cutter.feed(data[at : at + 50_000]))
            assert cutter.held <= 600_000
        out += sum(len(piece.data) for piece in cutter.finish())
        assert out == len(data)


def test_shared_foreign_bytes_cut_the_same() -> None:
    """Content-defined chunks meet behind different beginnings, and end where a container starts."""
    tail = build.noise(2 << 20)
    both = []
    for lead in (b"x" * 1000, b"another beginning"):
        cutter = Cutter()
        both.append({bytes(piece.data) for piece in [*cutter.feed(lead + tail), *cutter.finish()]})
    assert sum(map(len, both[0] & both[1])) > len(tail) * 0.8


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_what_fuzzing_found(path: Path) -> None:
    data = path.read_bytes()
    check_input(data)
    for filler in range(4):
        check_followed(data, filler)


@given(st.integers(0, 1 << 32))
@settings(max_examples=100, deadline=None)
def test_mutations_of_the_fuzz_tool(seed: int) -> None:
    pool = mutate.seeds()
    dice = random.Random(seed)
    check_input(mutate.Mutator(pool)(dice.choice(pool), dice))


@pytest.mark.parametrize(
    "one", [build.ggsq([], build.noise(300)), b"qsgg\0\0\0\0" + build.noise(300), b"qsgg\0\0\0\0"]
)
def test_magics_without_a_state_cost_no_more_in_one_call(one: bytes) -> None:
    """Each stops the search for the next one, which must not look through all that was fed again."""
    before = time.process_time()
    cut([one * ((4 << 20) // len(one))], 256 * 1024)
    assert time.process_time() - before < 5


TINY = {
    "empty kv": build.kv([]),
    "blob, empty kv": build.blob(build.kv([])),
    "bare head": build.ggsq([]),
    "recurrent": build.recurrent(layers=1, r_width=4, s_width=4),
    "kv": build.kv([5], layers=1, width=4),
    "old kv": build.old_kv([5, 6], layers=1, width=4),
    "deepseek4": pack("<III", 0x34565344, 1, 0),
    "compressed K": build.dsv4_k(0, layers=0),
    "compressor state": build.dsv4_state(1, 1, layers=1, width=2),
    "many layers": build.kv([5], layers=1000, width=2),
}


@pytest.mark.parametrize("lead", [b"", pack("<III", 0x34565344, 1, 0)])
@pytest.mark.parametrize("name", TINY)
def test_tiny_modules_without_end(name: str, lead: bytes) -> None:
    """Each costs time and a piece of its own, so there is an end to it: of 900,000 words few are pieces."""
    unit = TINY[name]
    data = build.ggsq([]) + lead + unit * ((3 << 20) // len(unit))
    cutter, pieces = cut([data], 256 * 1024)
    if name != "many layers":  # a piece for each of a thousand layers is what was asked for; up to a point
        assert len(pieces) < 120_000
        assert cutter.report.stopped
