"""A mark that a store was closed in order, so that the next start need not walk its pages.

`pages.require_sound` reads every page of the index: two seconds for a million blocks.
After a crash, for files that changed since they were closed, and once a week, it still
does. What rots in between, unchanged by the filesystem's account, is met by LMDB; if
that ends the process, the start after it walks.
"""

import contextlib
import json
import os
import time
from pathlib import Path

from cachefs.store import pages

_AGE = 7 * 86400
"""Seconds after which pages are walked all the same."""


def _files(store: Path) -> dict[str, list[int]]:
    found = {}
    for place in (store / "index", *sorted((store / "volumes").glob("[0-9]*"))):
        status = (place / "data.mdb").stat()
        found[str(place.relative_to(store))] = [status.st_ino, status.st_size, status.st_mtime_ns]
    return found


def last_walk(store: Path) -> float:
    """When the pages were last walked, seconds since 1970; 0 where they must be walked now."""
    try:
        mark = json.loads((store / "clean").read_text())
        same = mark["files"] == _files(store)
        age = time.time() - mark["walked"]
        return float(mark["walked"]) if same and 0 <= age < _AGE else 0.0
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def require_sound(store: Path) -> float:
    """`pages.require_sound`, where it is needed; when the pages were last walked."""
    walked = last_walk(store)
    if not walked:
        pages.require_sound(store)
        walked = time.time()
    return walked


def mark(store: Path, walked: float) -> None:
    """Note that the store was closed in order; its files must be closed."""
    new = store / "clean.new"
    with contextlib.suppress(OSError):  # then the next start walks
        with open(new, "w", opener=_private) as file:
            json.dump({"walked": walked, "files": _files(store)}, file)
            file.flush()
            os.fsync(file.fileno())
        new.rename(store / "clean")


def forget(store: Path) -> None:
    """Before the first change; a power cut must not bring it back."""
    with contextlib.suppress(FileNotFoundError):
        (store / "clean").unlink()
        directory = os.open(store, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.fsync(directory)
        os.close(directory)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
