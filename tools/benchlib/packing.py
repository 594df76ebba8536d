"""Compressed blocks: what they save, and restores and saves from and against them, beside raw ones."""

from collections.abc import Iterator
from pathlib import Path

from cachefs.sizes import GIB, MIB

from . import client, statefile
from .figures import Bench, Row, median, rate, say, settle
from .mounts import CacheMount
from .statefile import BIG, State

TYPES = {
    "f16": "smol/chats",
    "bf16": "smol/bf16",
    "f32": "smol/f32",
    "q8_0": "smol/q8_0",
    "q4_0": "smol/q4_0",
    "f16, -fa off": "smol/fa-off",
}


def packing(bench: Bench) -> Iterator[Row]:
    """What compressing real states saves; warm restores and shared saves, compressed against raw."""
    states = _states(bench)
    name, state = next(iter(states.items()))
    times: dict[str, list[float]] = {}
    stored: dict[str, dict[str, int]] = {}
    with (
        CacheMount(bench.folder("raw"), 4 * GIB, "--compress=off") as raw,
        CacheMount(bench.folder("packed"), 4 * GIB, "--compress=always") as packed,
    ):
        for mount in (raw, packed):
            last, stored[mount.path.parent.name] = 0, {}
            for each, content in states.items():
                path = mount.path / f"{each}.bin"
                client.safe_save(path, content)
                if not client.same_as(path, content):
                    raise RuntimeError("a restore differs from what was saved")
                total = int(mount.stats()["compressed_bytes"])
                stored[mount.path.parent.name][each], last = total - last, total
        settle()
        cpu: dict[str, float] = {"raw": 0.0, "packed": 0.0}
        for number in range(max(5, bench.repeat)):
            for mount in (raw, packed):
                key = mount.path.parent.name
                before = mount.cpu()
                times.setdefault(f"read {key}", []).append(client.restore(mount.path / f"{name}.bin"))
                cpu[key] += mount.cpu() - before
                again = mount.path / f"again{number}.bin"
                times.setdefault(f"save {key}", []).append(client.plain_save(again, state))
    ratios = {each: stored["raw"][each] / stored["packed"][each] for each in states}
    note = ", ".join(f"{each} {ratio:.2f}" for each, ratio in ratios.items())
    yield Row(
        "packing", f"compressed {name}: raw / stored", [ratios[name]], None, False, note=note, details=ratios
    )
    for what, limit, title in (
        ("read", 0.5, "restore, warm, compressed / raw"),
        ("save", None, "save of what is stored, compr. / raw"),
    ):
        speeds = {key: rate(state.size, median(times[f"{what} {key}"])) for key in ("raw", "packed")}
        note = f"{speeds['packed']:,.0f} MB/s, raw {speeds['raw']:,.0f}"
        if what == "read":
            mib = len(times["read raw"]) * state.size / MIB
            used = {key: 1000 * seconds / mib for key, seconds in cpu.items()}
            note += f"; daemon's CPU {used['packed']:.2f} ms/MiB, raw {used['raw']:.2f}"
            speeds |= {f"daemon_cpu_ms_per_mib_{key}": value for key, value in used.items()}
        pairs = zip(times[f"{what} raw"], times[f"{what} packed"], strict=True)
        yield Row("packing", title, [a / b for a, b in pairs], limit, False, details=speeds, note=note)


def _states(bench: Bench) -> dict[str, State]:
    found: dict[str, State] = {}
    for name, folder in TYPES.items() if bench.states else ():
        files = sorted((bench.states or Path()).joinpath(folder).glob("*.bin"))
        if files:
            found[name] = State(memoryview(files[0].read_bytes()), ())
    if found:
        return found
    say("packing: a made-up state; --states DIR gives real ones")
    return {"made-up f16": statefile.make(BIG, [(1, BIG.cells_for(bench.size(256 * MIB, 96 * MIB)))])}
