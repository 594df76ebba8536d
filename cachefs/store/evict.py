"""Which files go when space is needed: whole units, the least recently used first.

A *unit* is a data file with its sidecars, the files of the same directory whose
names extend its name by a dot: ``X.bin`` and ``X.bin.meta``, ``NAME`` and
``NAME.checkpoints``. It goes whole or not at all, and its last use is the latest
of its members'.

Never evicted: open files, pinned units, locks, and temporary files that were
used within the last hour.
"""

import re
import stat
import time
from collections.abc import Callable
from typing import NamedTuple

from cachefs.store.records import Inode, be, of_be
from cachefs.store.tree import Tree

_TEMPORARY = re.compile(rb"[._]tmp(\.|$)|_tmp\.")
_LOCK = re.compile(rb"\.(lock|owner)$")
_TEMPORARY_LIFE = 3600 * 1_000_000_000
_END = b"\xff" * 17
_UNITS = 256
"""Most units chosen at a time: the event loop waits, and the next look may find enough gone."""


class Member(NamedTuple):
    parent: int
    name: bytes
    ino: int
    inode: Inode


def is_temporary(name: bytes) -> bool:
    return _TEMPORARY.search(name) is not None


def is_lock(name: bytes) -> bool:
    return _LOCK.search(name) is not None


class Evictor:
    """Finds units to evict. ``busy`` says whether an inode is open."""

    def __init__(self, tree: Tree, busy: Callable[[int], bool]) -> None:
        self._tree = tree
        self._busy = busy

    def unit(self, parent: int, name: bytes) -> list[Member]:
        """The members of the unit that a file belongs to; the file alone if it is temporary or a lock."""
        if is_temporary(name) or is_lock(name):
            names = [name]
        else:
            stem = name
            for i, byte in enumerate(name):
                if byte == 0x2E and i and self._is_file(parent, name[:i]):
                    stem = name[:i]
                    break
            start, stop = be(parent) + stem + b".", be(parent) + stem + b"/"
            names = [key[8:] for key, _ in self._tree.index.scan("dirents", start, stop)]
            names = [stem, *(n for n in names if not is_temporary(n) and not is_lock(n))]
        members = []
        for each in names:
            dirent = self._tree.lookup(parent, each)
            if dirent is not None and dirent.kind == stat.S_IFREG:
                members.append(Member(parent, each, dirent.ino, self._tree.get(dirent.ino)))
        return members

    def _is_file(self, parent: int, name: bytes) -> bool:
        dirent = self._tree.lookup(parent, name)
        return dirent is not None and dirent.kind == stat.S_IFREG

    def choose(self, wanted: int, *, empty: bool = False) -> list[list[Member]]:
        """Units of ``wanted`` logical bytes or a little more, oldest use first; none if none may go.

        Where many are small there are less than ``wanted``. ``empty``: units of no bytes will do.
        """
        chosen: list[list[Member]] = []
        seen: set[int] = set()
        turns: dict[int, int] = {}  # of members met before the one used last: looked up once a unit
        total = 0
        for key, _ in self._tree.index.scan("uses", b"", _END):
            when, ino = of_be(key[:8]), of_be(key[8:])
            if ino in seen or turns.get(ino, 0) > when:
                continue
            try:
                inode = self._tree.get(ino)
                members = self.unit(inode.parent, self._tree.name_of(inode))
            except OSError:
                continue  # its row is damaged
            turn = max((m.inode.last_use for m in members), default=0)
            if turn > when:
                turns.update((m.ino, turn) for m in members)
                continue  # its turn comes with the member used last
            seen.update(m.ino for m in members)
            if not members or not all(self._may_go(m) for m in members):
                continue
            chosen.append(members)
            total += sum(m.inode.size for m in members)
            if total >= wanted or (len(chosen) >= _UNITS and (total or empty)):
                break
        return chosen if total or empty else []

    def _may_go(self, member: Member) -> bool:
        if self._busy(member.ino) or member.ino in self._tree.pinned or is_lock(member.name):
            return False
        recent = member.inode.last_use > time.time_ns() - _TEMPORARY_LIFE
        return not (is_temporary(member.name) and recent)

    def evict(self, unit: list[Member]) -> int:
        """Unlink a unit's files; their logical bytes. The blocks become victims with the next commit."""
        size = sum(m.inode.size for m in unit)
        for member in unit:
            self._tree.unlink(member.parent, member.name)
            self._tree.release_orphan(member.ino)
        counters = self._tree.index.active.counters
        counters["evicted_entries"] += len(unit)
        counters["evicted_bytes"] += size
        return size
