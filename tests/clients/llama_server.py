"""llama.cpp itself: llama-server's slot save and restore, llama-completion's `--prompt-cache`, and what
carries checkpoints beside them (PR #26004's appendix, llama-cpp-turboquant's sidecar).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path

from .cxxfs import exists
from .payload import SEQ_MAGIC, SEQ_VERSION, State, u32, u64
from .stdio import FileReader, FileWriter

APPENDIX_TAG = b"SCKP"


def save_fields(path: Path, fields: Iterable[bytes]) -> int:
    """Truncate and write in place; an error ends the save and leaves the partial file, as the server does."""
    with FileWriter(path) as out:
        for field in fields:
            out.fwrite(field)
        written = out.ftell()
        out.fclose_ignored()
    return written


def slot_save(path: Path, state: State) -> int:
    """POST /slots/N?action=save: answers with the bytes written by its own count."""
    return save_fields(path, state.fields())


def slot_restore(path: Path) -> tuple[bytes, int]:
    """POST /slots/N?action=restore: one pass for the tokens, a second for everything.

    Gives the bytes read and the offset where llama's part of the file ends.
    """
    with FileReader(path) as probe:
        _read_tokens(probe)
    with FileReader(path) as file:
        out = [_read_tokens(file)]
        _read_module(file, out)
        return b"".join(out), file.ftell()


def _read_tokens(file: FileReader) -> bytes:
    head = file.fread(4) + file.fread(4) + file.fread(4)
    magic, version, words = struct.unpack("<3I", head)
    if (magic, version) != (SEQ_MAGIC, SEQ_VERSION):
        raise ValueError("unknown (magic, version) for sequence state file")
    return head + file.fread(4 * words)


def _read_module(file: FileReader, out: list[bytes]) -> None:
    """Read the KV section field by field, as the loader's own parser does."""

    def take(fmt: str) -> tuple[int, ...]:
        fields = [file.fread(struct.calcsize(f"<{kind}")) for kind in fmt]
        out.extend(fields)
        return struct.unpack(f"<{fmt}", b"".join(fields))

    _, cells = take("II")
    for _ in range(cells):
        take("iIi")
    transposed, layers, _, _ = take("IIII")
    for part in ("k", "v"):
        for _ in range(layers):
            if part == "v" and transposed:
                _, element, width = take("iII")
                out.extend(file.fread(cells * element) for _ in range(width))
            else:
                _, row = take("iQ")
                out.append(file.fread(cells * row))


def append_checkpoints(path: Path, checkpoints: list[tuple[int, int, bytes]]) -> int:
    """PR #26004: llama closes the file; the server opens it again and appends its checkpoints."""
    with FileWriter(path, "ab") as out:
        out.fwrite(APPENDIX_TAG)
        out.fwrite(u32(1, len(checkpoints)))
        for first, last, blob in checkpoints:
            out.fwrite(struct.pack("<iiQ", first, last, len(blob)))
            out.fwrite(blob)
        written = out.ftell()
        out.fclose_ignored()
    return written


def read_checkpoints(path: Path, end: int) -> list[tuple[int, int, bytes]]:
    """Seek to the end of llama's payload and read the appendix, if there is one."""
    with FileReader(path) as file:
        if file.size == end:
            return []
        file.fseek(end)
        if file.fread(4) != APPENDIX_TAG:
            raise ValueError("bad appendix")
        _, count = struct.unpack("<2I", file.fread(8))
        out = []
        for _ in range(count):
            first, last, size = struct.unpack("<iiQ", file.fread(16))
            out.append((first, last, file.fread(size)))
        return out


def checkpoint_sidecar(path: Path, blobs: list[bytes]) -> Path:
    """llama-cpp-turboquant #206: `<state>.ckpt`, written after the state, by stdio."""
    sidecar = path.with_name(path.name + ".ckpt")
    save_fields(sidecar, [b"PKCL", u32(1, len(blobs)), *(part for b in blobs for part in (u64(len(b)), b))])
    return sidecar


def prompt_cache_load(path: Path) -> bytes | None:
    """llama-completion --prompt-cache: is it there, is it empty, then all of it."""
    if not exists(path) or os.stat(path).st_size == 0:
        return None
    with FileReader(path) as file:
        return file.fread(file.size)


def prompt_cache_save(path: Path, state: State) -> int:
    return save_fields(path, state.session_fields())
