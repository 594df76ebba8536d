"""A store of very many blocks: mounting, stats and saving against a small one."""

import subprocess
import sys
import time
from collections.abc import Iterator

from cachefs.sizes import GIB, MIB

from . import client, statefile
from .figures import Bench, Row, drop_caches, median, rate, settle
from .mounts import HERE, ROOT, CacheMount
from .statefile import BIG

SMALL = 10_000
FUNNEL = 200 * GIB
"""The bound: what a million blocks of the usual size take."""


def scale(bench: Bench) -> Iterator[Row]:
    """Synthetic stores of tiny blocks, filled through the store's own code."""
    blocks, entries = bench.size(1_000_000, 100_000), bench.size(2000, 200)
    small = CacheMount(bench.folder("scale-small"), FUNNEL)
    large = CacheMount(bench.folder("scale-large"), FUNNEL)
    start = time.perf_counter()
    _build(small, SMALL, 20)
    _build(large, blocks, entries)
    took = time.perf_counter() - start
    note = f"{blocks:,} blocks, {entries:,} entries, made in {took:.0f} s; caches dropped before"
    mounts: list[float] = []
    with small, large:
        for _ in bench.rounds():
            large.umount()
            if not drop_caches():
                note = note.replace("dropped before", "warm")
            mounts.append(large.mount())
        yield Row("scale", "mount, many blocks", mounts, 1.0, unit="s", note=note)
        yield Row("scale", "stats, many blocks", [_stats(large) for _ in bench.rounds()], 1.0, unit="s",
                  note=f"at {SMALL:,} blocks {_stats(small):.2f} s")  # fmt: skip
        yield _saves(bench, small, large)


def _build(mount: CacheMount, blocks: int, entries: int) -> None:
    command = [sys.executable, HERE / "fillstore.py", mount.store, FUNNEL, blocks, entries]
    subprocess.run(list(map(str, command)), check=True, env={"PYTHONPATH": str(ROOT)})


def _stats(mount: CacheMount) -> float:
    start = time.perf_counter()
    mount.stats()
    return time.perf_counter() - start


def _saves(bench: Bench, small: CacheMount, large: CacheMount) -> Row:
    cells = BIG.cells_for(bench.size(128 * MIB, 64 * MIB))
    times: dict[CacheMount, list[float]] = {small: [], large: []}
    for i in range(bench.repeat + 1):
        state = statefile.make(BIG, [(i + 1, cells)])
        for mount in (small, large) if i % 2 else (large, small):
            settle()
            seconds = client.safe_save(mount.path / f"state{i}.bin", state)
            if i:
                times[mount].append(seconds)
    ratios = [a / b for a, b in zip(times[large], times[small], strict=True)]
    speeds = [rate(state.size, median(times[mount])) for mount in (large, small)]
    note = f"{speeds[0]:,.0f} MB/s, at {SMALL:,} blocks {speeds[1]:,.0f}; a tenth is noise"
    return Row("scale", "save's time, many / few blocks", ratios, 1.1, note=note,
               details={"mb_s": speeds[0], "few_mb_s": speeds[1]})  # fmt: skip
