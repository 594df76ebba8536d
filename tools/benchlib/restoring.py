"""Restores, warm against the transport's limit and cold against a plain directory; reads beside a save."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cachefs.sizes import GIB, MIB

from . import client, statefile
from .figures import Bench, Row, drop_caches, median, rate, say, settle
from .mounts import HERE, CacheMount, EmptyMount
from .statefile import BIG


def warm(bench: Bench) -> Iterator[Row]:
    """A restore whose bytes are in memory, against a filesystem that answers zeros."""
    size = bench.size(512 * MIB, 128 * MIB)
    state = statefile.make(BIG, [(1, BIG.cells_for(size))])
    plain = bench.folder("plain") / "warm.bin"
    mine: list[float] = []
    empty: list[float] = []
    disk: list[float] = []
    with CacheMount(bench.folder("warm"), 4 * GIB) as mount, EmptyMount(bench.folder("warm")) as nothing:
        files = [(mount.path / "state.bin", mine), (nothing.path / "state.bin", empty), (plain, disk)]
        for path, _ in files:
            client.plain_save(path, state)
            client.restore(path)
        if not client.same_as(mount.path / "state.bin", state):
            raise RuntimeError("a restore differs from what was saved")
        settle()
        before = mount.cpu()
        for _ in range(max(5, bench.repeat)):
            for path, times in files:
                times.append(client.restore(path))
        cpu = 1000 * (mount.cpu() - before) / (len(mine) * state.size / MIB)
    plain.unlink()
    speeds = {name: rate(state.size, median(times)) for name, times in
              (("mb_s", mine), ("empty_mb_s", empty), ("plain_mb_s", disk))}  # fmt: skip
    note = f"{speeds['mb_s']:,.0f} MB/s, empty {speeds['empty_mb_s']:,.0f}, plain {speeds['plain_mb_s']:,.0f}"
    note += f"; daemon's CPU {cpu:.2f} ms/MiB"
    speeds["daemon_cpu_ms_per_mib"] = cpu
    ratios = [b / a for a, b in zip(mine, empty, strict=True)]
    yield Row("warm", "restore, warm / empty filesystem", ratios, 0.8, False, note=note, details=speeds)


def cold_ratios(
    bench: Bench, mount: CacheMount, names: list[str], plain: Path
) -> Iterator[tuple[float, float]]:
    """Seconds for all ``names`` from the mount and from ``plain``, caches dropped before each."""
    for _ in bench.rounds():
        mount.umount()  # pages that the daemon has mapped are not dropped
        drop_caches()
        mount.mount()
        mine = sum(client.restore(mount.path / name) for name in names)
        drop_caches()
        yield mine, sum(client.restore(plain / name) for name in names)


def cold_row(name: str, size: int, times: list[tuple[float, float]], limit: float) -> Row:
    mine, plain = rate(size, median([t[0] for t in times])), rate(size, median([t[1] for t in times]))
    details = {"mb_s": mine, "plain_mb_s": plain}
    note = f"{mine:,.0f} MB/s, plain {plain:,.0f}"
    return Row("cold", name, [t[1] / t[0] for t in times], limit, False, note=note, details=details)


def cold(bench: Bench) -> Iterator[Row]:
    """Restores with cold caches, from a young store."""
    if not drop_caches():
        say("cold: left out, only root may drop the caches")
        return
    cells = BIG.cells_for(bench.size(256 * MIB, 96 * MIB))
    plain = bench.folder("plain-cold")
    names = [f"state{i}.bin" for i in range(2)]
    size = 0
    with CacheMount(bench.folder("cold"), 4 * GIB) as mount:
        for i, name in enumerate(names):
            state = statefile.make(BIG, [(i + 1, cells)])
            size += state.size
            client.plain_save(mount.path / name, state)
            client.plain_save(plain / name, state)
        times = list(cold_ratios(bench, mount, names, plain))
    yield cold_row("restore, cold, young store", size, times, 0.8)


def latency(bench: Bench) -> Iterator[Row]:
    """4 KiB reads of another file by a second client while a save runs."""
    cells = BIG.cells_for(bench.size(512 * MIB, 192 * MIB))
    other = statefile.make(BIG, [(1, BIG.cells_for(64 * MIB))])
    mine: list[float] = []
    empty: list[float] = []
    worst = 0.0
    with (
        CacheMount(bench.folder("latency"), 6 * GIB) as mount,
        EmptyMount(bench.folder("latency")) as nothing,
    ):
        targets = [mount.path / "other.bin", nothing.path / "other.bin"]
        for target in targets:
            client.plain_save(target, other)
        for i in bench.rounds():
            state = statefile.make(BIG, [(10 + i, cells)])
            reads, beside = _reads_beside(targets, mount.path / f"state{i}.bin", state)
            mine.append(1000 * reads[int(len(reads) * 0.99)])
            empty.append(1000 * beside[int(len(beside) * 0.99)])
            worst = max(worst, 1000 * reads[-1])
    note = f"worst {worst:.1f} ms; p99 of the empty filesystem meanwhile {median(empty):.2f} ms"
    yield Row("latency", "p99 of 4 KiB reads during a save", mine, 20, unit="ms", note=note,
              details={"worst_ms": worst, "empty_ms": median(empty)})  # fmt: skip


def _reads_beside(targets: list[Path], path: Path, state: statefile.State) -> list[list[float]]:
    """Seconds of each read of each target, in order of size."""
    command = [sys.executable, str(HERE / "prober.py"), *map(str, targets)]
    prober = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert prober.stdout is not None
        prober.stdout.readline()
        client.safe_save(path, state)
        text, _ = prober.communicate(timeout=60)
    finally:
        prober.kill()
        prober.wait()
    return [sorted(map(float, line.split())) for line in text.splitlines()]
