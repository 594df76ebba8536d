"""Damaged blocks cost one call, never wrong bytes and never the mount."""

from __future__ import annotations

import errno
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from ..running import eventually, run_cachefs
from ..states import build
from ..store.flipping import Flip, make_template
from .conftest import MountFactory
from .kernel import fails

BOUND = ("--max-size", "100M")


def damage(store: Path, where: bytes, *, times: int = 1) -> None:
    """Flip a bit in the stored bytes that begin so."""
    hits = 0
    for path in sorted(store.glob("volumes/*/data.mdb")):
        data = path.read_bytes()
        at = data.find(where)
        while at >= 0 and hits < times:
            with path.open("r+b") as file:
                file.seek(at + len(where) // 2)
                file.write(bytes([data[at + len(where) // 2] ^ 4]))
            hits += 1
            at = data.find(where, at + 1)
    assert hits


def state(salt: int) -> bytes:
    positions = list(range(1_000))
    return build.ggsq(build.packed(positions), build.kv(positions, width=1024, salt=salt))


def kinds() -> dict[str, bytes]:
    return {"opaque": random.Random(1).randbytes(4_000_000), "state": state(1)}


@pytest.mark.parametrize("kind", ["opaque", "state"])
def test_a_damaged_block_is_an_error_and_no_more(mount: MountFactory, kind: str) -> None:
    """Promise P11."""
    m = mount(*BOUND)
    m.expect_errors()
    data, sound = kinds()[kind], random.Random(2).randbytes(2_000_000)
    (m.path / "bad").write_bytes(data)
    (m.path / "sound").write_bytes(sound)
    m.umount()
    damage(m.store, data[2_000_000:2_000_064])
    m.mount()
    with fails(errno.EIO):
        (m.path / "bad").read_bytes()
    # What lies in other blocks can still be read, here and elsewhere.
    with (m.path / "bad").open("rb", buffering=0) as file:
        assert file.read(100_000) == data[:100_000]
        file.seek(2_000_000)
        with fails(errno.EIO):
            file.read(64)
        file.seek(3_900_000)
        assert file.read(4096) == data[3_900_000:3_904_096]
    assert (m.path / "sound").read_bytes() == sound
    assert eventually(lambda: (m.path / "t").touch() or m.stats()["corrupt_blocks"] == 1)
    # Saved again it is whole again: the damaged block is not shared with.
    (m.path / "bad").unlink()
    (m.path / "again").write_bytes(data)
    m.remount()
    assert (m.path / "again").read_bytes() == data


def test_rows_of_a_damaged_block_are_not_borrowed(mount: MountFactory) -> None:
    """A save must not come to depend on bytes that cannot be read back."""
    m = mount(*BOUND)
    m.expect_errors()
    positions = list(range(1_000))

    def chat(branch: int) -> bytes:
        keys = [p if p < 900 else p + branch * 10_000 for p in positions]
        return build.ggsq(build.packed(positions), build.kv(positions, width=1024, keys=keys, layers=1))

    one, other = chat(1), chat(2)
    (m.path / "one").write_bytes(one)
    m.umount()
    last_group = one.find(build.rows(0, [10_999], 1024).tobytes())  # K of the last cell of `one`
    assert last_group > 0
    damage(m.store, one[last_group : last_group + 64])
    m.mount()
    (m.path / "other").write_bytes(other)
    m.remount()
    assert (m.path / "other").read_bytes() == other
    with fails(errno.EIO):
        (m.path / "one").read_bytes()


@pytest.mark.parametrize(
    ("first", "flips"), [(0, 2), (2, 2), pytest.param(100, 60, marks=[pytest.mark.soak])]
)
def test_flipped_bits_through_a_mount(mount: MountFactory, tmp_path: Path, first: int, flips: int) -> None:
    """Each is refused at the mount, an error where it lies, or nothing; never other bytes, never the end."""
    files = make_template(tmp_path / "template")
    store = tmp_path / "store"
    shutil.copytree(tmp_path / "template", store)
    m = mount(*BOUND, store=store)
    m.expect_errors()
    seen: Counter[str] = Counter()
    for seed in range(first, first + flips):
        m.umount()
        shutil.rmtree(store)
        shutil.copytree(tmp_path / "template", store)
        Flip.choose(tmp_path / "template", seed).apply(store)
        done = run_cachefs("mount", *BOUND, store, m.path)
        if done.returncode:
            assert "check --deep --repair" in done.stderr
            assert done.stderr.count("\n") == 1
            seen["refused"] += 1
            continue
        whole = 0
        for name, data in files.items():
            try:
                assert (m.path / name).read_bytes() == data
                whole += 1
            except OSError as error:
                assert error.errno in (errno.EIO, errno.ENOENT)  # noqa: PT017
        (m.path / "new").write_bytes(random.Random(seed).randbytes(300_000))
        assert (m.path / "new").read_bytes() == random.Random(seed).randbytes(300_000)
        seen["whole" if whole == len(files) else "EIO"] += 1
        assert "Traceback" not in m.log()
    if flips > 10:
        print(dict(seen))
