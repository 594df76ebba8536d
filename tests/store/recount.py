"""A count of everything in an open store from scratch, by the code of ``cachefs check``.

``assert_exact(store)`` after a commit holds for every store at any time, also after a crash and a reopen.
"""

from __future__ import annotations

from cachefs.store import Store
from cachefs.store.check import check_open


def assert_exact(store: Store, *, interrupted: bool = False) -> None:
    """What is committed agrees with a count from scratch.

    ``interrupted``: a purge was, so that victims may lie there without their payload.
    """
    report = check_open(store.index, store.volumes, settled=not interrupted)
    known = "damaged block"  # in quarantine, and accounted for as that
    assert [str(each) for each in report.findings if known not in each.text] == []


def assert_nothing_leaks(store: Store) -> None:
    """Nothing is accounted for anybody any more. Holds when no file is open and all is committed."""
    blocks = store.blocks
    assert store.queued == 0
    assert not blocks.held
    assert blocks.revived == {}
    assert blocks.revived_bytes == 0
    assert not blocks.dying
    pool = blocks.pool
    assert not pool.by_id
    assert not pool.digests
    assert not pool.heads
    assert not pool.tails
    assert pool.footprint == 0
