"""Long runs: memory with a huge file, 20× turnover at the bound, restores from what is left."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cachefs.sizes import GIB, MIB

from . import client, statefile
from .figures import Bench, Row, drop_caches, rate, say
from .mounts import CacheMount, LoopDisk, Sampler
from .restoring import cold_ratios, cold_row
from .statefile import BIG, Shape, Turn


def memory(bench: Bench) -> Iterator[Row]:
    """The daemon's memory while a file far larger than its limit is written and read."""
    size = bench.size(10 * GIB, GIB)
    cells = 8192
    shape = Shape(max(1, size // (2 * cells * BIG.width)), BIG.width)
    with CacheMount(bench.folder("memory"), size + size // 4 + GIB) as mount:
        path = mount.path / "huge.bin"
        for name in ("written", "read"):
            start = time.perf_counter()
            with Sampler(lambda: mount.memory()["RssAnon"]) as anon:
                if name == "written":
                    _write_parts(path, shape, cells)
                else:
                    _check_parts(path, shape, cells)
            seconds = time.perf_counter() - start
            figures = mount.memory()
            speed, peak = rate(path.stat().st_size, seconds), figures["VmHWM"] / MIB
            note = (
                f"{size / GIB:.0f} GiB, {speed:,.0f} MB/s with its making; with mapped pages {peak:,.0f} MiB"
            )
            yield Row("memory", f"daemon's memory, file {name}", [anon.peak / MIB], 256, unit="MiB",
                      note=note, details={"VmHWM_mib": peak})  # fmt: skip


def _write_parts(path: Path, shape: Shape, cells: int) -> None:
    with path.open("wb", buffering=1 << 13) as file:
        for part in statefile.parts(shape, [(1, cells)]):
            file.write(part)


def _check_parts(path: Path, shape: Shape, cells: int) -> None:
    with path.open("rb", buffering=0) as file:
        for part in statefile.parts(shape, [(1, cells)]):
            at = 0
            while at < len(part):
                data = file.read(len(part) - at)
                if not data or data != part[at : at + len(data)]:
                    raise RuntimeError("the huge file reads differently from what was written")
                at += len(data)


@dataclass
class Churn:
    """Conversations that start anew, go on or branch off, of odd sizes, some with V transposed."""

    shape: Shape
    cells: int
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    known: list[tuple[bool, list[Turn]]] = field(default_factory=list)
    number: int = 0

    def next(self) -> tuple[str, statefile.State, int]:
        """A name, a state, and how many bytes of it nobody had before."""
        self.number += 1
        if self.known and self.rng.random() < 0.5:
            transposed, old = self.rng.choice(self.known[-8:])
            kept = self._cut(old, self.rng.choice((1.0, 1.0, 0.6)))
        else:
            transposed, kept = self.rng.random() < 0.25, []
        room = max(4, self.cells - sum(count for _, count in kept))
        new = self.rng.randrange(max(4, room // 4), room + 1) // 4 * 4 or 4
        turns = [*kept, (self.number + 1000, new)]
        self.known.append((transposed, turns))
        shape = Shape(self.shape.layers, self.shape.width, transposed)
        state = statefile.make(shape, turns)
        return f"chat{self.number}.bin", state, 2 * shape.layers * shape.width * new

    def _cut(self, turns: list[Turn], share: float) -> list[Turn]:
        left = int(sum(count for _, count in turns) * share) // 4 * 4
        out: list[Turn] = []
        for seed, count in turns:
            take = min(count, left)
            if take:
                out.append((seed, take))
            left -= take
        return out


def device(bench: Bench) -> Iterator[Row]:
    """Bytes that reach the disk for each new byte: a young store, and one that evicts."""
    bound = bench.size(512 * MIB, 128 * MIB)
    try:
        with LoopDisk(bench.folder("device"), 4 * bound) as disk:
            yield from _device_writes(bench, disk, bound)
    except RuntimeError as error:
        say(f"device: left out, no disk of its own: {error}")


def _device_writes(bench: Bench, disk: LoopDisk, bound: int) -> Iterator[Row]:
    state = statefile.make(BIG, [(1, BIG.cells_for(bound // 4))])
    before = disk.written()
    client.safe_save(disk.path / "plain.bin", state)
    plain = (disk.written() - before) / state.size
    (disk.path / "plain.bin").unlink()
    young = []
    with CacheMount(disk.path / "young", bound) as mount:
        for i in range(2):
            state = statefile.make(BIG, [(2 + i, BIG.cells_for(bound // 4))])
            before = disk.written()
            client.safe_save(mount.path / f"state{i}.bin", state)
            young.append((disk.written() - before) / state.size)
    yield Row("device", "bytes to disk / new, young store", young, 1.15, note=f"plain directory {plain:.3f}")
    shape = Shape(8, 1024)
    churn = Churn(shape, shape.cells_for(bound // 12))
    with CacheMount(disk.path / "aged", bound) as mount:
        _churn(mount, churn, 2 * bound)
        old, before = mount.stats(), disk.written()
        _churn(mount, churn, bench.repeat * bound)
        new = mount.stats()["new_block_bytes"] - old["new_block_bytes"]
        ratio = (disk.written() - before) / new
    note = f"{new / 1e9:.1f} GB new at a bound of {bound / MIB:.0f} MiB, saves of {bound / 24 / MIB:.0f} MiB"
    yield Row("device", "… in steady churn", [ratio], 1.15, note=note)


def _churn(mount: CacheMount, churn: "Churn", size: int) -> None:
    """Save until ``size`` new bytes went in."""
    while size > 0:
        name, state, fresh = churn.next()
        client.safe_save(mount.path / name, state)
        size -= fresh


def turnover(bench: Bench) -> Iterator[Row]:
    """20 times the bound in new bytes: speed and du while it lasts, restores afterwards."""
    bound = bench.bound or bench.size(512 * MIB, 128 * MIB)
    shape = Shape(8, 1024)
    churn = Churn(shape, shape.cells_for(bound // 12))
    steps: list[tuple[int, int, float]] = []
    new = 0
    with CacheMount(bench.folder("turnover"), bound) as mount:
        newest: list[tuple[str, statefile.State]] = []
        with Sampler(mount.disk) as du:
            while new < 20 * bound:
                name, state, fresh = churn.next()
                seconds = client.safe_save(mount.path / name, state)
                steps.append((new, state.size, seconds))
                new += fresh
                newest = [*newest[-5:], (name, state)]
        stats = mount.stats()
        first, last = _speed(steps, bound, 0), _speed(steps, bound, 9)
        speeds = {f"tenth_{i + 1}_mb_s": _speed(steps, bound, i) for i in range(10)}
        note = f"{last:,.0f} MB/s in the last tenth, first {first:,.0f}; {stats['evicted_entries']} evicted"
        yield Row("turnover", "20× turnover, last / first tenth", [last / first], 0.9, False, note=note,
                  details=speeds)  # fmt: skip
        yield Row("turnover", "… du / bound, at most", [du.peak / bound], 1.0,
                  note=f"{du.peak / MIB:,.1f} of {bound / MIB:,.0f} MiB")  # fmt: skip
        yield from _restores(bench, mount, newest)


def _speed(steps: list[tuple[int, int, float]], bound: int, tenth: int) -> float:
    """MB/s of one tenth of what was saved after the store was full."""
    low, high = (bound + 1.9 * bound * i for i in (tenth, tenth + 1))
    chosen = [(size, seconds) for new, size, seconds in steps if low <= new < high]
    return rate(sum(size for size, _ in chosen), sum(seconds for _, seconds in chosen))


def _restores(bench: Bench, mount: CacheMount, newest: list[tuple[str, statefile.State]]) -> Iterator[Row]:
    for name, state in newest:
        if not client.same_as(mount.path / name, state):
            raise RuntimeError(f"{name} differs from what was saved")
    if not drop_caches():
        say("cold: left out, only root may drop the caches")
        return
    plain = bench.folder("plain-cold")
    for name, state in newest:
        client.safe_save(plain / name, state)
    times = list(cold_ratios(bench, mount, [name for name, _ in newest], plain))
    yield cold_row("restore, cold, after 20× turnover", sum(s.size for _, s in newest), times, 0.5)
