"""Reading a store beside its daemon, or without one: figures and entries, as last committed."""

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import lmdb
import numpy as np
import numpy.typing as npt

from cachefs import __version__
from cachefs.store import clean, home
from cachefs.store.errors import Damaged, StoreRefused
from cachefs.store.index import Index
from cachefs.store.recipe import Recipe
from cachefs.store.records import Dirent, Inode, Refs, int_key, int_of, of_be
from cachefs.store.tree import ROOT, Tree
from cachefs.store.writer import COUNTERS


@dataclass(frozen=True, slots=True)
class Entry:
    """One file. Sizes in bytes: ``exclusive`` lies in blocks that only it needs, ``shared`` in the others.

    ``tokens``, ``cells``, ``layers`` and ``type`` are None unless it was recognised as a KV state.
    ``last_use`` in ns since 1970.
    """

    name: str
    tokens: int | None
    cells: int | None
    layers: int | None
    type: str | None
    size: int
    exclusive: int
    shared: int
    last_use: int
    pinned: bool


class Reader:
    """A store opened for reading only. Raises UserError if it cannot be."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        home.check_format(self.path)
        with home.unused(self.path) as alone:
            if alone:  # its daemon would have looked
                clean.require_sound(self.path)
        try:
            self._index = Index(self.path / "index", None)
        except (lmdb.Error, OSError) as error:
            if not os.access(self.path, os.R_OK | os.X_OK):
                raise StoreRefused(f"{path}: belongs to another user; run as its owner") from None
            raise StoreRefused(f"{path}: cannot be read: {error}") from None
        self._tree = Tree(self._index)
        self.unreadable: list[str] = []
        """Names that `entries` met and could not yield: their rows in the index are damaged."""

    def close(self) -> None:
        self._index.close()

    def _meta(self, key: bytes) -> Any:
        value = self._index.committed("meta", key)
        try:
            return json.loads(value) if value else None
        except ValueError:
            raise StoreRefused(
                f"{self.path}: the index is damaged; 'cachefs check --deep --repair' mends it, unmounted"
            ) from None

    def stats(self) -> dict[str, Any]:
        """The figures of ``cachefs stats --json``; ``mountpoint`` is left to the caller."""
        counters = self._meta(b"counters") or {}
        figures: dict[str, Any] = {
            "version": __version__,
            "mountpoint": None,
            "store": str(self.path),
            "max_bytes": self._meta(b"max_bytes") or 0,
            "disk_bytes": home.disk_bytes(self.path),
        }
        figures |= {name: counters.get(name, 0) for name in COUNTERS}
        ended = (self._meta(b"scrub") or {}).get("ended", 0)
        figures["last_scrub_ns"] = int(ended * 1e9) or None
        figures["damaged"] = self.damaged()
        figures["dedup_ratio"] = _ratio(figures["logical_bytes"], figures["stored_bytes"])
        figures["compression_ratio"] = _ratio(figures["stored_bytes"], figures["compressed_bytes"])
        return figures

    def entries(self) -> Iterator[Entry]:
        """Every file, directory by directory; those whose rows are damaged go into `unreadable`."""
        for name, key, dirent in self._walk():
            try:
                entry = self._found(name, key, dirent)
            except (OSError, Damaged):
                self.unreadable.append(name)
                continue
            if entry is not None:
                yield entry

    def _found(self, name: str, key: bytes, dirent: Dirent | None) -> Entry | None:
        """The file that a dirent leads to; None if it is gone. Raises OSError or Damaged.

        The daemon may have removed or replaced it since the names were read.
        """
        while True:
            try:
                if dirent is None:
                    raise Damaged("a row of dirents in the index is damaged")
                inode = self._tree.get(dirent.ino)
                return self._entry(name, dirent.ino, inode) if stat.S_ISREG(inode.mode) else None
            except (OSError, Damaged):
                value = self._index.committed("dirents", key) if dirent is not None else None
                now = Dirent.unpack(value) if value is not None else None
                if now == dirent:
                    raise
                if now is None:
                    return None
                dirent = now

    def _walk(self) -> Iterator[tuple[str, bytes, Dirent | None]]:
        """(path, key, dirent) of everything but directories; None where the dirent is damaged.

        By the names themselves rather than by their order, as `Tree.walk` goes: a damaged
        row there would hide those that follow.
        """
        children: dict[int, list[tuple[bytes, bytes, Dirent | None]]] = {}
        with self._index.snapshot() as txn:
            rows = cast(Iterator[tuple[bytes, bytes]], txn.cursor(self._index.dbs["dirents"]))
            for key, value in rows:
                try:
                    dirent = Dirent.unpack(self._index.from_disk("dirents", key, value))
                except (OSError, Damaged):
                    dirent = None
                children.setdefault(of_be(key[:8]), []).append((key[8:], key, dirent))
        directories = [(ROOT, b"")]
        while directories:
            parent, prefix = directories.pop()
            for name, key, dirent in children.pop(parent, ()):
                if dirent is not None and dirent.kind == stat.S_IFDIR:
                    directories.append((dirent.ino, prefix + name + b"/"))
                else:
                    yield os.fsdecode(prefix + name), key, dirent
        for lost in children.values():  # below a directory whose name is damaged
            yield from ((os.fsdecode(name), key, None) for name, key, _ in lost)

    def damaged(self) -> list[str]:
        """Files that name a block in quarantine, and so cannot be read in full."""
        if "damaged" not in self._index.dbs:
            return []
        with self._index.snapshot() as txn:
            keys = txn.cursor(self._index.dbs["damaged"]).iternext(values=False)
            blocks = np.array([int_of(key) for key in keys], np.uint64)
        if not len(blocks):
            return []
        return sorted(name for name, _, dirent in self._walk() if dirent and self._names(dirent.ino, blocks))

    def _names(self, ino: int, blocks: npt.NDArray[np.uint64]) -> bool:
        try:
            return bool(np.isin(self._tree.recipe(ino).blocks()[0], blocks).any())
        except OSError:  # its recipe is damaged
            return True

    def _entry(self, name: str, ino: int, inode: Inode) -> Entry:
        about = json.loads(self._tree.about(ino) or b"{}")
        exclusive = self._exclusive(self._tree.recipe(ino))
        return Entry(
            name,
            about.get("tokens"),
            about.get("cells"),
            about.get("layers"),
            ", ".join(about.get("types") or ()) or None,
            inode.size,
            exclusive,
            inode.size - exclusive,
            inode.last_use,
            ino in self._tree.pinned,
        )

    def _exclusive(self, recipe: Recipe) -> int:
        """Bytes of the file in blocks that no other file names."""
        ids, counts = recipe.blocks()
        mine = set()
        with self._index.env.begin(db=self._index.dbs["refs"]) as txn:
            for block, count in zip(ids.tolist(), counts.tolist(), strict=True):
                value = txn.get(int_key(block))
                if value and Refs.unpack(value).number == count:
                    mine.add(block)
        return recipe.bytes_in(mine)


def _ratio(one: int, other: int) -> float:
    return round(one / other, 4) if other else 1.0
