"""Synthetic state files of every layout, for tests.

A row's bytes are a function of (salt, section, cell key), where the key is the cell's position unless keys
are given. So two states built with a common prefix of positions have equal rows there, and another salt gives
another conversation. Layouts follow state-format and clients, section 1; all integers are little-endian.

    state = ggsq(range(100), kv(range(100), layers=3, width=64))
"""

from collections.abc import Iterable, Sequence
from struct import pack

import numpy as np
from numpy.typing import NDArray

F32, F16, Q8_0 = 0, 1, 8
_EL_BYTES = {F32: 4, F16: 2, 30: 2}


def rows(section: int, keys: Iterable[int], width: int, salt: int = 0) -> NDArray[np.uint8]:
    """uint8[len(keys), width]: rows of noise, each a function of section, key and salt."""
    key = np.array(list(keys), dtype=np.uint64)
    column = np.arange((width + 7) // 8, dtype=np.uint64)
    seed = np.uint64(((section + 1) * 0x9E3779B97F4A7C15 + salt * 0xD1B54A32D192ED03) % (1 << 64))
    word = _mix(_mix(key * np.uint64(0xBF58476D1CE4E5B9) + seed)[:, None] + column[None, :])
    return np.ascontiguousarray(word).view(np.uint8).reshape(len(key), 8 * len(column))[:, :width]


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def section(type_id: int, width: int, data: bytes) -> bytes:
    """i32 type, u64 row_bytes, rows."""
    return pack("<iQ", type_id, width) + data


def cell_table(positions: Sequence[int], seqs: Sequence[Sequence[int]], ext: int) -> bytes:
    """i32 pos, u32 n_seq, ext, i32 seq_id[n_seq] for every cell."""
    out = []
    for index, (pos, ids) in enumerate(zip(positions, seqs, strict=True)):
        extra = pack("<iii", pos, pos, 1000 + index * 7 % 5000)[:ext]
        out.append(pack("<iI", pos, len(ids)) + extra + pack(f"<{len(ids)}i", *ids))
    return b"".join(out)


def stream(
    positions: Sequence[int],
    *,
    layers: int = 2,
    width: int | Sequence[int] = 64,
    type_id: int = F16,
    v: str | None = "plain",
    v_layers: Sequence[int] | None = None,
    rotations: tuple[int, int] | None = (0, 0),
    ext: int = 0,
    slot: int = 0,
    seqs: Sequence[Sequence[int]] | None = None,
    salt: int = 0,
    keys: Sequence[int] | None = None,
) -> bytes:
    """u32 n_cell and what follows it: one stream of a kv module.

    ``width``: row bytes, of all layers or of each; ``v``: plain, transposed or None (MLA); ``v_layers``: the
    layers that have V (default all); ``rotations`` None leaves the two words out, as before version 4;
    ``seqs``: the sequences of each cell (default the slot's one).
    """
    positions = list(positions)
    cells = len(positions)
    if not cells:
        return pack("<I", 0)
    keys = positions if keys is None else keys
    widths = [width] * layers if isinstance(width, int) else list(width)
    out = [pack("<I", cells), cell_table(positions, seqs or [[slot]] * cells, ext)]
    out.append(pack("<II", 1 if v == "transposed" else 0, layers))
    if rotations is not None:
        out.append(pack("<II", *rotations))
    for layer in range(layers):
        out.append(section(type_id, widths[layer], rows(2 * layer, keys, widths[layer], salt).tobytes()))
    for layer in range(layers) if v_layers is None else v_layers:
        data = rows(2 * layer + 1, keys, widths[layer], salt)
        if v == "plain":
            out.append(section(type_id, widths[layer], data.tobytes()))
        elif v == "transposed":
            size = _EL_BYTES[type_id]
            columns = data.reshape(cells, -1, size).transpose(1, 0, 2)
            out.append(pack("<iII", type_id, size, widths[layer] // size) + columns.tobytes())
    return b"".join(out)


def kv(positions: Sequence[int], *, streams: int = 1, at: int = 0, **options: object) -> bytes:
    """A kv module of ``streams`` streams, all empty but number ``at``."""
    parts = [pack("<I", 0)] * streams
    parts[at] = stream(positions, **options)  # type: ignore[arg-type]
    return pack("<I", streams) + b"".join(parts)


def old_kv(positions: Sequence[int], *, n_seq: int = 1, **options: object) -> bytes:
    """A kv module before July 2025: no n_stream, no rotation words, 0 or 1 sequence a cell."""
    options = {"rotations": None, "seqs": [[0] * n_seq] * len(positions), **options}
    return stream(positions, **options)  # type: ignore[arg-type]


def ik_kv(
    positions: Sequence[int], *, layers: int = 3, width: int = 64, v_state: int = 0, salt: int = 0
) -> bytes:
    """ik_llama.cpp's body: v_state for v_trans, every layer present, type -1 and row 0 for missing ones."""
    out = [pack("<I", len(positions)), cell_table(positions, [[]] * len(positions), 0)]
    out.append(pack("<II", v_state, layers))
    for part in range(1 if v_state == 2 else 2):
        for layer in range(layers):
            if layer == 1:
                out.append(pack("<iQ", -1, 0))
            else:
                out.append(section(F16, width, rows(2 * layer + part, positions, width, salt).tobytes()))
    return b"".join(out) + pack("<II", 0, 0)


def recurrent(
    positions: Sequence[int] = (100,),
    *,
    layers: int = 2,
    r_width: int = 96,
    s_width: int = 4096,
    ple: int = 0,
    seqs: Sequence[Sequence[int]] | None = None,
    salt: int = 0,
) -> bytes:
    """A recurrent module: R sections (with ``ple`` bytes of PLE row each, if any), then S sections."""
    cells = len(positions)
    out = [pack("<I", cells), cell_table(positions, seqs or [[]] * cells, 0), pack("<II", 0, layers)]
    for layer in range(layers):
        out.append(section(F32, r_width, rows(1000 + layer, positions, r_width, salt).tobytes()))
        if ple:
            out.append(pack("<Q", ple) + rows(3000 + layer, positions, ple, salt).tobytes())
    for layer in range(layers):
        out.append(section(F32, s_width, rows(2000 + layer, positions, s_width, salt).tobytes()))
    return b"".join(out)


def _tensor(number: int, count: int, width: int, streams: int, salt: int) -> bytes:
    data = rows(number, range(count), width, salt).tobytes()
    return pack("<iQQQ", F16, width // 2, count, width) + data * streams


def dsv4_k(count: int, *, layers: int = 2, width: int = 64, streams: int = 1, salt: int = 0) -> bytes:
    """deepseek4's compressed K cache of ``count`` rows."""
    out = [pack("<IIII", 2, count, streams, layers)]
    for layer in range(layers):
        out.append(pack("<I", layer) + _tensor(4000 + layer, count, width, streams, salt))
    return b"".join(out)


def dsv4_state(
    ratio: int, size: int, *, layers: int = 2, width: int = 64, streams: int = 1, salt: int = 0
) -> bytes:
    """deepseek4's compressor state."""
    out = [pack("<IIIIII", 1, ratio, size, width // 2, streams, layers)]
    for layer in range(layers):
        out.append(pack("<I", layer))
        out.append(_tensor(5000 + layer, size, width, streams, salt))
        out.append(_tensor(6000 + layer, size, width, streams, salt))
    return b"".join(out)


def dsv4(positions: Sequence[int], window: Sequence[int], *, layers: int = 2, width: int = 64) -> bytes:
    """A whole deepseek4 state: two kv modules, three compressed caches, three compressor states."""
    n = len(positions)
    parts = [
        kv(positions, layers=layers, width=width, v=None),
        kv(window, layers=layers, width=width, v=None),
    ]
    parts += [dsv4_k(n // 4), dsv4_k(n // 128), dsv4_k(n // 4, salt=1)]
    parts += [dsv4_state(4, 8), dsv4_state(128, 128), dsv4_state(4, 8, salt=1)]
    return pack("<III", 0x34565344, 1, 0) + b"".join(parts)


def packed(tokens: Iterable[int]) -> list[int]:
    """llama-server's packed token payload without media: -1, 1, n, ids, no media."""
    ids = list(tokens)
    return [-1, 1, len(ids), *ids, 0]


def ggsq(words: Iterable[int], *modules: bytes, version: int = 4) -> bytes:
    """A sequence state file (llama_state_seq_save_file)."""
    ids = list(words)
    return pack(f"<III{len(ids)}i", 0x67677371, version, len(ids), *ids) + b"".join(modules)


def ggsn(words: Iterable[int], *modules: bytes, architecture: str = "llama", version: int = 11) -> bytes:
    """A session file (llama_state_save_file)."""
    ids = list(words)
    head = pack(f"<III{len(ids)}i", 0x6767736E, version, len(ids), *ids)
    return head + pack("<I", len(architecture)) + architecture.encode() + b"".join(modules)


def blob(*modules: bytes, seq_id: int = 0) -> bytes:
    """A sequence blob (llama_state_seq_get_data)."""
    return pack("<Ii", 0xAF143CD8, seq_id) + b"".join(modules)


def noise(size: int, salt: int = 0) -> bytes:
    """``size`` bytes without structure."""
    return rows(9999, range(size // 4096 + 1), 4096, salt).tobytes()[:size]


def every_layout() -> dict[str, bytes]:
    """One small state of each layout, by name; each is recognised to its end."""
    p = list(range(300))
    window = list(range(236, 300))
    wrapped = [*range(256, 300), *range(172, 256)]
    many = [[0, 1, 2]] * 100 + [[0]] * 100 + [[1], [2]] * 50
    return {
        "dense": ggsq(packed(p), kv(p, width=1024)),
        "dense q8_0": ggsq(p, kv(p, width=34 * 8, type_id=Q8_0)),
        "dense f32": ggsq(p, kv(p, type_id=F32)),
        "unknown type": ggsq(p, kv(p, type_id=77, width=100)),
        "version 3": ggsq(p, kv(p, rotations=None), version=3),
        "rotations": ggsq(p, kv(p, rotations=(64, 128))),
        "rotations f32": ggsq(p, kv(p, rotations=(64, 0), type_id=F32)),
        "one cell": ggsq([5], kv([0])),
        "one late cell": ggsq([5], kv([17], width=512)),
        "two cells": ggsq([5, 6], kv([0, 1])),
        "empty": ggsq([], kv([])),
        "no window cells": ggsq(p, kv(p), kv([])),
        "ext 8": ggsq(p, kv(p, ext=8, rotations=None), version=2),
        "ext 12": ggsq(p, kv(p, ext=12)),
        "ext 12, one cell": ggsq([5], kv([3], ext=12)),
        "transposed": ggsq(p, kv(p, width=512, v="transposed")),
        "transposed f32": ggsq(p, kv(p, width=600, v="transposed", type_id=F32)),
        "old": ggsq(p, old_kv(p), version=2),
        "old, no sequences": ggsq(p, old_kv(p, n_seq=0), version=2),
        "old window": ggsq(p, old_kv(p), old_kv(window), version=2),
        "streams": ggsq(p, kv(p, streams=4, at=2)),
        "streams, window": ggsq(p, kv(p, streams=4, at=3), kv(window, streams=4, at=3)),
        "streams, K only": ggsq(p, kv(p, streams=4, at=1, v=None), kv(window, streams=4, at=1, v=None)),
        "all streams": ggsn(
            p, pack("<I", 2) + stream(p) + stream(window, slot=1, salt=1), architecture="qwen3"
        ),
        "layers differ": ggsq(p, kv(p, layers=4, width=[64, 128, 64, 256])),
        "layer without heads": ggsq(p, kv(p, layers=3, width=[64, 0, 64])),
        "some V": ggsq(p, kv(p, layers=4, v_layers=[0, 3])),
        "K only": ggsq(p, kv(p, v=None)),
        "K only, twice": ggsq(p, kv(p, v=None), kv(p, v=None, layers=1, width=300)),
        "window": ggsq(p, kv(p), kv(window)),
        "wrapped window": ggsq(p, kv(p), kv(wrapped)),
        "no full layers": ggsq(p, kv(p, layers=0), kv(window)),
        "shifted": ggsq(p, kv([*range(20), *range(100, 200), *range(20, 100)])),
        "hybrid": ggsq(p, kv(p), recurrent()),
        "hybrid, K only": ggsq(p, kv(p, v=None), recurrent()),
        "hybrid, indexer": ggsq(p, kv(p), recurrent(), kv(p, v=None, width=256)),
        "hybrid, window": ggsq(p, kv(p), kv(window), recurrent()),
        "recurrent": ggsq(p, recurrent()),
        "recurrent, PLE": ggsq(p, recurrent(ple=48)),
        "recurrent, R only": ggsq(p, recurrent(s_width=0)),
        "recurrent, S only": ggsq(p, recurrent(r_width=0)),
        "deepseek4": ggsq(p, dsv4(p, window)),
        "deepseek4, short": ggsq(p[:130], dsv4(p[:130], p[90:130])),
        "session": ggsn(p, kv(p, seqs=many)),
        "session, ext 12": ggsn(p, kv(p, seqs=many, ext=12), architecture="qwen2vl"),
        "session, recurrent": ggsn(p, recurrent([50, 90], seqs=[[0, 2], [1]]), architecture="mamba"),
        "session with logits": ggsn(
            p,
            pack("<IiQ", 1, 0, 1000) + noise(4000) + pack("<Q", 0),
            kv(p, rotations=None),
            version=9,
        ),
        "blob": blob(kv(p)),
        "blobs": blob(kv(p)) + blob(kv(p, layers=1)) + blob(recurrent()) + blob(recurrent(salt=1)),
        "bare blob": kv(p),
    }
