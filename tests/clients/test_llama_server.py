"""llama-server's slot files and what stands beside or behind them."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import pytest

from .fixture import MountFactory, stats
from .llama_server import (
    append_checkpoints,
    checkpoint_sidecar,
    prompt_cache_load,
    prompt_cache_save,
    read_checkpoints,
    slot_restore,
    slot_save,
)
from .payload import State, chat, noise
from .processes import child, expect
from .stdio import FileWriter, ifstream_ate


def test_saved_slots_come_back_after_a_remount(mount: MountFactory) -> None:
    m = mount()
    states = {
        "one.bin": chat("system", "one"),
        "two.bin": chat("system", "two", slot=3),
        "off.bin": State((("system", 400),), width=64, transposed=True),
    }
    for name, state in states.items():
        assert slot_save(m.path / name, state) == len(state.file()) == os.stat(m.path / name).st_size
    for _ in range(2):
        for name, state in states.items():
            assert slot_restore(m.path / name) == (state.file(), len(state.file()))
        m.remount()


def test_growing_conversation_under_one_name(mount: MountFactory) -> None:
    """The old copy is truncated before the new one is written; its rows must still be found."""
    m = mount()
    path = m.path / "slot.bin"
    slot_save(path, chat("a", "b", "c"))
    before = m.stats()
    longer = chat("a", "b", "c", "d")
    slot_save(path, longer)
    assert slot_restore(path)[0] == longer.file()
    shorter = chat("a")
    slot_save(path, shorter)
    assert slot_restore(path)[0] == shorter.file()
    if before is not None:
        new = stats(m)["new_block_bytes"] - before["new_block_bytes"]
        assert new < 1.15 * len(chat("d").file())


def test_unlinked_prefix_is_found_again(mount: MountFactory) -> None:
    m = mount()
    slot_save(m.path / "old.bin", chat("a", "b", "c"))
    before = m.stats()
    os.unlink(m.path / "old.bin")
    longer = chat("a", "b", "c", "d", slot=1)
    slot_save(m.path / "new.bin", longer)
    assert ifstream_ate(m.path / "new.bin") == longer.file()
    if before is not None:
        new = stats(m)["new_block_bytes"] - before["new_block_bytes"]
        assert new < 1.15 * len(chat("d").file())


def half_a_save(pipe: Connection, path: Path, state: State) -> None:
    """Save until the middle of the tensors, say so, and wait for the end."""
    out = FileWriter(path)
    for field in state.fields():
        out.fwrite(field)
        if out.ftell() > len(state.file()) // 2:
            break
    out.fflush()
    pipe.send("half")
    pipe.recv()


def test_server_killed_in_the_middle_of_a_save(mount: MountFactory) -> None:
    """Never a mix: the previous version, or a file that is plainly the first half of the new one."""
    m = mount()
    path = m.path / "slot.bin"
    old, new = chat("old", "x"), chat("new", "y")
    slot_save(path, old)
    with child(half_a_save, path, new) as (process, pipe):
        expect(pipe)
        process.kill()
    found = ifstream_ate(path)
    if m.plain:
        assert found == new.file()[: len(found)]
    else:
        assert found == old.file()
        assert stats(m)["torn_saves"] == 1


def test_a_state_cut_short_on_purpose_stays_so(mount: MountFactory) -> None:
    """llama.cpp's own test writes damaged states over good ones, and wants them refused when loaded."""
    m = mount()
    path = m.path / "slot.bin"
    slot_save(path, chat("a", "b"))
    short = chat("a", "b").file()[:-5_000]
    out = FileWriter(path)
    out.fwrite(short)
    out.fclose()
    assert ifstream_ate(path) == short
    m.remount()
    assert ifstream_ate(path) == short


def test_daemon_killed_in_the_middle_of_a_save(mount: MountFactory) -> None:
    m = mount()
    path = m.path / "slot.bin"
    old = chat("old", "x")
    slot_save(path, old)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    with child(half_a_save, path, chat("new", "y")) as (process, pipe):
        expect(pipe)
        if m.plain:
            return
        m.kill()
        process.kill()
    m.remount()
    assert ifstream_ate(path) == old.file()


def test_restore_one_while_saving_another(mount: MountFactory) -> None:
    m = mount()
    first, second = chat("a", "b"), chat("a", "c")
    slot_save(m.path / "a.bin", first)
    saving = Thread(target=lambda: [slot_save(m.path / "b.bin", second) for _ in range(4)])
    saving.start()
    while saving.is_alive():
        assert slot_restore(m.path / "a.bin")[0] == first.file()
    saving.join()
    assert slot_restore(m.path / "b.bin")[0] == second.file()


def test_damaged_file_is_rejected_by_the_loader(mount: MountFactory) -> None:
    """A restore of a file cut off anywhere must meet the end of the file, not old bytes."""
    path = mount().path / "slot.bin"
    state = chat("a")
    whole = len(state.file())
    for length in (whole - 1, whole // 2, 5_000, 11):
        slot_save(path, state)
        os.truncate(path, length)
        assert os.stat(path).st_size == length
        with pytest.raises(EOFError):
            slot_restore(path)
        assert ifstream_ate(path) == state.file()[:length]


def test_checkpoints_appended_after_close(mount: MountFactory) -> None:
    """PR #26004: llama's payload stays as it was and the appendix is found at its end."""
    m = mount()
    path = m.path / "slot.bin"
    state = chat("a", "b")
    checkpoints = [(0, 300, noise("c1", 90_001)), (0, 600, noise("c2", 150_000))]
    for _ in range(2):
        end = slot_save(path, state)
        assert read_checkpoints(path, end) == []
        assert append_checkpoints(path, checkpoints) == os.stat(path).st_size
    m.remount()
    payload, end = slot_restore(path)
    assert (payload, end) == (state.file(), len(state.file()))
    assert read_checkpoints(path, end) == checkpoints


def test_checkpoint_sidecar(mount: MountFactory) -> None:
    path = mount().path / "slot.bin"
    blobs = [chat("a").blob(), chat("a", "b").blob()]
    slot_save(path, chat("a", "b"))
    data = ifstream_ate(checkpoint_sidecar(path, blobs))
    assert len(data) == 12 + sum(8 + len(blob) for blob in blobs)
    assert data.endswith(blobs[-1])
    assert blobs[0] in data


def test_prompt_cache_is_rewritten_in_place(mount: MountFactory) -> None:
    """llama-completion --prompt-cache-all: loaded at start, saved before the last token and again at exit."""
    m = mount()
    path = m.path / "prompt.cache"
    assert prompt_cache_load(path) is None
    path.touch()
    assert prompt_cache_load(path) is None
    for state in (chat("a"), chat("a", "b"), chat("a", "b", "c")):
        assert prompt_cache_save(path, state) == path.stat().st_size
        assert prompt_cache_load(path) == b"".join(state.session_fields())
    m.remount()
    assert prompt_cache_load(path) == b"".join(state.session_fields())
