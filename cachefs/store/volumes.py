"""The data volumes: LMDB environments that hold payloads by block id, and nothing else.

Each is small (at most 4 GiB), so its list of free pages stays short whatever the
store's size, and one can be emptied, dropped or rewritten alone.

All writing happens under the store's write lock; reading may happen anywhere.
"""

import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

import lmdb

from cachefs.store.errors import StoreFull
from cachefs.store.layout import HEADROOM, Budget, footprint
from cachefs.store.records import VolumeRow, int_key, int_of


class Volume:
    """One environment. ``used`` counts footprints in bytes, ``blocks`` payloads."""

    def __init__(self, number: int, path: Path, row: VolumeRow) -> None:
        self.number = number
        self.path = path
        self.map_bytes = row.map_bytes
        self.used = row.used
        self.blocks = row.blocks
        self.capacity = int(row.map_bytes * (1 - HEADROOM))
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.env = lmdb.open(
            str(path), map_size=row.map_bytes, max_dbs=1, max_readers=512, mode=0o600, meminit=False
        )
        self.db = self.env.open_db(b"payloads", integerkey=True)

    @property
    def free(self) -> int:
        return max(0, self.capacity - self.used)

    @property
    def row(self) -> VolumeRow:
        return VolumeRow(self.map_bytes, self.used, self.blocks)

    def disk_bytes(self) -> int:
        return (self.path / "data.mdb").stat().st_size

    def put(self, payloads: Iterable[tuple[int, bytes]]) -> int:
        """Write payloads in one durable transaction; the footprint they took, in bytes.

        Raises lmdb.MapFullError when no run of free pages is long enough; then
        nothing was written.
        """
        taken = count = 0
        with self.env.begin(db=self.db, write=True) as txn:
            cursor = txn.cursor()
            last = int_of(cursor.key()) if cursor.last() else -1
            for block, payload in payloads:
                txn.put(int_key(block), payload, append=block > last)
                last = max(last, block)
                taken += footprint(len(payload))
                count += 1
        self.used += taken
        self.blocks += count
        return taken

    def delete(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Delete (id, stored bytes) in one transaction; ids that are not there are passed over.

        LMDB hands pages out again from the second transaction after the one that
        freed them, hence the empty one at the end.
        """
        with self.env.begin(db=self.db, write=True) as txn:
            for block, stored in blocks:
                txn.delete(int_key(block))
                self.used = max(0, self.used - footprint(stored))
                self.blocks = max(0, self.blocks - 1)
        with self.env.begin(db=self.db, write=True) as txn:
            txn.put(int_key(0), b"")

    def ids(self) -> list[int]:
        with self.env.begin(db=self.db) as txn:
            return [n for n in map(int_of, txn.cursor().iternext(values=False)) if n]

    def close(self) -> None:
        self.env.close()


class Volumes:
    """All volumes of a store, their map sizes together within the budget."""

    def __init__(self, root: Path, budget: Budget, rows: dict[int, VolumeRow]) -> None:
        self.root = root
        self.budget = budget
        self.by_number: dict[int, Volume] = {}
        for number, row in sorted(rows.items()):
            self.by_number[number] = Volume(number, self._path(number), row)

    def _path(self, number: int) -> Path:
        return self.root / f"{number:04d}"

    def _mapped(self) -> int:
        return sum(v.map_bytes for v in self.by_number.values())

    def _unborn(self) -> list[int]:
        """Map sizes of the volumes that may still be made."""
        left = self.budget.data - self._mapped()
        sizes = []
        while left >= min(self.budget.volume, 8 << 20):
            sizes.append(min(left, self.budget.volume))
            left -= sizes[-1]
        return sizes

    @property
    def free(self) -> int:
        """Bytes that can be written now without deleting anything."""
        return sum(v.free for v in self.by_number.values()) + self._unborn_capacity()

    @property
    def capacity(self) -> int:
        return sum(v.capacity for v in self.by_number.values()) + self._unborn_capacity()

    def _unborn_capacity(self) -> int:
        return sum(int(size * (1 - HEADROOM)) for size in self._unborn())

    def has_room(self, without: set[int]) -> bool:
        """Whether a volume beside these has room, or a new one can be made."""
        return bool(self._unborn()) or any(
            v.free > 0 for v in self.by_number.values() if v.number not in without
        )

    def pick(self, wish: int, without: Collection[int] = ()) -> Volume:
        """The volume to write next: the one with the most room, or a new one if none has ``wish`` bytes.

        Raises StoreFull when there is no room at all.
        """
        best = max(
            (v for v in self.by_number.values() if v.number not in without), key=lambda v: v.free, default=None
        )
        if best is None or best.free < wish:
            unborn = self._unborn()
            if unborn:
                number = max(self.by_number, default=0) + 1
                volume = Volume(number, self._path(number), VolumeRow(unborn[0], 0, 0))
                self.by_number[number] = volume
                return volume
        if best is None or best.free <= 0:
            raise StoreFull
        return best

    def drop(self, number: int) -> None:
        """Remove an empty volume and give its space back to the disk."""
        volume = self.by_number.pop(number)
        volume.close()
        shutil.rmtree(volume.path)

    def close(self) -> None:
        for volume in self.by_number.values():
            volume.close()
