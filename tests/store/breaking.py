"""Writing that fails or ends half-way, and the start after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cachefs.store import Store
from cachefs.store.records import BlockRow, int_key


class Broken(Exception):
    """Stands for the process ending here."""


@contextmanager
def failing(store: Store, method: str, error: Exception) -> Iterator[None]:
    """One step of writing fails: `_meta` is the last within the index transaction."""
    original = getattr(store.writer, method)

    def fail(*arguments: Any) -> None:
        raise error

    setattr(store.writer, method, fail)
    try:
        yield
    finally:
        setattr(store.writer, method, original)


def set_hint(store: Store, block: int, hint: int) -> None:
    """Have the index say that a payload lies at ``hint`` (0: it does not know)."""
    with store.index.env.begin(write=True, db=store.index.dbs["blocks"]) as txn:
        row = BlockRow.unpack(txn.get(int_key(block)))._replace(hint=hint)
        txn.put(int_key(block), row.pack())


def crash(store: Store, path: Path, between: Callable[[Path], None] | None = None) -> Store:
    """The store as the next process finds it: nothing pending was written. ``between``: done before it."""
    store._writing.shutdown()
    store.volumes.close()
    store.index.close()
    store._lock.release()
    if between is not None:
        between(path)
    return Store.open(path)
