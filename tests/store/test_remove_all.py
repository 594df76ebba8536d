"""What ``cachefs rm --all`` leaves in a store's files: nothing of the files that were in it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from ..running import Mounted, run_cachefs
from ..states import build

MARKS = {
    kind: (f"<{kind}>".encode() * 64)[:64] for kind in ("content", "tiny", "name", "xattr", "value", "pin")
}
TOKENS = [0x6B637464 + number for number in range(64)]


def state() -> bytes:
    return build.ggsq(build.packed(TOKENS), build.kv(range(len(TOKENS)), width=1024, salt=3))


def fill(m: Mounted) -> list[bytes]:
    """Files of each sort, some removed again; what may not be found afterwards."""
    chance = random.Random(1)
    (m.path / "directory").mkdir()
    data = state()
    noise = chance.randbytes(3_000_000)
    for number in range(200):
        path = m.path / "directory" / f"{MARKS['name'].decode()}{number}"
        path.write_bytes(MARKS["tiny"] + b"%d" % number)
        os.setxattr(path, "user." + MARKS["xattr"].decode(), MARKS["value"])
    (m.path / "state").write_bytes(data)
    (m.path / "big").write_bytes(noise[:1_000_000] + MARKS["content"] + noise[1_000_000:])
    (m.path / "pinned").write_bytes(MARKS["pin"] * 1_000)
    os.setxattr(m.path / "pinned", "user.cachefs.pin", b"1")
    for number in range(0, 200, 3):
        os.unlink(m.path / "directory" / f"{MARKS['name'].decode()}{number}")
    m.remount()
    (m.path / "big").write_bytes(noise[:2_000_000])
    m.remount()
    tokens = b"".join(token.to_bytes(4, "little") for token in TOKENS[:16])
    row = build.rows(0, [5], 1024).tobytes()[:64]
    places = [noise[at : at + 64] for at in range(0, 3_000_000, 500_000)]
    return [*MARKS.values(), tokens, row, data[len(data) // 2 :][:64], *places]


def found(store: Path, marks: list[bytes]) -> list[bytes]:
    whole = b"".join(path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file())
    return [mark for mark in marks if mark in whole]


@pytest.mark.parametrize("removed_first", [False, True])
def test_nothing_is_left_in_the_stores_files(mount, removed_first: bool) -> None:  # type: ignore[no-untyped-def]
    """Promise P17."""
    m = mount("--max-size", "64M")
    marks = fill(m)
    m.umount()
    assert len(found(m.store, marks)) > len(marks) // 2
    if removed_first:  # on the mount: it says what is left, and how to be rid of it
        m.mount()
        done = run_cachefs("rm", "--all", "--yes", m.path)
        assert done.returncode == 0
        assert f"To leave nothing: cachefs umount {m.path} && cachefs rm --all {m.store}" in done.stderr
        m.umount()
        assert found(m.store, marks)
    done = run_cachefs("rm", "--all", "--yes", m.store)
    assert (done.returncode, done.stderr) == (0, "")
    assert found(m.store, marks) == []
    assert not list((m.store / "volumes").iterdir())
    m.mount()
    assert os.listdir(m.path) == ["directory"]
    assert os.listdir(m.path / "directory") == []
    assert m.stats()["disk_bytes"] < 1 << 20
    (m.path / "directory" / "again").write_bytes(state())
    m.remount()
    assert (m.path / "directory" / "again").read_bytes() == state()
