"""llama.cpp PR #26408 and other writers by shared mapping."""

from __future__ import annotations

import mmap
import os

from .fixture import MountFactory, names
from .mmap_checkpoint import MappedCheckpoint
from .payload import chat


def test_stores_in_any_order_are_restored_through_the_mapping(mount: MountFactory) -> None:
    m = mount()
    states = [chat("a", n).blob() for n in range(3)]
    mapped = [MappedCheckpoint.save(m.path / f"ckpt_{n}.bin", data, n) for n, data in enumerate(states)]
    assert [os.stat(one.path).st_size for one in mapped] == [len(data) for data in states]
    assert [one.restore() for one in mapped] == states
    assert names(m.path) == set()


def test_plain_reads_see_the_mapping(mount: MountFactory) -> None:
    """While it is mapped, once it is unmapped, and after a remount."""
    m = mount()
    path, data = m.path / "ckpt_0.bin", chat("a", "b").blob()
    one = MappedCheckpoint.save(path, data)
    assert path.read_bytes() == data
    one.memory.flush()
    one.memory.close()
    assert path.read_bytes() == data
    m.remount()
    assert path.read_bytes() == data
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        assert memory[:] == data


def test_unlinked_while_mapped(mount: MountFactory) -> None:
    """Eviction unlinks a file that is still mapped; its pages stay until the mapping goes."""
    m = mount()
    data = chat("a").blob()
    one = MappedCheckpoint.save(m.path / "ckpt_0.bin", data)
    os.unlink(one.path)
    again = MappedCheckpoint.save(m.path / "ckpt_0.bin", data[::-1])
    one.memory[100:104] = b"more"
    assert one.memory[:] == data[:100] + b"more" + data[104:]
    one.memory.close()
    assert again.restore() == data[::-1]


def test_truncated_up_reads_as_zeros(mount: MountFactory) -> None:
    m = mount()
    path = m.path / "ckpt_0.bin"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.ftruncate(fd, 64 << 20)
    os.pwrite(fd, b"middle", 40 << 20)
    os.close(fd)
    m.remount()
    assert os.stat(path).st_size == 64 << 20
    with open(path, "rb") as file:
        file.seek((40 << 20) - 4)
        assert file.read(14) == bytes(4) + b"middle" + bytes(4)
        file.seek(-1000, os.SEEK_END)
        assert file.read() == bytes(1000)
