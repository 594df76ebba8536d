"""Real mounts for tests: always taken away again, and their logs looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .running import Mounted


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Mounted]]:
    """``mount(*options, store=None)`` mounts a new store (or that one) at a new directory."""
    mounted: list[Mounted] = []

    def make(*options: str, store: Path | None = None) -> Mounted:
        number = len(mounted) or ""
        path = tmp_path / f"mnt{number}"
        path.mkdir()
        new = Mounted(store or tmp_path / f"store{number}", path)
        mounted.append(new)
        return new.mount(*options)

    yield make
    wrong = [f"{each.path}: {problem}" for each in mounted for problem in each.clean_up()]
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)
