"""Files that look like states and are none, or are states of another kind under the same magic and version.

Whatever is made of them: every byte comes out again, however it arrived, and little is held back.
"""

import io
import pickle
from collections.abc import Iterator
from itertools import cycle, islice
from struct import pack, pack_into

import pytest

from cachefs.states import Cutter, Rows

from ..data.load import real_states
from . import build
from .properties import check, cut

P = list(range(300))
LAYOUTS = build.every_layout()
REAL = real_states()
KIB = 1024


def exact(data: bytes, held_most: int = 600 * KIB) -> Cutter:
    """All promises hold, in odd pieces and in those that clients write, and little is held back."""
    for sizes in ([4096], [1, 700, 3, 12345]):
        check(data, sizes, 16384)
    parts = (data[at : at + 8192] for at in range(0, len(data), 8192))
    return cut(parts, 256 * KIB, held_most)[0]


def groups(data: bytes) -> list[bytes]:
    return [bytes(piece.data) for piece in cut([data], 16384)[1] if isinstance(piece, Rows)]


# --- one magic and version, two bodies


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("v_state", [0, 1, 2])
def test_ik_and_upstream_under_one_version(version: int, v_state: int) -> None:
    ik = build.ggsq(P, build.ik_kv(P, layers=3, width=64, v_state=v_state), version=version)
    cutter = exact(ik)
    assert not cutter.torn
    rotations = (0, 0) if version == 4 else None
    upstream = build.ggsq(P, build.kv(P, layers=3, width=64, rotations=rotations), version=version)
    assert exact(upstream).row_bytes == 6 * 300 * 64
    # The other's rows are no strangers: K layers 0 and 2 are the same in both.
    assert len(set(groups(ik)) & set(groups(upstream))) == len(groups(upstream)) * (2 if v_state else 4) // 6


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5, 64])
def test_any_version_of_a_body_that_is_understood(version: int) -> None:
    assert exact(build.ggsq(P, build.kv(P), version=version)).row_bytes == 4 * 300 * 64


@pytest.mark.parametrize("version", [0, 65, 0xFFFFFFFF])
def test_no_version(version: int) -> None:
    cutter = exact(build.ggsq(P, build.kv(P), version=version))
    assert cutter.report.container is None
    assert not cutter.torn


@pytest.mark.parametrize("word", [0x53574143, 0x50414732, 0x50414731])
@pytest.mark.parametrize("live", [64, 300])
def test_layout_words_in_place_of_the_cell_count(word: int, live: int) -> None:
    """ik_llama.cpp's SWAC and openPangu: the compacted layers carry ``live`` rows, not cell_count."""
    body = build.ik_kv(P[-live:], width=64)
    table = build.cell_table(P, [[]] * len(P), 0)
    swac = pack("<IIIIII", word, 512, live, 300 - live, 0, len(P)) + table + body[4 + len(table) :]
    for version in (3, 4):
        cutter = exact(build.ggsq(P, swac, version=version))
        assert not cutter.torn


@pytest.mark.parametrize("version", [3, 4])
@pytest.mark.parametrize("count", [1, 3, 32])
def test_checkpoints_sidecar_with_the_magic_of_a_state(version: int, count: int) -> None:
    """ggsq, u32 version, u64 count; per checkpoint 4 i32, u64 length and a blob, with and without magic."""
    for blob in (build.blob(build.kv(range(100, 164)), build.recurrent()), build.kv(range(100, 164))):
        one = pack("<iiiiQ", 100, 163, 164, -1, len(blob)) + blob
        data = pack("<IIQ", 0x67677371, version, count) + one * count
        cutter = exact(data)
        assert not cutter.torn
        if blob.startswith(pack("<I", 0xAF143CD8)):
            # The count is taken for that of tokens, which swallows the head of the first blob if it is large.
            assert cutter.row_bytes == (count - (count > 7)) * 4 * 64 * 64


# --- the token payload


def media(ids: list[int]) -> list[int]:
    """llama-server's packed payload with two images: media cells are -1, the blobs' last word is padded."""
    ids = [*ids[:100], *[-1] * 20, *ids[120:200], *[-1] * 20, *ids[220:]]
    blobs = b"".join(pack("<I", size) + build.noise(size) for size in (1001, 90))
    blobs += bytes(-len(blobs) % 4)
    words = [int.from_bytes(blobs[at : at + 4], "little", signed=True) for at in range(0, len(blobs), 4)]
    return [-1, 1, len(ids), *ids, 2, 100, 200, *words]


