"""ik_llama.cpp: slot files with sidecars, and a directory of many small blocks."""

from __future__ import annotations

import errno
import os

import pytest

from .cxxfs import RENAME_NOREPLACE, regular_files, renameat2
from .fixture import MountFactory, names
from .ik_llama import (
    BlockCache,
    ik_fields,
    sidecar,
    slot_delete,
    slot_list,
    slot_rename,
    slot_restore,
    slot_save,
)
from .payload import chat, noise


def test_slot_and_sidecars_come_back(mount: MountFactory) -> None:
    """ik's body looks like upstream's up to the version; it must still come back byte for byte."""
    m = mount()
    path = m.path / "chat"
    state, checkpoints = chat("a", "b"), [chat("a").blob(), noise("recurrent", 200_001)]
    slot_save(path, state, checkpoints)
    m.remount()
    assert slot_restore(path) == (b"".join(ik_fields(state)), state.tokens, checkpoints)
    assert names(m.path) == {"chat", "chat.tokens.json", "chat.checkpoints"}


def test_list_delete_and_rename(mount: MountFactory) -> None:
    m = mount()
    one, two, three = (m.path / name for name in ("one", "two", "three"))
    slot_save(one, chat("a"), [noise("c", 5_000)])
    slot_save(two, chat("a", "b"), [])
    assert slot_list(m.path) == {"one": 320, "two": 640, "one.checkpoints": 1}
    assert slot_rename(one, two) == 409
    with pytest.raises(OSError, match="exists") as error:
        renameat2(one, two, RENAME_NOREPLACE)
    assert error.value.errno == errno.EEXIST
    assert slot_rename(one, three) == 200
    assert slot_delete(two)
    assert not slot_delete(two)
    assert names(m.path) == {"three", "one.checkpoints", "one.tokens.json", "two.tokens.json"}
    renameat2(three, one, RENAME_NOREPLACE)
    assert slot_restore(one)[2] == [noise("c", 5_000)]


def test_stale_checkpoints_of_an_earlier_save_are_loaded(mount: MountFactory) -> None:
    """With nothing to save the sidecar is neither written nor removed: it has to stay as it was."""
    path = mount().path / "chat"
    slot_save(path, chat("a"), [noise("stale", 9_000)])
    slot_save(path, chat("b"), [])
    assert slot_restore(path) == (b"".join(ik_fields(chat("b"))), chat("b").tokens, [noise("stale", 9_000)])


def test_block_directory(mount: MountFactory) -> None:
    """Names of about 170 bytes, published one by one, listed, aged and pruned in one flat directory."""
    m = mount()
    cache = BlockCache(m.path)
    assert cache.save("first", 200) == 200
    assert cache.save("first", 220) == 20
    assert cache.save("second", 80) == 80
    assert len(cache.path("first", 0).name) > 165
    assert len(list(regular_files(m.path))) == 300
    m.remount()
    assert all(cache.load("first", n) == cache.payload("first", n) for n in range(0, 220, 7))
    with open(cache.path("first", 3), "r+b") as file:
        file.write(b"????")
    assert cache.load("first", 3) is None
    assert not cache.path("first", 3).exists()
    for block in range(80):
        os.utime(cache.path("second", block), (1_600_000_000 + block,) * 2)
    assert cache.shrink(279 * 6_012) == 20
    assert not cache.path("second", 19).exists()
    assert cache.age(days=30) == 60
    sidecar(cache.path("third", 0), ".tmp").touch()
    os.utime(sidecar(cache.path("third", 0), ".tmp"), (0, 0))
    assert cache.age(days=1) == 1
    assert len(names(m.path)) == 219
