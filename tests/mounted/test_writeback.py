"""``--writeback``: the kernel gathers small writes, and what it then knows of a file stays true."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ..running import Mounted, eventually, run_cachefs
from ..states import build
from .conftest import MountFactory

SAVE = """
import os, sys, time
data = open(sys.argv[2], "rb").read()
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
for at in range(0, int(sys.argv[3]), 8192):
    os.write(fd, data[at : at + 8192])
print("written", flush=True)
time.sleep(60 if len(sys.argv) > 4 else 0)
"""


def state(tokens: int, salt: int = 0) -> bytes:
    cells = build.kv(range(tokens), layers=4, width=384, v="transposed", salt=salt)
    return build.ggsq(range(tokens), cells)


def save(path: Path, data: bytes, step: int = 8192) -> None:
    """In small writes, at offsets that are no multiples of a page."""
    with path.open("wb", buffering=0) as file:
        file.write(data[:100])
        for at in range(100, len(data), step):
            file.write(data[at : at + step])


def write_and_sync(fd: int, times: int) -> None:
    for _ in range(times):
        os.write(fd, os.urandom(1 << 20))
    os.fsync(fd)


def test_a_save_in_small_writes_is_cut_as_one_in_order(mount: MountFactory) -> None:
    m = mount("--writeback=on")
    data = state(1500)
    save(m.path / "a", data)
    before = m.stats()
    save(m.path / "b", data)
    assert (m.path / "a").read_bytes() == (m.path / "b").read_bytes() == data
    after = m.stats()
    assert after["stored_bytes"] - before["stored_bytes"] < 10_000
    assert before["row_bytes"] > 0.95 * len(data)


def test_pages_that_are_written_twice(mount: MountFactory) -> None:
    """A flush in mid-save writes a page that is not full, and later once more."""
    m = mount("--writeback=on")
    data = state(1500)
    fd = os.open(m.path / "a", os.O_WRONLY | os.O_CREAT, 0o600)
    for at in range(0, len(data), 100_001):
        os.write(fd, data[at : at + 100_001])
        os.sync_file_range(fd, 0, 0, 7) if hasattr(os, "sync_file_range") else os.fdatasync(fd)
    os.close(fd)
    assert (m.path / "a").read_bytes() == data
    m.remount()
    assert (m.path / "a").read_bytes() == data


def test_times_and_sizes(mount: MountFactory) -> None:
    m = mount("--writeback=on")
    path = m.path / "a"
    path.write_bytes(b"x" * 5000)
    os.utime(path, (1000, 2000))
    assert path.stat().st_mtime == 2000
    time.sleep(0.02)
    with path.open("ab") as file:
        file.write(b"y" * 10)
    assert path.stat().st_size == 5010
    assert path.stat().st_mtime > 1e9
    os.truncate(path, 100)
    told = path.stat()
    m.remount("--writeback=off")
    assert path.stat().st_size == told.st_size == 100
    assert abs(path.stat().st_mtime - told.st_mtime) < 2


def test_a_save_that_a_kill_tore_shows_the_old_version_whole(mount: MountFactory, tmp_path: Path) -> None:
    m = mount("--writeback=on")
    m.expect_errors()
    old, new = state(700), state(1500, salt=3)
    path = m.path / "slot.bin"
    save(path, old)
    assert run_cachefs("pin", path).returncode == 0
    (tmp_path / "new").write_bytes(new)
    half = len(new) // 2
    arguments = [sys.executable, "-c", SAVE, path, tmp_path / "new", half, "wait"]
    with subprocess.Popen([str(a) for a in arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        assert path.stat().st_size >= half
        process.send_signal(signal.SIGKILL)
    assert eventually(lambda: path.stat().st_size == len(old))
    assert path.read_bytes() == old
    assert '"pinned": true' in run_cachefs("ls", "--json", m.store).stdout
    assert m.stats()["torn_saves"] == 1
    save(path, new)
    assert path.read_bytes() == new
    m.remount()
    assert path.read_bytes() == new


def test_what_does_not_fit_is_reported_and_not_shown(mount: MountFactory) -> None:
    m = mount("--writeback=on", "--max-size=64M")
    m.expect_errors()
    path = m.path / "big"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    with pytest.raises(OSError, match="No space left"):
        write_and_sync(fd, 100)
    with suppress(OSError):
        os.close(fd)
    with suppress(FileNotFoundError):  # the store is full, so the next to go is this file itself
        assert eventually(lambda: path.stat().st_size < 64 << 20)
        size = path.stat().st_size
        assert len(path.read_bytes()) == size
        path.unlink()
    path.write_bytes(b"there is room again")


def test_extended_attributes_are_left_out(mount: MountFactory) -> None:
    """The kernel would ask for one before every write."""
    path = mount("--writeback=on").path / "a"
    path.write_bytes(b"x")
    assert os.listxattr(path) == []
    with pytest.raises(OSError, match="not supported"):
        os.setxattr(path, "user.a", b"b")
    with pytest.raises(OSError, match="not supported"):
        os.getxattr(path, "user.a")


def test_learned_from_the_last_state(mount: MountFactory) -> None:
    m = mount()
    assert "gathers small writes" not in m.log()
    save(m.path / "a", state(1500))
    m.remount()
    assert m.log().count("gathers small writes") == 1
    plain = build.ggsq(range(1500), build.kv(range(1500), layers=4, width=384, salt=1))
    save(m.path / "b", plain)
    m.remount()
    assert m.log().count("gathers small writes") == 1
    assert (m.path / "b").read_bytes() == plain


def test_readers_see_what_a_writer_has_not_closed(mount: MountFactory) -> None:
    m: Mounted = mount("--writeback=on")
    path = m.path / "a"
    data = state(1500)
    save(path, data)
    with path.open("r+b", buffering=0) as file:
        file.write(b"new!")
        file.seek(2 << 20)
        file.write(b"there")
        with path.open("rb") as reader:
            assert reader.read(4) == b"new!"
            reader.seek(2 << 20)
            assert reader.read(5) == b"there"