def test_packed_and_bare_tokens() -> None:
    module = build.kv(P, width=512)
    states = [build.ggsq(words, module) for words in (P, build.packed(P), media(P), [])]
    assert [exact(state).report.tokens for state in states] == [300, 300, 300, 0]
    assert all(groups(state) == groups(states[0]) for state in states)
    assert all(exact(state).row_bytes == 4 * 300 * 512 for state in states)


@pytest.mark.parametrize(
    "words", [[-1], [-1, 1], [-1, 1, 1 << 30, 7], [-1, 1, -1, 7], [-1, 2, 1, 7], [0x67677371] * 9]
)
def test_payloads_that_only_begin_like_packed_ones(words: list[int]) -> None:
    cutter = exact(build.ggsq(words, build.kv(P)))
    assert cutter.report.tokens == len(words)
    assert cutter.row_bytes == 4 * 300 * 64


def test_magics_among_tokens_and_rows() -> None:
    """Token ids and rows may hold any words, the magics too; in a recognised part they mean nothing."""
    magics = list(islice(cycle([0x67677371, 1, 2, -0x50EBC328, 0, 0x34565344]), 300))
    state = bytearray(build.ggsq(magics, build.kv(P, width=512)))
    at = 12 + 1200 + 8 + 3600 + 16 + 12 + 512 * 10
    state[at : at + 16] = pack("<IIII", 0x67677371, 4, 0, 1)
    cutter = exact(bytes(state))
    assert cutter.row_bytes == 4 * 300 * 512
    assert cutter.report.states == 1


@pytest.mark.parametrize("words", [1 << 16, 1 << 20, 1 << 26, (1 << 26) + 1, 1 << 30, 0xFFFFFFFF])
def test_huge_word_count(words: int) -> None:
    """A payload that promises up to 16 GiB of tokens: nothing waits for them."""
    for rest in (build.kv(P), build.noise(3 << 20)):
        data = pack("<III", 0x67677371, 4, words) + rest
        cutter = exact(data)
        assert cutter.torn == (words <= 1 << 26 and 12 + 4 * words > len(data))


# --- counts that lie

LIES = [0, 1, 2, 299, 301, 4096, 1 << 20, 1 << 21, (1 << 21) + 1, 1 << 31, 0xFFFFFFFF]
COUNTS = {
    # layout: offsets of its counts from the start of its first module
    "dense": {"n_stream": 0, "n_cell": 4, "v_trans": 8 + 3600, "n_layer": 12 + 3600, "n_rot_k": 16 + 3600},
    "ext 12": {"n_stream": 0, "n_cell": 4, "v_trans": 8 + 7200, "n_layer": 12 + 7200},
    "transposed": {"n_cell": 4, "v_trans": 8 + 3600, "n_layer": 12 + 3600, "row": 28 + 3600},
    "streams": {"n_stream": 0, "empty": 4, "n_cell": 12, "last": 12 + 4 + 3600 + 16 + 4 * (12 + 300 * 64)},
    "old": {"n_cell": 0, "v_trans": 4 + 3600, "n_layer": 8 + 3600},
    "old, no sequences": {"n_cell": 0, "v_trans": 4 + 2400, "n_layer": 8 + 2400},
    "recurrent": {"n_cell": 0, "n_seq": 8, "s_trans": 12, "n_layer": 16, "type": 20, "row": 24},
    "K only, twice": {"n_cell": 4, "n_layer": 12 + 3600},
}


@pytest.mark.parametrize(("name", "count"), [(name, count) for name in COUNTS for count in COUNTS[name]])
def test_counts_that_lie(name: str, count: str) -> None:
    data = bytearray(LAYOUTS[name])
    start = 12 + 4 * int.from_bytes(data[8:12], "little")
    at = start + COUNTS[name][count]
    for lie in LIES:
        pack_into("<I", data, at, lie)
        # At most a row of 4 MiB is waited for, or the table and section that were promised.
        exact(bytes(data) + build.noise(50_000), held_most=len(data) + 600 * KIB)


@pytest.mark.parametrize("ext", [0, 8, 12])
def test_a_table_no_larger_than_stated(ext: int) -> None:
    """2**21 cells of eight sequences each take more than 64 MiB: it is let go there, not at its end."""
    record = pack("<iI", 5, 8) + bytes(ext) + pack("<8i", *range(8))
    count = (1 << 20) // len(record)
    data = pack("<III", 0x67677371, 4, 0) + pack("<II", 1, 1 << 21)
    cutter, _ = cut([data, *[record * count] * 90], 256 * KIB)
    assert cutter.report.stopped == (12, "no module starts here")


# --- cut off at every edge


