"""The real states under tests/data, and how they were packed.

``python tests/data/load.py DIR`` packs states that ``tools/states DIR --small`` made; see README.md here.
"""

import io
import struct
import sys
import tarfile
from pathlib import Path

import zstandard

HERE = Path(__file__).parent

# Packs, and the files in each: states that share a prefix, so a pack takes little more than one of them.
PACKS = {
    "dense": ["archs/llama-dense.a.bin", "archs/llama-dense.c.bin", "archs/llama-dense.b.bin"],
    "dense-fa-off": ["archs-fa-off/llama-dense.a.bin", "archs-fa-off/llama-dense.c.bin"],
    "mrope": ["archs/qwen2vl-dense.a.bin", "archs/qwen2vl-dense.c.bin"],
    "swa": ["archs/gemma3-dense.a.bin", "archs/gemma3-dense.c.bin"],
    "mla": ["archs/deepseek2-moe.a.bin", "archs/deepseek2-moe.c.bin"],
    "mla-indexer": ["archs/deepseek32-moe.a.bin", "archs/deepseek32-moe.c.bin"],
    "mla-indexer-swa": ["archs/dots3note-moe.a.bin", "archs/dots3note-moe.c.bin"],
    "hybrid": ["archs/lfm2moe-moe.a.bin", "archs/lfm2moe-moe.c.bin"],
    "hybrid-swa": ["archs/lfm2-dense.a.bin", "archs/lfm2-dense.c.bin", "archs/lfm2-dense.b.bin"],
    "hybrid-indexer": ["archs/glm5-next-moe.a.bin"],
    "hybrid-indexer-ple": ["archs/qwen4exp-moe.a.bin"],
    "deepseek4": ["archs/deepseek4-moe.a.bin", "archs/deepseek4-moe.c.bin"],
    "session": ["smol/session/session0.bin", "smol/session/session1.bin"],
}


def real_states() -> dict[str, bytes]:
    """Every state, by ``PACK/FILE`` (``dense/llama-dense.a.bin``); the recurrent ones come last."""
    states: dict[str, bytes] = {}
    for pack in PACKS:
        raw = zstandard.ZstdDecompressor().stream_reader((HERE / f"{pack}.tar.zst").read_bytes()).read()
        with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
            for member in tar.getmembers():
                file = tar.extractfile(member)
                assert file is not None
                states[f"{pack}/{member.name}"] = file.read()
    for letter in "ac":
        hybrid = states[f"hybrid/lfm2moe-moe.{letter}.bin"]
        states[f"recurrent/lfm2moe-moe.{letter}.bin"] = recurrent_only(hybrid)
    return states


def recurrent_only(hybrid: bytes) -> bytes:
    """What a purely recurrent model writes: a hybrid state's header, tokens and recurrent module.

    The real ones (mamba) take 500 KB, none of it compressible; this one takes 2 KB.
    """
    (words,) = struct.unpack_from("<I", hybrid, 8)
    header = 12 + 4 * words
    # The module ends the file, and starts: 1 cell, at the last position, 0 sequence ids, s_trans 0.
    cell = hybrid.rindex(struct.pack("<4I", 1, last_position(hybrid, header), 0, 0))
    return hybrid[:header] + hybrid[cell:]


def last_position(state: bytes, header: int) -> int:
    """Position of the last cell of the first kv module: one stream, 12 bytes a cell."""
    (cells,) = struct.unpack_from("<I", state, header + 4)
    position: int = struct.unpack_from("<I", state, header + 8 + 12 * (cells - 1))[0]
    return position


def pack(source: Path) -> None:
    """Write the packs from a directory that tools/states --small filled."""
    for name, files in PACKS.items():
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for file in files:
                info = tarfile.TarInfo(Path(file).name)
                info.size = (source / file).stat().st_size
                with (source / file).open("rb") as data:
                    tar.addfile(info, data)
        packed = zstandard.ZstdCompressor(level=19).compress(raw.getvalue())
        (HERE / f"{name}.tar.zst").write_bytes(packed)
        print(f"{name}.tar.zst  {len(packed)} B  {' '.join(files)}")


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
