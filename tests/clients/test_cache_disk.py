"""llama.cpp PR #28092: pairs of data and meta, and a server that deletes before it writes."""

from __future__ import annotations

import os

from .cache_disk import CacheDisk
from .fixture import MountFactory, names, stats
from .payload import chat, noise


def test_pairs_are_found_and_restored_after_a_remount(mount: MountFactory) -> None:
    m = mount()
    cache = CacheDisk(m.path)
    cache.start()
    checkpoints = (noise("c1", 70_000), noise("c2", 80_001))
    cache.save(chat("system", "a"), chat("draft").blob(), checkpoints)
    cache.save(chat("system", "b"))
    m.remount()
    cache = CacheDisk(m.path)
    cache.start()
    first, second = cache.entries
    assert cache.restore(first) == [chat("system", "a").blob(), chat("draft").blob(), *checkpoints]
    assert cache.restore(second) == [chat("system", "b").blob(), b""]
    assert names(m.path) == {path.name for entry in cache.entries for path in (entry.data, entry.meta)}


def test_contained_entry_is_unlinked_before_the_longer_is_written(mount: MountFactory) -> None:
    m = mount()
    cache = CacheDisk(m.path)
    checkpoint = noise("window", 300_000)
    cache.save(chat("a", "b", "c"), checkpoints=(checkpoint,))
    before = m.stats()
    longer = chat("a", "b", "c", "d")
    entry = cache.save(longer, checkpoints=(checkpoint, noise("window2", 100_000)))
    assert names(m.path) == {entry.data.name, entry.meta.name}
    assert cache.restore(entry) == [longer.blob(), b"", checkpoint, noise("window2", 100_000)]
    if before is not None:
        new = stats(m)["new_block_bytes"] - before["new_block_bytes"]
        assert new < 1.15 * (len(chat("d").file()) + 100_000) + 2 * 65_536


def test_start_scan_deletes_what_does_not_belong(mount: MountFactory) -> None:
    """Temporary metas, damaged metas, data without meta, and every entry of another model."""
    m = mount()
    mine, other = CacheDisk(m.path), CacheDisk(m.path, key="other.gguf|q8_0|4096")
    kept = mine.save(chat("a"))
    other.save(chat("b"))
    damaged = mine.save(chat("c"))
    os.truncate(damaged.meta, damaged.meta.stat().st_size - 1)
    (m.path / "llama-prompt-cache-1.bin").touch()
    (m.path / "llama-prompt-cache-2.bin").write_bytes(chat("d").blob())
    (m.path / "llama-prompt-cache-3.bin.meta.tmp").write_bytes(b"LLPCACHE")
    (m.path / "unrelated.txt").write_text("stays\n")
    m.remount()
    mine.start()
    assert names(m.path) == {kept.data.name, kept.meta.name, "unrelated.txt"}
    assert mine.restore(mine.entries[0]) == [chat("a").blob(), b""]


def test_hit_touches_the_meta_only_and_orders_the_next_start(mount: MountFactory) -> None:
    m = mount()
    cache = CacheDisk(m.path)
    entries = [cache.save(chat(n, tokens=60)) for n in range(4)]
    for age, entry in enumerate(entries):
        for path in (entry.data, entry.meta):
            os.utime(path, ns=(1_700_000_000 * 10**9 + age,) * 2)
    cache.restore(entries[1])
    cache.restore(entries[0])
    times = {path: path.stat().st_mtime_ns for e in entries for path in (e.data, e.meta)}
    assert times[entries[0].data] == 1_700_000_000 * 10**9
    m.remount()
    assert {path: path.stat().st_mtime_ns for path in times} == times
    cache.start()
    assert [e.meta for e in cache.entries] == [entries[n].meta for n in (2, 3, 1, 0)]


def test_limit_counts_logical_bytes_and_evicts_the_oldest(mount: MountFactory) -> None:
    m = mount()
    size = len(chat("shared", 0).blob())
    cache = CacheDisk(m.path, limit=3 * size)
    entries = [cache.save(chat("shared", n)) for n in range(5)]
    assert names(m.path) == {p.name for entry in entries[2:] for p in (entry.data, entry.meta)}


def test_short_data_is_noticed_at_restore_and_dropped(mount: MountFactory) -> None:
    m = mount()
    cache = CacheDisk(m.path)
    entry = cache.save(chat("a"))
    os.truncate(entry.data, entry.size - 1)
    m.remount()
    cache.start()
    assert cache.restore(cache.entries[0]) is None
    assert names(m.path) == set()


def test_peers_start_scan_does_not_break_an_open_reader(mount: MountFactory) -> None:
    """Two servers of different models in one directory: one unlinks what the other is reading."""
    m = mount()
    mine, other = CacheDisk(m.path), CacheDisk(m.path, key="other")
    entry = mine.save(chat("a", "b"))
    fd = os.open(entry.data, os.O_RDONLY)
    start = os.read(fd, 100_000)
    other.start()
    assert names(m.path) == set()
    rest = b"".join(iter(lambda: os.read(fd, 1 << 20), b""))
    os.close(fd)
    assert start + rest == chat("a", "b").blob()
