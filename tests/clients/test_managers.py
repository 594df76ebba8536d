"""Managers of llama-server's slot files: unsloth studio, hearth-llm, diskllm, oMLX."""

from __future__ import annotations

import os
import stat

from .cxxfs import last_write_time
from .fixture import MountFactory, names
from .llama_server import slot_restore
from .managers import GIB, DiskLlm, Hearth, Omlx, Unsloth
from .payload import chat, noise


def test_unsloth_saves_when_the_mount_reports_room(mount: MountFactory) -> None:
    """A mount that reported no free space would never get a file; what it does report is believed."""
    m = mount("--max-size", "2G")
    manager = Unsloth(m.path / "unsloth")
    state = chat("a", "b")
    path = manager.save(state, estimate=len(state.file()))
    assert path is not None
    assert stat.S_IMODE(manager.root.stat().st_mode) == 0o700
    if not m.plain:
        assert manager.save(state, estimate=None) is None
        assert manager.save(state, estimate=2 * GIB) is None
    assert manager.restore(path) == state.file()
    assert names(manager.root) == set()
    for slot in range(3):
        assert manager.save(state, estimate=len(state.file()), slot=slot) is not None
    (manager.root / "notes.txt").touch()
    m.remount("--max-size", "2G")
    assert names(Unsloth(m.path / "unsloth").root) == {"notes.txt"}


def test_hearth_keeps_log_manifest_and_states_together(mount: MountFactory) -> None:
    m = mount()
    size = len(chat(0).file())
    manager = Hearth(m.path / "hearth", limit=3 * size)
    assert manager.probe(chat("probe"))
    paths = [manager.save(f"conversation {n}", chat(n)) for n in range(5)]
    manager.close()
    m.remount()
    manager = Hearth(m.path / "hearth", limit=3 * size)
    assert set(manager.manifest) == {path.name for path in paths[2:]}
    assert [slot_restore(path)[0] for path in paths[2:]] == [chat(n).file() for n in (2, 3, 4)]
    (manager.root / "orphan.kv").write_bytes(b"old")
    os.utime(manager.root / "orphan.kv", (1_600_000_000,) * 2)
    (manager.root / "young.kv").write_bytes(b"young")
    manager.sweep()
    assert names(manager.root) == {*manager.manifest, "manifest.json", "llama-server.log", "young.kv"}
    os.write(manager.log, b"end\n")
    lines = (manager.root / "llama-server.log").read_text().splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("probe", "end", 7)
    manager.close()


def test_diskllm_replaces_states_and_writes_rows_by_mapping(mount: MountFactory) -> None:
    m = mount()
    manager = DiskLlm(m.path)
    first = manager.save("a", chat("a"))
    manager.save("b", chat("b"))
    with open(first, "rb") as reader:
        begin = reader.read(1000)
        manager.save("a", chat("a", "more"))
        # The replaced file is still what this reader opened.
        assert begin + reader.read() == chat("a").file()
    assert slot_restore(first)[0] == chat("a", "more").file()
    for name, when in (("a", 2), ("b", 3)):
        last_write_time(m.path / f"{name}.mmap", when * 10**9)
    assert manager.newest_first() == ["b.mmap", "a.mmap"]
    rows = {n: noise(("row", n), 544) for n in range(0, 900, 3)}
    manager.write_rows(rows, count=900, size=544)
    more = {n: noise(("row", n), 544) for n in range(1, 1000, 3)}
    path = manager.write_rows(more, count=1000, size=544)
    m.remount()
    assert path.read_bytes() == b"".join((rows | more).get(n, bytes(544)) for n in range(1000))


def test_omlx_directories(mount: MountFactory) -> None:
    m = mount()
    cache = Omlx(m.path)
    paths = [cache.save(noise(("block", n), 40_000)) for n in range(24)]
    for age, path in enumerate(reversed(paths)):
        last_write_time(path, (1_700_000_000 + age) * 10**9)
    m.remount()
    assert [path for path, _, _ in Omlx(m.path).scan()] == paths[::-1]
    assert len(names(m.path)) == 16
    assert os.statvfs(m.path).f_bavail > 0
