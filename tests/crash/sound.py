"""Whether a store that nobody has mounted is consistent in itself, every byte of it."""

from __future__ import annotations

from pathlib import Path

from cachefs.store.check import check


def complaints(store: Path) -> list[str]:
    """What is wrong in it."""
    return [str(finding) for finding in check(store, deep=True).findings]
