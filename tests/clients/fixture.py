"""What the `mount` fixture gives, for type hints, and what several tests ask of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest


class Mount(Protocol):
    path: Path
    store: Path
    plain: bool

    def stats(self) -> dict[str, Any] | None: ...
    def umount(self) -> None: ...
    def remount(self, *options: str) -> None: ...
    def kill(self) -> None: ...


MountFactory = Callable[..., Mount]


def stats(mount: Mount) -> dict[str, Any]:
    """The mount's figures; the test is over where there are none."""
    figures = mount.stats()
    if figures is None:
        pytest.skip("a plain directory has no figures")
    return figures


def names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}
