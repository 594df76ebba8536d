"""antirez/ds4's kvstore: small rewrites in place of large committed files."""

from __future__ import annotations

import os
import stat

from .ds4 import KvStore
from .fixture import MountFactory, names, stats
from .payload import noise


def test_hits_rewrite_the_header_and_nothing_else(mount: MountFactory) -> None:
    m = mount()
    cache = KvStore(m.path / "kv" / "store")
    path = cache.store("chat|1", 600)
    payload = b"".join(cache.payload("chat|1", 600))
    before = m.stats()
    for hit in range(1, 4):
        assert cache.load("chat|1", now=1_800_000_000 + hit) == payload
        header, size = cache.headers()[path]
        assert (header.hits, header.last_used, size) == (hit, 1_800_000_000 + hit, path.stat().st_size)
    if before is not None:
        assert stats(m)["new_block_bytes"] - before["new_block_bytes"] < len(payload) / 2
    m.remount()
    assert cache.headers()[path][0].hits == 3
    assert cache.load("chat|1", now=0) == payload
    assert stat.S_IMODE(cache.directory.stat().st_mode) == 0o700


def test_trailer_is_cut_and_appended(mount: MountFactory) -> None:
    """Longer, shorter, and in between the header: the payload never changes."""
    m = mount()
    cache = KvStore(m.path)
    path = cache.store("chat|1", 500)
    whole = path.read_bytes()
    for trailer in (noise("t1", 10_000), noise("t2", 150_000), noise("t3", 33)):
        cache.update_trailer(path, trailer)
        data = path.read_bytes()
        assert data[48:] == whole[48:] + trailer
        assert cache.load("chat|1", now=1) == b"".join(cache.payload("chat|1", 500))
    m.remount()
    assert path.read_bytes()[48:] == whole[48:] + noise("t3", 33)
    assert cache.headers()[path][0].extension == 1


def test_consumed_file_goes_before_its_longer_successor_comes(mount: MountFactory) -> None:
    """The prefix is loaded, unlinked, and soon written again with more tokens under another name."""
    m = mount()
    cache = KvStore(m.path, cold=1_000)
    for turn in range(1, 5):
        cache.store(f"chat|{turn}", 400 * turn)
        assert cache.load(f"chat|{turn}", now=turn) == b"".join(cache.payload(f"chat|{turn}", 400 * turn))
        assert names(m.path) == set()


def test_eviction_by_score_reads_every_header(mount: MountFactory) -> None:
    m = mount()
    cache = KvStore(m.path)
    paths = [cache.store(f"{n}|", 300) for n in range(4)]
    for n in (0, 2):
        cache.load(f"{n}|", now=1)
    cache.limit = 3 * os.stat(paths[0]).st_size + 100
    paths.append(cache.store("new|", 300))
    assert names(m.path) == {paths[n].name for n in (0, 2, 4)}
