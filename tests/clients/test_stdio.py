"""The emulated libraries themselves: do writes leave as glibc and libstdc++ send them, does all come back?"""

from __future__ import annotations

import os

import pytest

from .fixture import MountFactory
from .payload import State, chat, noise
from .stdio import FileReader, FileWriter, Ofstream, ifstream_ate


def test_header_in_buffers_then_tensors_in_one_block_aligned_write(mount: MountFactory) -> None:
    path = mount().path / "slot.bin"
    state = chat("a")
    out = FileWriter(path)
    block = min(os.stat(path).st_blksize, 8192)
    for field in state.fields():
        out.fwrite(field)
    out.fclose()
    tensor = state.cells * state.width * 2
    assert all(offset % block == 0 and (size % block == 0) for offset, size in out.calls[:-1])
    assert sum(size > block for _, size in out.calls) == 2 * state.layers
    assert all(size == block or tensor - 2 * block <= size <= tensor for _, size in out.calls[:-1])
    assert ifstream_ate(path) == state.file()


@pytest.mark.parametrize(("cells", "width"), [(600, 96), (9_000, 12)])
def test_transposed_values_leave_as_buffers_or_as_pairs(mount: MountFactory, cells: int, width: int) -> None:
    """Runs shorter than the buffer coalesce; longer ones are one buffer, then the other whole blocks."""
    path = mount().path / "slot.bin"
    state = State((("a", cells),), layers=2, width=width, transposed=True)
    out = FileWriter(path)
    block = min(os.stat(path).st_blksize, 8192)
    for field in state.fields():
        out.fwrite(field)
    out.fclose()
    values = [size for offset, size in out.calls[:-1] if offset > len(state.file()) // 2 + block]
    run = 2 * cells
    assert min(values) == block
    assert (max(values) == block) == (run < block)
    assert max(values) <= max(run, block)
    assert ifstream_ate(path) == state.file()


def test_reader_reads_the_tail_first(mount: MountFactory) -> None:
    path = mount().path / "slot.bin"
    data = noise("tail", 300_001)
    path.write_bytes(data)
    with FileReader(path) as file:
        assert file.size == len(data)
        assert file.fread(12) + file.fread(200_000) + file.fread(100) == data[:200_112]
        file.fseek(250_123)
        assert (file.ftell(), file.fread(49_878)) == (250_123, data[250_123:])
        with pytest.raises(EOFError):
            file.fread(1)


def test_ofstream_sends_fields_with_the_block_that_follows(mount: MountFactory) -> None:
    path = mount().path / "ofstream.bin"
    parts = [b"head" * 16, noise("o", 700_000), b"x", noise("p", 2_000), b"tail"]
    with Ofstream(path) as out:
        for part in parts:
            out.write(part)
    assert out.calls == [700_064, 2_001, 4]
    assert ifstream_ate(path) == b"".join(parts)


def test_append_starts_where_the_file_ended(mount: MountFactory) -> None:
    """The buffer of a FILE opened for appending is not aligned to the file."""
    path = mount().path / "log.bin"
    path.write_bytes(noise("first", 10_001))
    with FileWriter(path, "ab") as out:
        out.fwrite(noise("second", 20_000))
        assert out.ftell() == 30_001
    assert path.read_bytes() == noise("first", 10_001) + noise("second", 20_000)


@pytest.mark.parametrize("size", [1, 1024, 4095, 8193, 131_073])
def test_other_buffer_sizes(mount: MountFactory, size: int) -> None:
    """musl's stdio sends 1 KiB at a time; nothing may depend on the size of a write."""
    path = mount().path / "musl.bin"
    data = noise("musl", min(300_000, 3_000 * size))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for start in range(0, len(data), size):
        assert os.write(fd, data[start : start + size]) == len(data[start : start + size])
    os.close(fd)
    assert ifstream_ate(path) == data
