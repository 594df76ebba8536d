"""Bytes stored, against the position oracle's least."""

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from position_oracle import oracle

from cachefs.sizes import GIB, MIB
from cachefs.states import Cutter
from cachefs.store import Store
from cachefs.store.recipe import Recipe
from cachefs.store.tree import ROOT

from . import client
from .figures import Bench, Row, say
from .mounts import CacheMount
from .statefile import State

SETS = {
    "chats, f16": "smol/chats",
    "growing turns": "smol/turns",
    "q8_0": "smol/q8_0",
    "-fa off": "smol/fa-off",
    "q8_0, -fa off": "smol/q8_0-fa-off",
}
LIMIT = 1.01


def space(bench: Bench) -> Iterator[Row]:
    """Real states, stored and counted."""
    if bench.states is None:
        say("space: left out, give --states DIR (./tools/states DIR makes one)")
        return
    for title, folder in SETS.items():
        files = sorted((bench.states / folder).glob("*.bin"))
        yield from _set(bench, title, files[:2] if bench.quick else files)
    for folder, title in (("archs", "architectures"), ("archs-fa-off", "architectures, -fa off")):
        yield from _archs(bench, title, bench.states / folder)


def _set(bench: Bench, title: str, files: list[Path]) -> Iterator[Row]:
    if not files:
        say(f"space: no states for '{title}'")
        return
    best = oracle(files)
    with CacheMount(bench.folder("space"), 4 * GIB) as mount:
        for path in files:
            client.plain_save(mount.path / path.name, State(memoryview(path.read_bytes()), ()))
        stats = mount.stats()
    stored = int(stats["stored_bytes"])
    sizes = f"{stored / 1e6:.2f} of {best.total / 1e6:.0f} MB, best {best.stored / 1e6:.2f}"
    note = f"{len(files)} files: {sizes}"
    details = {"total": best.total, "stored": stored, "oracle": best.stored,
               "compressed": stats["compressed_bytes"], "disk": stats["disk_bytes"]}  # fmt: skip
    yield Row("space", f"stored / oracle: {title}", [stored / best.stored], LIMIT, note=note, details=details)


def _archs(bench: Bench, title: str, folder: Path) -> Iterator[Row]:
    names = sorted({path.name.partition(".")[0] for path in folder.glob("*.bin")})
    names = names[::8] if bench.quick else names
    if not names:
        say(f"space: no states for '{title}'")
        return
    ratios: dict[str, float] = {}
    in_runs: dict[str, float] = {}
    for name in names:
        files = sorted(folder.glob(f"{name}.*.bin"))
        best, stored = oracle(files), _stored_alone(bench, files)
        ratios[name] = stored / best.stored
        in_runs[name] = stored / best.stored_in_runs
    worst = max(ratios, key=lambda name: ratios[name])
    over = sum(ratio > LIMIT for ratio in ratios.values())
    runs = max(in_runs.values())
    note = f"{len(names)} models, {over} above, worst {worst}; if only runs of rows count {runs:.4f}"
    details = {**ratios, **{f"{name}, in runs": ratio for name, ratio in in_runs.items()}}
    yield Row("space", f"stored / oracle: {title}", list(ratios.values()), LIMIT, note=note, details=details,
              all_count=True)  # fmt: skip


def _stored_alone(bench: Bench, files: list[Path]) -> int:
    """Bytes of blocks that these files need in a store of their own, without a mount."""
    folder = bench.work / "alone"
    store = Store.open(folder, 64 * MIB)
    try:
        for path in files:
            cutter, placer = Cutter(), store.placer()
            for piece in [*cutter.feed(path.read_bytes()), *cutter.finish()]:
                placer.place(piece)
            made, _ = store.tree.create(
                ROOT, path.name.encode(), stat.S_IFREG | 0o600, os.getuid(), os.getgid()
            )
            store.tree.set_content(made, Recipe(placer.take()), cutter.row_bytes, None)
            store.index.active.holds.append(placer.take_holds())
        store.commit()
        return store.counters()["stored_bytes"]
    finally:
        store.close()
        shutil.rmtree(folder)
