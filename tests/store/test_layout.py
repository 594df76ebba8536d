"""How space is counted and shared out: never less than LMDB really takes."""

from __future__ import annotations

from pathlib import Path

import lmdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.sizes import GIB, MIB, MIN_MAX_BYTES
from cachefs.store.layout import PAGE, PART_BYTES, SPARE, Budget, footprint
from cachefs.store.records import VolumeRow
from cachefs.store.volumes import Volume

from .filling import noise

SIZES = [1, 65, 500, 1900, 2000, 2001, 2030, 2040, 2100, 4079, 4080, 4081, 8176, 8177, 65536, 131072, 262144]


def pages_used(volume: Volume) -> int:
    """Bytes of a volume in live pages."""
    with volume.env.begin() as txn:
        stats = [txn.stat(db) for db in (volume.db, volume.parts)]
    return sum(PAGE * (s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"]) for s in stats)


@pytest.mark.parametrize("size", SIZES)
def test_footprint_covers_what_lmdb_takes(tmp_path: Path, size: int) -> None:
    """Live pages stay within the footprints and the keys' leaf pages, which the headroom covers."""
    volume = Volume(1, tmp_path / "v", VolumeRow(64 * MIB, 0, 0))
    try:
        count = min(2000, 16 * MIB // size)
        data = noise(size)
        for start in range(0, count, 100):
            volume.put((block + 1, data) for block in range(start, min(count, start + 100)))
        assert volume.used == count * footprint(size)
        assert pages_used(volume) <= volume.used + count * 64 + 4 * PAGE
        if size > 2040:
            assert pages_used(volume) >= volume.used
    finally:
        volume.close()


def test_values_of_one_payload_page_run(tmp_path: Path) -> None:
    """A part fills its pages to the byte."""
    volume = Volume(1, tmp_path / "v", VolumeRow(64 * MIB, 0, 0))
    try:
        for number, part in enumerate(PART_BYTES, 1):
            before = pages_used(volume)
            assert volume.put([(number, noise(64 * part))], part) == {number: 64}
            assert pages_used(volume) - before <= 64 * (part + 16) + 3 * PAGE
    finally:
        volume.close()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(MIN_MAX_BYTES, 20_000 * GIB))
def test_maps_add_up_to_the_maximum_at_most(max_bytes: int) -> None:
    budget = Budget.of(max_bytes)
    assert budget.index + budget.data + SPARE <= max_bytes
    assert 0 < budget.volume <= budget.data
    assert 0 < budget.batch <= budget.volume // 4
    assert budget.volume % PAGE == 0


def test_lmdb_never_writes_past_its_map(tmp_path: Path) -> None:
    volume = Volume(1, tmp_path / "v", VolumeRow(8 * MIB, 0, 0))
    try:
        data = noise(100_000)
        for block in range(1, 60):
            volume.put([(block, data)])
        with pytest.raises(lmdb.MapFullError):
            volume.put((block, data) for block in range(100, 200))
        assert volume.disk_bytes() <= 8 * MIB
        assert volume.used == 59 * footprint(100_000), "what was refused is not counted"
    finally:
        volume.close()
