"""With CACHEFS_PLAIN=1 the clients run on a plain directory, which shows that they ask for nothing odd."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class PlainDirectory:
    """Stands in for a mount: the same names, nothing behind them."""

    path: Path
    store: Path
    plain: bool = True

    def stats(self) -> None:
        return None

    def umount(self) -> None:
        pass

    def remount(self, *options: str) -> None:
        pass

    def kill(self) -> None:
        pass


if os.environ.get("CACHEFS_PLAIN"):

    @pytest.fixture
    def mount(tmp_path: Path) -> Callable[..., PlainDirectory]:
        def make(*options: str) -> PlainDirectory:
            for name in ("mnt", "store"):
                (tmp_path / name).mkdir()
            return PlainDirectory(tmp_path / "mnt", tmp_path / "store")

        return make
