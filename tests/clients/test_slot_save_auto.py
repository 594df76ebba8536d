"""llama.cpp PR #24004: units published file by file, chains of deltas, peers that watch the directory."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

from .fixture import MountFactory, names
from .payload import State, chat
from .processes import PATIENCE, child, expect
from .slot_save_auto import SlotSaveAuto, unit
from .stdio import ifstream_ate


def test_units_are_found_by_their_metas_after_a_remount(mount: MountFactory) -> None:
    m = mount()
    server = SlotSaveAuto(m.path)
    states = [chat("system", n) for n in range(3)]
    for state in states:
        server.save(state, draft=chat("draft").blob())
    m.remount()
    server = SlotSaveAuto(m.path)
    assert server.poll()
    assert not server.poll()
    for state in states:
        assert server.restore(state) == [state.file()]
    assert len(names(m.path)) == 3 * 4
    other = SlotSaveAuto(m.path, model=1)
    other.scan()
    assert other.nodes == {}


def test_chain_of_deltas_is_touched_from_root_to_tip(mount: MountFactory) -> None:
    m = mount()
    server = SlotSaveAuto(m.path)
    root, middle, tip = (chat(*range(n), tokens=100) for n in (1, 2, 3))
    server.save(root)
    server.save(middle, parent=root)
    server.save(tip, parent=middle)
    server.save(chat("other", tokens=100))
    for path in m.path.iterdir():
        os.utime(path, (1_600_000_000,) * 2)
    m.remount()
    server.scan()
    parts = [State(((n, 100),)).file() for n in range(3)]
    assert server.restore(tip) == parts
    m.remount()
    old = {path.name for path in m.path.iterdir() if path.stat().st_mtime == 1_600_000_000}
    assert old == {p.name for p in unit(server.nodes[server.chain_hash(chat("other", tokens=100))].data)}


def test_eviction_takes_leaves_and_orphans_and_leaves_pins(mount: MountFactory) -> None:
    m = mount()
    server = SlotSaveAuto(m.path)
    root, tip, pinned, late = chat("r"), chat("r", "t"), chat("p"), chat("late")
    for age, (state, parent) in enumerate([(root, None), (tip, root), (pinned, None), (late, None)]):
        for path in unit(server.save(state, parent=parent).data):
            os.utime(path, (1_600_000_000 + age,) * 2)
    server.pin(pinned)
    (m.path / "auto-gone.bin.logits").write_bytes(bytes(100))
    (m.path / "auto-0.bin.1.2.tmp").write_bytes(bytes(100))
    (m.path / "stranger.gguf").write_bytes(bytes(200))
    server.limit = 2_000_000
    server.evict()
    assert server.chain_hash(tip) not in server.nodes
    assert server.chain_hash(root) in server.nodes
    assert not (m.path / "auto-gone.bin.logits").exists()
    server.limit = 0
    server.evict()
    assert set(server.nodes) == {server.chain_hash(pinned)}
    assert not (m.path / "stranger.gguf").exists()
    server.scan()
    assert server.restore(pinned) == [pinned.file()]


def publish_often(pipe: Connection, directory: Path, state: State) -> None:
    server = SlotSaveAuto(directory)
    pipe.send("ready")
    pipe.recv()
    for _ in range(5):
        server.save(state)
    pipe.send("done")


def test_two_processes_publish_the_same_name(mount: MountFactory) -> None:
    """Whoever renames last wins; a reader sees one whole file or the other, never neither."""
    m = mount()
    state = chat("same", "chat")
    server = SlotSaveAuto(m.path)
    data = server.save(state).data
    with (
        child(publish_often, m.path, state, stay=True) as (_, one),
        child(publish_often, m.path, state, stay=True) as (_, two),
    ):
        for pipe in (one, two):
            expect(pipe)
        for pipe in (one, two):
            pipe.send("go")
        while not (one.poll() and two.poll()):
            assert ifstream_ate(data) == state.file()
        assert (expect(one), expect(two)) == ("done", "done")
    assert names(m.path) == {path.name for path in unit(data)}


def watch(pipe: Connection, directory: Path) -> None:
    """Another server: answers each question with the units it sees once the directory's mtime has moved."""
    server = SlotSaveAuto(directory)
    server.scan()
    pipe.send(len(server.nodes))
    for _ in iter(pipe.recv, "stop"):
        end = time.monotonic() + PATIENCE
        while not server.poll() and time.monotonic() < end:
            time.sleep(0.005)
        pipe.send(len(server.nodes))


def test_peer_sees_the_directory_change(mount: MountFactory) -> None:
    """Create, rename and unlink move the directory's mtime at once, also for a process that has it cached."""
    m = mount()
    server = SlotSaveAuto(m.path)
    with child(watch, m.path) as (_, pipe):
        assert expect(pipe) == 0
        time.sleep(0.02)  # ext4's clock moves in steps of a few milliseconds
        node = server.save(chat("a"))
        # A poll may fall between two of the unit's renames: ask until the unit is there.
        seen = 0
        while not seen:
            pipe.send("?")
            seen = int(str(expect(pipe)))
        assert seen == 1
        time.sleep(0.02)
        os.unlink(node.data.with_name(node.data.name + ".meta"))
        pipe.send("?")
        assert expect(pipe) == 0
        pipe.send("stop")
