"""Stores for tests, closed at their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachefs.store import Store

from .filling import SMALL, in_memory

Opener = Callable[..., Store]


@contextmanager
def _opener(path: Path) -> Iterator[Opener]:
    current: list[Store] = []

    def close() -> None:
        while current:
            current.pop().close()

    def reopen(max_bytes: int | None = None) -> Store:
        close()
        store = Store.open(path, max_bytes)
        current.append(store)
        return store

    yield reopen
    close()


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with in_memory() as place:
        yield Path(place)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """``opened(max_bytes)`` opens the test's store, closing it first where it is open."""
    with _opener(tmp_path / "store") as reopen:
        yield reopen


@pytest.fixture
def store(opened: Opener) -> Store:
    """A new, small store."""
    return opened(SMALL)
