"""Names and sizes at the edges: what llama-server lets through as a file name, files with hardly a byte."""

from __future__ import annotations

import errno
import os

import pytest

from .cxxfs import regular_files
from .fixture import MountFactory, names
from .llama_server import slot_restore, slot_save
from .payload import SEQ_MAGIC, SEQ_VERSION, State, chat, u32
from .stdio import ifstream_ate, ofstream_write

NAMES = [
    "a",
    "with space and (brackets)",
    "naïve-日本語-Ωμέγα-🦙.bin",
    "-leading-dash",
    ".hidden",
    "x" * 255,
    "é" * 127 + "x",
    "quote'and$dollar;semi&",
    "no.utf8.\udcff\udcfe",
]


def test_names_survive_as_they_were_given(mount: MountFactory) -> None:
    """llama-server takes any UTF-8 of up to 255 bytes; the filesystem takes any bytes."""
    m = mount()
    for number, name in enumerate(NAMES):
        ofstream_write(m.path / name, f"content {number}".encode())
    assert names(m.path) == set(NAMES)
    m.remount()
    assert names(m.path) == set(NAMES)
    for number, name in enumerate(NAMES):
        assert ifstream_ate(m.path / name) == f"content {number}".encode()
        os.rename(m.path / name, m.path / f"n{number}")
    assert names(m.path) == {f"n{number}" for number in range(len(NAMES))}


def test_name_that_is_too_long(mount: MountFactory) -> None:
    m = mount()
    for name in ("x" * 256, "é" * 128):
        with pytest.raises(OSError, match="too long") as error:
            ofstream_write(m.path / name, b"x")
        assert error.value.errno == errno.ENAMETOOLONG
    assert os.statvfs(m.path).f_namemax == 255


@pytest.mark.parametrize("size", [0, 1, 11, 12, 28])
def test_tiny_files(mount: MountFactory, size: int) -> None:
    """Placeholders, and files cut off inside the first header fields."""
    m = mount()
    data = (u32(SEQ_MAGIC, SEQ_VERSION, 0, 1, 0) + bytes(8))[:size]
    path = m.path / "tiny.bin"
    ofstream_write(path, data)
    assert [(p.name, s) for p, s, _ in regular_files(m.path)] == [("tiny.bin", size)]
    m.remount()
    assert ifstream_ate(path) == data
    ofstream_write(path)
    assert path.read_bytes() == b""
    slot_save(path, chat("a"))
    assert slot_restore(path)[0] == chat("a").file()


def test_empty_slot(mount: MountFactory) -> None:
    """Saving and restoring a slot without tokens."""
    m = mount()
    state = State(())
    assert slot_save(m.path / "empty.bin", state) == len(state.file())
    m.remount()
    assert slot_restore(m.path / "empty.bin")[0] == state.file()


def test_missing_file(mount: MountFactory) -> None:
    m = mount()
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            slot_restore(m.path / "missing.bin")
        with pytest.raises(FileNotFoundError):
            slot_restore(m.path / "no" / "such" / "directory.bin")
    slot_save(m.path / "missing.bin", chat("a"))
    assert slot_restore(m.path / "missing.bin")[0] == chat("a").file()