def edges(data: bytes) -> Iterator[int]:
    """Where containers, modules, headers, sections and their rows start and end."""
    cutter, _ = cut([data], 256 * KIB)
    for module in cutter.report.modules:
        yield from (module.offset, module.offset + 4, module.offset + 8)
        for section in module.sections:
            head = 28 if module.kind.startswith("dsv4") else 8 if section.kind == "P" else 12
            size = section.row_bytes * section.cells * (section.rows if section.kind == "VT" else 1)
            yield from (
                section.offset,
                section.offset + 4,
                section.offset + head,
                section.offset + head + size,
            )


@pytest.mark.parametrize("name", LAYOUTS)
def test_cut_off_at_every_edge(name: str) -> None:
    data = LAYOUTS[name]
    for end in sorted({edge + off for edge in edges(data) for off in (-1, 0, 1)}):
        cutter = check(data[:end], [4096, 77], 16384)
        assert not cutter.torn or cutter.promised > end


@pytest.mark.parametrize("name", REAL)
def test_real_states_cut_off_at_every_edge(name: str) -> None:
    data = REAL[name]
    for end in sorted(set(edges(data))):
        for size in (end - 1, end):
            check(data[:size], [8192], 256 * KIB)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 8, 11, 12, 13, 28])
@pytest.mark.parametrize("name", ["dense", "session", "blob", "bare blob", "recurrent", "deepseek4"])
def test_tiny_files(name: str, size: int) -> None:
    exact(LAYOUTS[name][:size])


# --- other people's files, with states in them

BLOB = build.blob(build.kv(P, width=512), build.recurrent())
ROWS = 4 * 300 * 512


def pickled() -> bytes:
    """llama-cpp-python: the state behind the logits, in a pickle."""
    file = io.BytesIO()
    pickle.dump({"scores": build.noise(100_001), "n_tokens": 300, "state": BLOB}, file, protocol=5)
    return file.getvalue()


FOREIGN = {
    # what it is: its bytes, and how many blobs in it announce themselves
    "PCD2": (b"PCD2" + pack("<IQ", 1, 9999) + build.noise(301, 1) + BLOB + BLOB, 2),
    "BKVD": (
        pack("<IIQQQQI", 0x44564B42, 1, 7, 100, 9, 50_000, 2)
        + pack("<BQQ", 0, 0, 4096)
        + pack("<BQ", 1, len(BLOB))
        + BLOB,
        1,
    ),
    "LLPCACHE meta": (b"LLPCACHE" + pack("<II6Q", 1, 0, 40, 1216, 0, 0, 0, 0) + build.noise(1300, 2), 0),
    "CKCP": (pack("<IIQii3Q", 0x50434B43, 1, 300, 0, 299, len(BLOB), 0, 0) + BLOB, 1),
    "PKCL": (pack("<III", 0x4C434B50, 1, 2) + (pack("<QQ", 300, len(BLOB)) + BLOB) * 2, 2),
    "LSCKPT2": (b"LSCKPT2\0" + build.noise(33, 3) + BLOB, 1),
    "LKMT": (pack("<II", 0x544D4B4C, 1) + build.noise(900, 4) + pack(f"<{len(P)}i", *P), 0),
    "SCKP appendix": (
        build.ggsq(build.packed(P), build.kv(P, width=512)) + b"SCKP" + pack("<IIii", 1, 1, 0, 299) + BLOB,
        2,
    ),
    # ds4's payload begins with the word that deepseek4's state in llama.cpp begins with.
    "ds4": (
        b"KVC\x01"
        + pack("<BBBBIIIQQQ", 8, 1, 0, 0, 300, 1, 4096, 1, 2, 50_000)
        + pack("<I", 11)
        + b"hello world"
        + pack("<13I", 0x34565344, 1, 1, 300, 61, 64, 512, 7168, 1, 0, 0, 0, 0)
        + build.noise(60_000, 5),
        0,
    ),
    "ds4 at the front": (
        pack("<13I", 0x34565344, 1, 0, 1, 2, 1, 2, 0, 1, 0, 0, 0, 0) + build.noise(9000, 6),
        0,
    ),
    "safetensors": (
        pack("<Q", 64) + b'{"k":{"dtype":"F16","shape":[8,8],"data_offsets":[0,128]}}'.ljust(64),
        0,
    ),
    "pickle": (pickled(), 1),
    "JSON": (b'{"magic": 1819112310, "version": 1, "tokens": [1, 2, 3]}', 0),
    "log": (b"main: server is listening on http://127.0.0.1:8080\n" * 900, 0),
    "zeros": (bytes(700_000), 0),
    "ones": (b"\xff" * 300_000, 0),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files(name: str) -> None:
    data, blobs = FOREIGN[name]
    cutter = exact(data)
    assert cutter.row_bytes == blobs * ROWS
    assert not cutter.torn
    for end in (len(data) // 3, len(data) // 2, len(data) - 1):
        exact(data[:end])
