"""SIGKILL to the daemon while clients write: nothing synced is lost, nothing is torn."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..running import Mounted
from .harness import Rounds

BOUND = ("--max-size", "1G")

pytestmark = pytest.mark.crash


@pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_kills_under_load(mount: Callable[..., Mounted], rounds: int) -> None:
    """Promise P1. Promise P4. Promise P5."""
    m = mount(*BOUND)
    crashes = Rounds(m, BOUND, m.kill)
    for seed in range(1, rounds + 1):
        crashes.run(seed, (0.1, 1.0 if rounds < 100 else 2.5))
    assert crashes.syncs >= 10 * rounds
    figures = m.stats()
    assert figures["corrupt_blocks"] == 0
    assert figures["evicted_entries"] == 0
