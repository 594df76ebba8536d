"""Saves: in the calls of llama-server, by the real one, and written safely (write, fsync, rename)."""

from collections.abc import Iterator
from pathlib import Path

from cachefs.sizes import GIB, MIB

from . import client, statefile
from .figures import Bench, Row, median, rate, say, settle
from .mounts import CacheMount
from .statefile import BIG, Shape, State


class _Pair:
    """The same saves on the mount and on the plain directory, one after the other."""

    def __init__(self, mount: CacheMount, plain: Path) -> None:
        self._mount = mount
        self._places = (mount.path, plain)
        self._number = 0
        self.reset()

    def reset(self) -> None:
        self.mine: list[float] = []
        self.plain: list[float] = []
        self._cpu = self._mount.cpu()
        self._bytes = 0

    def save(self, how: client.Saver, state: State, *, count: bool = True) -> None:
        self._number += 1
        times = []
        for place in self._places:
            settle()
            times.append(how(place / f"state{self._number}.bin", state))
        self._bytes += state.size
        if count:
            self.mine.append(times[0])
            self.plain.append(times[1])
        (self._places[1] / f"state{self._number}.bin").unlink()

    def note(self) -> tuple[str, dict[str, float]]:
        """What was measured, in words and in figures."""
        settle()
        cpu = 1000 * (self._mount.cpu() - self._cpu) / (self._bytes / MIB)
        size = self._bytes / (len(self.mine) or 1)
        mine, plain = rate(size, median(self.mine)), rate(size, median(self.plain))
        details = {"mb_s": mine, "plain_mb_s": plain, "daemon_cpu_ms_per_mib": cpu}
        return f"{mine:,.0f} MB/s, plain {plain:,.0f}; daemon's CPU {cpu:.1f} ms/MiB", details

    @property
    def time_ratios(self) -> list[float]:
        return [mine / plain for mine, plain in zip(self.mine, self.plain, strict=True)]

    @property
    def speed_ratios(self) -> list[float]:
        return [plain / mine for mine, plain in zip(self.mine, self.plain, strict=True)]


def save(bench: Bench) -> Iterator[Row]:
    """The calls of llama-server's save (no fsync), made up, against a plain directory."""
    size = bench.size(256 * MIB, 96 * MIB)
    cells = BIG.cells_for(size)
    half = cells // 8 * 4
    with CacheMount(bench.folder("save"), bench.size(12 * GIB, 4 * GIB)) as mount:
        pair = _Pair(mount, bench.folder("plain"))
        pair.save(client.stdio_save, statefile.make(BIG, [(1, cells)]), count=False)
        pair.reset()
        for i in bench.rounds():
            pair.save(client.stdio_save, statefile.make(BIG, [(10 + i, cells)]))
        note, details = pair.note()
        yield Row("save", "save as llama-server, new", pair.time_ratios, 1.3, note=note, details=details)

        pair.reset()
        for i in bench.rounds():
            pair.save(client.stdio_save, statefile.make(BIG, [(1, half), (100 + i, cells - half)]))
        note, details = pair.note()
        yield Row("save", "… half shared", pair.time_ratios, 1.0, note=note, details=details)

    columns = Shape(BIG.layers, BIG.width, transposed=True)
    with CacheMount(bench.folder("save-off"), bench.size(12 * GIB, 4 * GIB)) as mount:
        pair = _Pair(mount, bench.folder("plain"))
        pair.save(client.stdio_save, statefile.make(columns, [(2, cells // 8 * 4)]), count=False)
        mount.umount()
        mount.mount()  # which now gathers small writes: that was learned from the first state
        pair.reset()
        for i in bench.rounds():
            pair.save(client.stdio_save, statefile.make(columns, [(200 + i, cells)]))
        note, details = pair.note()
        yield Row("save", "… -fa off, new", pair.time_ratios, 3.0, note=note, details=details)


def safe(bench: Bench) -> Iterator[Row]:
    """write + fsync + rename, against a plain directory."""
    size = bench.size(256 * MIB, 96 * MIB)
    cells = BIG.cells_for(size)
    common = cells * 4 // 5 // 4 * 4
    with CacheMount(bench.folder("safe"), bench.size(12 * GIB, 4 * GIB)) as mount:
        pair = _Pair(mount, bench.folder("plain"))
        pair.save(client.safe_save, statefile.make(BIG, [(1, cells)]), count=False)
        pair.reset()
        for i in bench.rounds():
            state = statefile.make(BIG, [(10 + i, cells)])
            pair.save(client.safe_save, state)
        note, details = pair.note()
        yield Row("safe", "write+fsync+rename, unique", pair.speed_ratios, 0.6, False,
                  note=note, details=details)  # fmt: skip

        pair.reset()
        for i in bench.rounds():
            pair.save(client.safe_save, statefile.make(BIG, [(1, common), (100 + i, cells - common)]))
        note, details = pair.note()
        yield Row("safe", "… 80 % shared", pair.speed_ratios, 2.0, False, note=note, details=details)


def server(bench: Bench) -> Iterator[Row]:
    """llama-server's own save_ms, with SmolLM2, on the mount and on a plain directory."""
    from . import realserver

    found = realserver.find()
    if found is None:
        say("server: left out, llama-server or SmolLM2 not found (./tools/test --llama installs both)")
        return
    yield from realserver.measure(bench, found)
