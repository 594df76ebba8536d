"""Payloads on their way into the volumes, where they lie before the index names their blocks."""

import time
from collections.abc import Callable

import lmdb

from cachefs.store.blocks import Fresh
from cachefs.store.errors import StoreFull, is_full
from cachefs.store.layout import PART_BYTES, Budget, footprint
from cachefs.store.records import BlockRow
from cachefs.store.volumes import Volume, Volumes

_ATTEMPTS = 5


class Payloads:
    """Used by the one writer of a store, under its lock."""

    def __init__(self, volumes: Volumes, budget: Budget, purge: Callable[[int], int]) -> None:
        """``purge`` is called with the bytes of room that are wanted."""
        self._volumes = volumes
        self._budget = budget
        self._purge = purge
        self.unnamed: dict[int, BlockRow] = {}
        """Blocks whose payloads were written for an index transaction that is not committed, or failed."""
        self.unnamed_bytes = 0
        """Their footprints, which count in the pool and in the volumes."""

    def put(self, fresh: list[Fresh]) -> list[tuple[int, BlockRow]]:
        """Put payloads into volumes, an entry's blocks side by side where there is room; their rows.

        Raises StoreFull when they do not fit even after every victim has gone, lmdb.Error.
        """
        placed: list[tuple[int, BlockRow]] = []
        todo = fresh
        refused: set[int] = set()
        while todo:
            need = sum(footprint(block.row.stored) for block in todo)
            room = min(self._volumes.free, self._volumes.disk_room())
            if room < need:
                self._purge(need - room)
            volume = self._pick(min(need, self._budget.batch), refused)
            run: list[Fresh] = []
            room = (
                volume.free if volume is not None else max(v.free for v in self._volumes.by_number.values())
            )
            room = min(room, max(self._budget.batch, footprint(todo[0].row.stored)))
            for block in todo:
                room -= footprint(block.row.stored)
                if room < 0:
                    break
                run.append(block)
            try:
                if volume is None or not run:
                    raise lmdb.MapFullError("no room for one block")
                parts = volume.put((block.id, block.payload) for block in run)
            except lmdb.Error as error:
                if not is_full(error, self._volumes.root):
                    raise
                # Enough free pages, but no run of them long enough, or the disk is full and the
                # file cannot grow to have one. Another volume may have one.
                if volume is not None:
                    refused.add(volume.number)
                    if self._volumes.has_room(without=refused):
                        continue
                volume, parts = self._put_in_parts(run or todo[:1])
                run = run or todo[:1]
                refused.clear()
            rows = {b.id: b.row._replace(volume=volume.number, parts=parts[b.id]) for b in run}
            self.unnamed.update(rows)
            self.unnamed_bytes += sum(footprint(row.stored) for row in rows.values())
            hints = volume.locate(parts)
            placed += [(block, row._replace(hint=hints[block])) for block, row in rows.items()]
            todo = todo[len(run) :]
        return placed

    def _pick(self, wish: int, refused: set[int]) -> Volume | None:
        """`Volumes.pick`; None where only those are left that refused: the disk has no room for a new one."""
        try:
            return self._volumes.pick(wish, without=refused)
        except (StoreFull, OSError, lmdb.Error) as error:
            if not refused or not is_full(error, self._volumes.root):
                raise
            return None

    def settle(self) -> None:
        """The index has come to name them all."""
        self.unnamed.clear()
        self.unnamed_bytes = 0

    def _put_in_parts(self, run: list[Fresh]) -> tuple[Volume, dict[int, int]]:
        """Payloads split until they fit between what is stored."""
        for attempt in range(_ATTEMPTS):
            for part_bytes in PART_BYTES:
                for volume in sorted(self._volumes.by_number.values(), key=lambda v: v.free, reverse=True):
                    try:
                        return volume, volume.put(((block.id, block.payload) for block in run), part_bytes)
                    except lmdb.Error as error:
                        if not is_full(error, volume.path):
                            raise
            # Pages freed last stay out of reach while a reader's snapshot is older. Readers are brief.
            time.sleep(0.01 * attempt)
            for volume in self._volumes.by_number.values():
                volume.delete([])
        raise StoreFull("the volumes are full")

    def take_back(self) -> None:
        """Delete the payloads that no index row came to name; their blocks are still in the pool."""
        by_volume: dict[int, list[tuple[int, BlockRow]]] = {}
        for block, row in self.unnamed.items():
            by_volume.setdefault(row.volume, []).append((block, row))
        for number, items in by_volume.items():
            self._volumes.by_number[number].delete(items)
            for block, row in items:
                del self.unnamed[block]
                self.unnamed_bytes -= footprint(row.stored)
