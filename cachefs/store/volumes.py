"""The data volumes: LMDB environments that hold payloads by block id, and nothing else.

Each is small (at most 4 GiB), so its list of free pages stays short whatever the
store's size, and one can be emptied, dropped or rewritten alone.

All writing happens under the store's write lock; reading may happen anywhere.
"""

import logging
import mmap
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import lmdb
import numpy as np

from cachefs.states.pieces import Buffer
from cachefs.store.errors import StoreFull, is_full
from cachefs.store.layout import HEADROOM, MIN_VOLUME, Budget, footprint
from cachefs.store.overflow import may_free, may_free_at
from cachefs.store.records import BlockRow, VolumeRow, be, int_key, int_of
from cachefs.store.resident import fault_in

log = logging.getLogger("cachefs.volumes")

_MAX_PARTS = 1 << 16
_HINT_FROM = mmap.PAGESIZE
"""Shorter payloads may lie in a leaf page, which moves whenever it is changed."""


def part_key(block: int, part: int) -> bytes:
    """Key of a part of a payload; block 0, which does not exist, is the journal of `replace`."""
    return be(block) + part.to_bytes(4, "big")


class Volume:
    """One environment. ``used`` counts footprints in bytes, ``blocks`` payloads."""

    def __init__(self, number: int, path: Path, row: VolumeRow, *, readonly: bool = False) -> None:
        self.number = number
        self.path = path
        self.map_bytes = row.map_bytes
        self.used = row.used
        self.blocks = row.blocks
        self.capacity = int(row.map_bytes * (1 - HEADROOM))
        self._readonly = readonly
        if not readonly:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.open()
        self._file = os.open(path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)

    def open(self) -> None:
        """Open the environment, which must not be open."""
        make = not self._readonly
        self.env = lmdb.open(
            str(self.path), map_size=self.map_bytes, max_dbs=2, max_readers=512, mode=0o600, meminit=False,
            readonly=not make, create=make,
        )  # fmt: skip
        self.db = self.env.open_db(b"payloads", integerkey=True, create=make)
        self.parts = self.env.open_db(b"parts", create=make)
        self._base = _map_base(self.path / "data.mdb")

    @property
    def free(self) -> int:
        return max(0, self.capacity - self.used)

    @property
    def row(self) -> VolumeRow:
        return VolumeRow(self.map_bytes, self.used, self.blocks)

    def disk_bytes(self) -> int:
        return (self.path / "data.mdb").stat().st_size

    def put(self, payloads: Iterable[tuple[int, Buffer]], part_bytes: int = 0) -> dict[int, int]:
        """Write payloads in one durable transaction; block id → parts (0 for a whole payload).

        ``part_bytes``: split payloads longer than this. Raises lmdb.MapFullError when
        no run of free pages is long enough; then nothing was written.
        """
        taken = 0
        parts: dict[int, int] = {}
        with self.env.begin(db=self.db, write=True) as txn:
            cursor = txn.cursor()
            last = int_of(cursor.key()) if cursor.last() else -1
            for block, payload in payloads:
                count = -(-len(payload) // part_bytes) if part_bytes and len(payload) > part_bytes else 0
                view = memoryview(payload)
                for i in range(count):
                    txn.put(part_key(block, i), view[i * part_bytes : (i + 1) * part_bytes], db=self.parts)
                txn.put(int_key(block), b"" if count else payload, append=block > last)
                last = max(last, block)
                taken += footprint(len(payload))
                parts[block] = count
        self.used += taken
        self.blocks += len(parts)
        return parts

    def get(self, txn: lmdb.Transaction, block: int, parts: int) -> Buffer | None:
        """A payload as it lies in ``txn``, a read transaction of this volume."""
        found: Buffer | None = txn.get(int_key(block))
        if found is None or not parts:
            return found
        if parts == 1:
            only: Buffer | None = txn.get(part_key(block, 0), db=self.parts)
            return only
        pieces = [txn.get(part_key(block, i), db=self.parts) for i in range(parts)]
        whole = [piece for piece in pieces if piece is not None]
        return b"".join(whole) if len(whole) == parts else None

    # -- reading past LMDB: a payload in pages of its own stays where it is as long as it lives

    def locate(self, parts: dict[int, int]) -> dict[int, int]:
        """Where payloads lie in the volume's file, in bytes from its start; 0 where that may change.

        ``parts``: into how many each was split. Those of several lie in as many places.
        """
        found: dict[int, int] = {}
        with self.env.begin(db=self.db, buffers=True) as txn:
            for block, count in parts.items():
                payload = self.get(txn, block, count) if count <= 1 else None
                found[block] = 0
                if self._base and payload is not None and len(payload) >= _HINT_FROM:
                    found[block] = np.frombuffer(payload, np.uint8).ctypes.data - self._base
        return found

    def pread(self, into: memoryview, start: int, *, wait: bool = True) -> bool:
        """Fill ``into`` from ``start`` of the file; False if that cannot be done.

        Without ``wait`` also where the disk would be waited for, and always on a
        filesystem that cannot tell (tmpfs, ZFS).

        A third faster than copying from the map, whose pages must be faulted in one by
        one, and in a cold file five times as fast.
        """
        try:
            return os.preadv(self._file, [into], start, 0 if wait else os.RWF_NOWAIT) == len(into)
        except OSError:
            return False

    def is_readable(self, start: int, size: int) -> bool:
        """Whether the disk can read ``size`` bytes from ``start`` of the file; waits for it.

        Before LMDB is asked for a value: the binding touches all its pages.
        """
        if not self._base or start + size > self.map_bytes or fault_in(self._base + start, size):
            return True
        # Of pages beyond the file's end the kernel says the same: then the place was wrong.
        return start + size > os.fstat(self._file).st_size

    def will_need(self, start: int, size: int) -> None:
        """Have the disk read what will be asked for soon."""
        os.posix_fadvise(self._file, start, size, os.POSIX_FADV_WILLNEED)

    def is_cached(self, start: int) -> bool:
        """Whether the page at ``start`` of the file is in memory."""
        try:
            return bool(os.preadv(self._file, [bytearray(1)], start, os.RWF_NOWAIT))
        except OSError:
            return False

    def delete(
        self, blocks: Iterable[tuple[int, BlockRow | None]], freeing: Callable[[int], None] | None = None
    ) -> None:
        """Delete payloads by id in one transaction; those that are not there are passed over.

        ``freeing`` is told of the bytes that do not count as used any more, just before that.

        Without its row a payload does not count as used. One whose pages LMDB must not free
        stays behind, as a payload without a block.

        LMDB hands pages out again from the second transaction after the one that
        freed them, hence the empty one at the end.
        """
        gone: list[BlockRow] = []
        with self.env.begin(db=self.db, write=True, buffers=True) as txn:
            for block, row in blocks:
                count = row.parts if row is not None else _MAX_PARTS
                located = row is not None and self._drop_located(txn, block, row)
                if count or not located:
                    self.drop_value(txn, int_key(block), self.db)
                for i in range(0 if located else count):
                    if not self.drop_value(txn, part_key(block, i), self.parts) and row is None:
                        break
                if row is not None:
                    gone.append(row)
        with self.env.begin(db=self.db, write=True) as txn:
            txn.put(int_key(0), b"")
        freed = sum(footprint(row.stored) for row in gone)
        if freeing is not None:
            freeing(freed)
        self.used = max(0, self.used - freed)
        self.blocks = max(0, self.blocks - len(gone))

    def _drop_located(self, txn: lmdb.Transaction, block: int, row: BlockRow) -> bool:
        """Delete a payload from where its row says that it lies; False if nothing was done.

        LMDB's binding reads a value from the disk, all of it, before it says where that lies.
        """
        if not row.hint:
            return False
        try:
            if not may_free_at(self._file, row.hint, row.stored):
                return False
        except OSError as error:
            log.error("volume %d: a value cannot be read (%s); it is left in place", self.number, error)
            return True
        key, db = (part_key(block, 0), self.parts) if row.parts else (int_key(block), self.db)
        txn.delete(key, db=db)
        return True

    def drop_value(self, txn: lmdb.Transaction, key: bytes, db: lmdb._Database) -> bool:
        """Delete a value in ``txn``, a write transaction with buffers; False if there is none."""
        value = txn.get(key, db=db)
        if value is None:
            return False
        if may_free(value, self._base):
            return bool(txn.delete(key, db=db))
        log.error("volume %d: a value's header is damaged; it is left in place", self.number)
        return True

    def ids(self) -> list[int]:
        with self.env.begin(db=self.db) as txn:
            return [n for n in map(int_of, txn.cursor().iternext(values=False)) if n]

    def close(self) -> None:
        self.env.close()
        os.close(self._file)
        self._file = -1


def _map_base(path: Path) -> int:
    """The address that LMDB's map of ``path`` begins at; 0 if it cannot be told."""
    name = os.path.realpath(path)
    try:
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return 0
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == name and int(fields[2], 16) == 0:
            return int(fields[0].split("-")[0], 16)
    return 0


class OnDisk(NamedTuple):
    """Bytes: ``free`` of the disk, and what payloads may take of each volume's file as it is."""

    free: int
    have: dict[int, int]


class Volumes:
    """All volumes of a store, their map sizes together within the budget."""

    def __init__(self, root: Path, budget: Budget, rows: dict[int, VolumeRow]) -> None:
        self.root = root
        self.budget = budget
        self.by_number: dict[int, Volume] = {}
        for path in root.iterdir():
            if path.name.isdigit() and int(path.name) not in rows:
                shutil.rmtree(path)  # made, or dropped, just before a crash: the index does not know it
        for number, row in sorted(rows.items()):
            self.by_number[number] = Volume(number, self._path(number), row)

    def _path(self, number: int) -> Path:
        return self.root / f"{number:04d}"

    def _mapped(self) -> int:
        return sum(v.map_bytes for v in list(self.by_number.values()))

    def _unborn(self) -> list[int]:
        """Map sizes of the volumes that may still be made."""
        left = self.budget.data - self._mapped()
        sizes = []
        while left >= min(self.budget.volume, MIN_VOLUME):
            sizes.append(min(left, self.budget.volume))
            left -= sizes[-1]
        return sizes

    @property
    def free(self) -> int:
        """Bytes that can be written now without deleting anything."""
        return sum(v.free for v in list(self.by_number.values())) + self._unborn_capacity()

    def on_disk(self) -> OnDisk:
        """What of the disk is free, and what the volumes have."""
        disk = os.statvfs(self.root)
        have = {v.number: int(v.disk_bytes() * (1 - HEADROOM)) for v in list(self.by_number.values())}
        return OnDisk(disk.f_bavail * disk.f_frsize, have)

    def disk_room(self, seen: OnDisk | None = None) -> int:
        """Bytes that fit before the disk is full: free pages of the volumes, and the disk's own.

        ``seen`` may be some moments old: what a file has grown by since, the disk has lost. A
        file that is fuller than it should be must grow, too.
        """
        seen = seen or self.on_disk()
        return seen.free + sum(seen.have.get(v.number, 0) - v.used for v in list(self.by_number.values()))

    @property
    def used(self) -> int:
        """Footprints of all payloads, in bytes."""
        return sum(v.used for v in list(self.by_number.values()))

    @property
    def capacity(self) -> int:
        return sum(v.capacity for v in list(self.by_number.values())) + self._unborn_capacity()

    def _unborn_capacity(self) -> int:
        return sum(int(size * (1 - HEADROOM)) for size in self._unborn())

    def has_room(self, without: set[int]) -> bool:
        """Whether a volume beside these has room, or a new one can be made."""
        return bool(self._unborn()) or any(
            v.free > 0 for v in self.by_number.values() if v.number not in without
        )

    def pick(self, wish: int, without: Collection[int] = ()) -> Volume:
        """The volume to write next: the one with the most room, or a new one if none has ``wish`` bytes.

        Raises StoreFull when there is no room at all, OSError or lmdb.Error when a new one is
        needed and cannot be made.
        """
        best = max(
            (v for v in list(self.by_number.values()) if v.number not in without),
            key=lambda v: v.free,
            default=None,
        )
        if best is None or best.free < wish:
            unborn = self._unborn()
            if unborn:
                try:
                    return self.make(unborn[0])
                except (OSError, lmdb.Error) as error:
                    if best is None or best.free <= 0 or not is_full(error, self.root):
                        raise
        if best is None or best.free <= 0:
            raise StoreFull("the volumes are full")
        return best

    def make(self, map_bytes: int) -> Volume:
        """A new, empty volume. Raises OSError or lmdb.Error; then nothing is left of it."""
        number = max(self.by_number, default=0) + 1
        try:
            volume = Volume(number, self._path(number), VolumeRow(map_bytes, 0, 0))
        except BaseException:
            # On a full disk half a header may be there, which LMDB would take for damage next time.
            shutil.rmtree(self._path(number), ignore_errors=True)
            raise
        self.by_number[number] = volume
        return volume

    def drop(self, number: int) -> None:
        """Remove an empty volume and give its space back to the disk."""
        volume = self.by_number.pop(number)
        volume.close()
        shutil.rmtree(volume.path)

    def close(self) -> None:
        for volume in self.by_number.values():
            volume.close()
