"""The `--prompt-cache-dir` fork: content-named containers that the client verifies."""

from __future__ import annotations

import fcntl
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from .fixture import MountFactory, names, stats
from .payload import chat
from .processes import child, expect
from .prompt_cache_dir import Fingerprint, PromptCacheDir, Rejected


def test_saved_containers_load_after_a_remount(mount: MountFactory) -> None:
    m = mount()
    cache = PromptCacheDir(m.path)
    a, b = chat("a", "b"), chat("a", "c", slot=1)
    first = cache.save(a.blob(), chat("draft").blob())
    second = cache.save(b.blob())
    m.remount()
    cache = PromptCacheDir(m.path)
    assert cache.load(first) == [a.blob(), chat("draft").blob()]
    assert cache.load(second) == [b.blob()]
    assert cache.save(b.blob()) == second
    assert names(m.path) == {".lock", first.name, second.name}


def test_fsync_then_rename_survives_the_daemon(mount: MountFactory) -> None:
    """What was fsynced is whole; the rename may or may not have happened."""
    m = mount()
    cache = PromptCacheDir(m.path)
    state = chat("a", "b")
    path = cache.save(state.blob())
    m.kill()
    m.remount()
    if not path.exists():
        os.rename(path.with_name(path.name + ".tmp"), path)
    assert PromptCacheDir(m.path).load(path) == [state.blob()]


def test_flipped_byte_is_seen_by_the_client_and_stays_in_its_file(mount: MountFactory) -> None:
    """A byte changed from outside must come back changed, and only in the file where it was changed."""
    m = mount()
    cache = PromptCacheDir(m.path)
    a, b = chat("shared", "a"), chat("shared", "b")
    damaged, sound = cache.save(a.blob()), cache.save(b.blob())
    original = damaged.read_bytes()
    for offset in (3, 9, 200, len(original) // 3, len(original) - 1):
        fd = os.open(damaged, os.O_RDWR)
        byte = bytes([original[offset] ^ 0x10])
        assert os.pwrite(fd, byte, offset) == 1
        os.close(fd)
        assert damaged.read_bytes() == original[:offset] + byte + original[offset + 1 :]
        with pytest.raises(Rejected):
            cache.load(damaged)
        damaged.write_bytes(original)
        assert cache.load(damaged) == [a.blob()]
    assert cache.load(sound) == [b.blob()]


@pytest.mark.parametrize("change", [-1, -4096, -700_000, 1, 4096])
def test_wrong_length_is_seen_by_the_client(mount: MountFactory, change: int) -> None:
    m = mount()
    cache = PromptCacheDir(m.path)
    path = cache.save(chat("a", "b").blob())
    whole = path.read_bytes()
    os.truncate(path, len(whole) + change)
    assert path.read_bytes() == whole[: len(whole) + change] + bytes(max(0, change))
    with pytest.raises(Rejected):
        cache.load(path)


def test_other_model_is_rejected(mount: MountFactory) -> None:
    m = mount()
    path = PromptCacheDir(m.path).save(chat("a").blob())
    with pytest.raises(Rejected, match="another model"):
        PromptCacheDir(m.path, fingerprint=Fingerprint(build="ffffffff")).load(path)


def test_prune_goes_by_logical_size_and_use(mount: MountFactory) -> None:
    """Three containers that share almost everything still count three times for the client."""
    m = mount()
    states = [chat("shared", "shared2", n, tokens=200) for n in range(4)]
    cache = PromptCacheDir(m.path, limit=int(3.5 * len(states[0].blob())))
    paths = []
    for age, state in enumerate(states[:3]):
        paths.append(cache.save(state.blob()))
        os.utime(paths[-1], (1_700_000_000 + age,) * 2)
    os.utime(paths[0])
    m.remount()
    paths.append(cache.save(states[3].blob()))
    assert names(m.path) == {".lock", paths[0].name, paths[2].name, paths[3].name}
    if not m.plain:
        assert stats(m)["dedup_ratio"] > 1.5


def hold_lock(pipe: Connection, directory: Path) -> None:
    with PromptCacheDir(directory).lock():
        pipe.send("locked")
        pipe.recv()


def test_lock_keeps_others_out_until_its_holder_is_killed(mount: MountFactory) -> None:
    m = mount()
    cache = PromptCacheDir(m.path)
    with child(hold_lock, m.path) as (process, pipe):
        expect(pipe)
        with pytest.raises(BlockingIOError), cache.lock(fcntl.LOCK_SH | fcntl.LOCK_NB):
            pass
        process.kill()
        process.join()
        with cache.lock(fcntl.LOCK_EX | fcntl.LOCK_NB):
            pass


def save_half(pipe: Connection, directory: Path) -> None:
    fd = os.open(directory / "0123abcd.bin.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.write(fd, chat("torn").blob()[:300_000])
    pipe.send("half")
    pipe.recv()


def test_temporary_file_of_a_killed_server_goes_at_the_next_start(mount: MountFactory) -> None:
    m = mount()
    with child(save_half, m.path) as (_, pipe):
        expect(pipe)
    assert names(m.path) == {"0123abcd.bin.tmp"}
    PromptCacheDir(m.path)
    assert names(m.path) == {".lock"}
