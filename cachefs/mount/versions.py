"""Versions of a file: the one being written, what is kept of the one before, whether the new one is whole."""

import json
from dataclasses import dataclass
from typing import Any

from cachefs.mount.stream import Stream
from cachefs.store import Store
from cachefs.store.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Version:
    """A file's content as the tree has it."""

    recipe: Recipe
    row_bytes: int
    about: bytes | None
    mtime: int


class Draft:
    """The version of an inode that is being written, as far as it is placed; at first the tree's."""

    def __init__(self, store: Store, ino: int) -> None:
        self._store = store
        self._ino = ino
        self.recipe = store.tree.recipe(ino)
        self.row_bytes = store.tree.get(ino).row_bytes
        self.about = store.tree.about(ino)
        self.holds: list[int] = []
        """Blocks that must stay until the tree's version of this is committed."""

    @property
    def is_in_order(self) -> bool:
        """Whether a state was written in order."""
        return bool(json.loads(self.about or b"{}").get("in_order", True))

    def collect(self, stream: Stream) -> None:
        """Append what ``stream`` has placed since the last time."""
        self.recipe = self.recipe.append(stream.take())
        self.holds += stream.take_holds()

    def describe(self, stream: Stream, *, in_order: bool = True) -> None:
        """Keep what ``stream``, which began at the file's first byte, found it to be."""
        self.row_bytes, self.about = stream.row_bytes, about(stream, in_order=in_order)

    def empty(self) -> None:
        self.recipe, self.row_bytes, self.about = Recipe(), 0, None

    def go_back(self, base: Version) -> None:
        self.recipe, self.row_bytes, self.about = base.recipe, base.row_bytes, base.about

    def to_tree(self, current: Recipe, mtime: int, ctime: int) -> None:
        """Make ``current``, the recipe and what its stream still holds back, the tree's version."""
        tree = self._store.tree
        tree.set_content(self._ino, current, self.row_bytes, self.about)
        tree.change(self._ino, mtime=mtime, ctime=max(ctime, tree.get(self._ino).ctime))
        tree.touch(self._ino)
        self._store.index.active.holds.append(self.take_holds())

    def take_holds(self) -> list[int]:
        holds, self.holds = self.holds, []
        return holds


def is_torn(stream: Stream | None, base: Version | None, size: int) -> bool:
    """Whether a save over ``base`` ended before its state did, as far as headers and ``base`` tell.

    ``stream`` is None if nothing came in order, ``size`` the bytes of the file. Over a
    state, a beginning too short to be recognised is torn, too.

    A state may have fewer V sections than layers, so one cut exactly between two
    sections looks whole by itself; the old version of the same shape knows better.
    """
    unknown = not size or (stream is not None and not stream.start and not stream.report.container)
    if unknown and base is not None and base.about is not None:
        return True
    if stream is None:
        return False
    if stream.torn or stream.start or base is None:
        return stream.torn
    old, new = json.loads(base.about or b"{}"), _summary(stream)
    alike = all(old.get(name) == new[name] for name in ("container", "version", "layers", "types"))
    return alike and int(new["sections"]) < int(old.get("sections", 0))


def about(stream: Stream, *, in_order: bool = True) -> bytes | None:
    """What the tree keeps of a recognised state, as JSON."""
    if not stream.row_bytes and not stream.report.container:
        return None
    return json.dumps({**_summary(stream), "in_order": in_order}).encode()


def _summary(stream: Stream) -> dict[str, Any]:
    report = stream.report
    return {
        "container": report.container,
        "version": report.version,
        "architecture": report.architecture,
        "tokens": report.tokens,
        "cells": report.cells,
        "layers": report.layers,
        "types": report.types,
        "sections": report.dropped + sum(len(module.sections) for module in report.modules),
    }
