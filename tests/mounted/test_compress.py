"""``--compress``: what was compressed one way is read under any other, and shared with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..running import Mounted, eventually
from ..store.test_codec import numbers

DATA = numbers("f2", 500_000) + numbers("f4", 100_000)


def ratio(m: Mounted) -> float:
    return float(m.stats()["compression_ratio"])


def test_always_and_back(mount: Callable[..., Mounted]) -> None:
    m = mount("--max-size", "200M", "--compress", "always:3")
    (m.path / "a").write_bytes(DATA)
    assert (m.path / "a").read_bytes() == DATA
    m.remount("-o", "compress=off")
    assert ratio(m) > 1.1
    assert (m.path / "a").read_bytes() == DATA
    (m.path / "b").write_bytes(DATA)
    m.remount()
    assert m.stats()["new_block_bytes"] == m.stats()["stored_bytes"] == len(DATA)
    assert (m.path / "b").read_bytes() == DATA


@pytest.mark.soak
def test_idle(mount: Callable[..., Mounted]) -> None:
    """By default, half a minute after the last client."""
    m = mount("--max-size", "200M")
    (m.path / "a").write_bytes(DATA)
    assert eventually(lambda: ratio(m) > 1.1, 90)
    assert (m.path / "a").read_bytes() == DATA
    m.kill()
    m.mount()
    assert (m.path / "a").read_bytes() == DATA
    assert m.stats()["corrupt_blocks"] == 0
