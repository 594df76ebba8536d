"""The index environment, and the changes to it that are not committed yet.

LMDB has one write transaction at a time, bound to the thread that began it, and
its commit waits for the disk. File operations must not. So they write into a
`Layer` in memory, and read through it; about once a second, or when somebody
calls fsync, the layer is *frozen* and written by a thread as one transaction,
while new changes gather in the next layer. What is on disk is therefore always
one consistent moment of the tree.

Rows of the tree's tables are *sealed* on disk: a 64-bit hash of table, key and
value follows the value, so that a flipped bit in a recipe or an inode is an error
and never other bytes. Blocks need none, their digest says what they are.

Layers are touched by the event loop's thread only; a frozen one is read by the
committing thread and changed by nobody.
"""

import contextlib
import errno
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb
import xxhash
from sortedcontainers import SortedDict

from cachefs.store.records import INODE_BYTES

TREE_TABLES = ("inodes", "dirents", "cookies", "xattrs", "recipes", "about", "orphans", "uses")
ROW_TABLES = ("heads", "tails")
"""Row key → ids of all blocks that begin (end) with such a row."""
INTEGER_TABLES = ("blocks", "refs", "damaged", *ROW_TABLES)
"""``damaged``: id of a block found to be damaged → when, ns since 1970, big-endian."""
BLOCK_TABLES = (*INTEGER_TABLES, "digests", "victims")
TABLES = ("meta", "volumes", *TREE_TABLES, *BLOCK_TABLES)
SEALED = ("inodes", "dirents", "cookies", "xattrs", "recipes", "about")
SEAL_BYTES = 8

_SCAN = 512


def seal(table: str, key: bytes, value: bytes) -> bytes:
    """8 bytes that follow a row's value on disk."""
    return xxhash.xxh3_64_digest(value, seed=xxhash.xxh3_64_intdigest(key, seed=SEALED.index(table)))


class Layer:
    """Pending changes: table → key → value (None: deleted), and what goes with them.

    ``refs`` are changes of reference counts by block id; ``counters`` changes of
    the statistics; ``holds`` the block ids to let go once committed; ``size`` bytes
    in keys and values.
    """

    def __init__(self) -> None:
        self.tables: dict[str, SortedDict[bytes, bytes | None]] = {t: SortedDict() for t in TREE_TABLES}
        self.refs: Counter[int] = Counter()
        self.counters: Counter[str] = Counter()
        self.holds: list[list[int]] = []
        self.size = 0

    def set(self, table: str, key: bytes, value: bytes | None) -> None:
        entries = self.tables[table]
        old = entries.get(key)
        self.size += (len(value) if value else 0) - (len(old) if old else 0)
        if key not in entries:
            self.size += len(key)
        entries[key] = value

    def __bool__(self) -> bool:
        """Whether anything but counters changed: figures alone are not worth a commit."""
        return bool(self.refs or self.holds or any(self.tables.values()))

    def absorb(self, newer: "Layer") -> None:
        """Put a newer layer's changes on top of this one's."""
        for name, entries in newer.tables.items():
            for key, value in entries.items():
                self.set(name, key, value)
        for block, delta in newer.refs.items():
            self.refs[block] += delta
        for name, delta in newer.counters.items():
            self.counters[name] += delta
        self.holds += newer.holds


class Index:
    """The index environment of a store. ``map_bytes`` None opens it for reading only.

    An older store may then lack a table: `get` and `scan` find it empty, ``dbs`` has none.

    ``clean``: the unused ends of pages are written as zeros, not as what the memory held.
    """

    def __init__(self, path: Path, map_bytes: int | None, *, clean: bool = False) -> None:
        self.path = path
        self._clean = clean
        self._map_bytes = map_bytes
        self.readonly = map_bytes is None
        self.dbs: dict[str, Any] = {}
        self.open()
        self.active = Layer()
        self.frozen: Layer | None = None
        self.sealed = self._is_sealed()
        if not self.sealed and map_bytes is not None:
            self._seal_all()

    def open(self) -> None:
        """Open the environment, which must not be open."""
        map_bytes = self._map_bytes
        self.env = lmdb.open(
            str(self.path),
            map_size=map_bytes or 0,
            max_dbs=len(TABLES),
            max_readers=512,
            readonly=map_bytes is None,
            create=map_bytes is not None,
            mode=0o600,
            meminit=self._clean,
        )
        self.env.reader_check()  # a reader that was killed would keep pages from being used again
        for name in TABLES:
            # A store of an older version, opened for reading only, may lack a table.
            with contextlib.suppress(lmdb.NotFoundError):
                self.dbs[name] = self.env.open_db(
                    name.encode(),
                    integerkey=name in INTEGER_TABLES,
                    dupsort=name in ROW_TABLES,
                    dupfixed=name in ROW_TABLES,
                    integerdup=name in ROW_TABLES,
                    create=map_bytes is not None,
                )

    def close(self) -> None:
        self.env.close()

    # -- seals

    def _is_sealed(self) -> bool:
        with self.env.begin(db=self.dbs["inodes"]) as txn:
            plain = [len(value) == INODE_BYTES for _, value in itertools.islice(txn.cursor(), 64)]
        return 2 * sum(plain) <= len(plain)  # one row may be damaged

    def _seal_all(self) -> None:
        """Seal the rows that a version before seals has written, all at once; they stay plain if it fails."""
        with contextlib.suppress(lmdb.MapFullError), self.env.begin(write=True) as txn:
            for name in SEALED:
                rows = list(txn.cursor(self.dbs[name]))
                for key, value in rows:
                    txn.put(key, value + seal(name, key, value), db=self.dbs[name])
            self.sealed = True

    def to_disk(self, table: str, key: bytes, value: bytes) -> bytes:
        """A row's value as it is stored."""
        return value + seal(table, key, value) if self.sealed and table in SEALED else value

    def from_disk(self, table: str, key: bytes, value: bytes) -> bytes:
        """A row's value from what is stored. Raises OSError(EIO) if it is damaged."""
        if not self.sealed or table not in SEALED:
            return value
        plain = value[:-SEAL_BYTES]
        if value[-SEAL_BYTES:] != seal(table, key, plain):
            raise OSError(errno.EIO, f"a row of {table} in the index is damaged")
        return plain

    @contextmanager
    def snapshot(self) -> Iterator[lmdb.Transaction]:
        """A read transaction over what is committed."""
        with self.env.begin(buffers=False) as txn:
            yield txn

    def committed(self, table: str, key: bytes) -> bytes | None:
        """A committed value; pending changes are not looked at."""
        if table not in self.dbs:
            return None
        with self.env.begin(db=self.dbs[table]) as txn:
            value: bytes | None = txn.get(key)
        return None if value is None else self.from_disk(table, key, value)

    def get(self, table: str, key: bytes) -> bytes | None:
        for layer in (self.active, self.frozen):
            if layer is not None and key in layer.tables[table]:
                value: bytes | None = layer.tables[table][key]
                return value
        return self.committed(table, key)

    def put(self, table: str, key: bytes, value: bytes) -> None:
        self.active.set(table, key, value)

    def delete(self, table: str, key: bytes) -> None:
        self.active.set(table, key, None)

    def scan(self, table: str, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Entries with start <= key < stop, in order. Changes made meanwhile may or may not show."""
        while start < stop:
            found, upper = self._page(table, start, stop)
            for layer in (self.frozen, self.active):
                if layer is not None:
                    entries = layer.tables[table]
                    for key in entries.irange(start, upper, inclusive=(True, False)):
                        found[key] = entries[key]
            for key in sorted(found):
                latest = found[key]
                if latest is not None:
                    yield key, latest
            start = upper

    def _page(self, table: str, start: bytes, stop: bytes) -> tuple[dict[bytes, bytes | None], bytes]:
        """The first committed entries of a range, and where the rest begins.

        In a function of its own: LMDB keeps a reader's slot for as long as anything
        refers to the transaction, and a suspended generator would.
        """
        found: dict[bytes, bytes | None] = {}
        with self.env.begin() as txn:
            cursor = txn.cursor(self.dbs[table]) if table in self.dbs else None
            if cursor is not None and cursor.set_range(start):
                for key, value in cursor:
                    if key >= stop:
                        break
                    if len(found) == _SCAN:
                        return found, key
                    found[key] = self.from_disk(table, key, value)
        return found, stop

    def freeze(self) -> Layer | None:
        """Set the pending changes apart for a commit; None when there are none. `thaw` must follow."""
        assert self.frozen is None
        if not self.active and not self.active.counters:
            return None
        self.frozen, self.active = self.active, Layer()
        return self.frozen

    def thaw(self, *, committed: bool) -> None:
        """End of a commit. What could not be committed becomes pending again."""
        frozen, self.frozen = self.frozen, None
        if frozen is not None and not committed:
            frozen.absorb(self.active)
            self.active = frozen

    @property
    def pending(self) -> int:
        """Bytes that wait to be committed."""
        return self.active.size + (self.frozen.size if self.frozen is not None else 0)

    @property
    def map_bytes(self) -> int:
        size: int = self.env.info()["map_size"]
        return size

    def used(self) -> float:
        """Part of the map that live pages take, 0 … 1."""
        with self.env.begin() as txn:
            pages = 0
            for db in self.dbs.values():
                stat = txn.stat(db)
                pages += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return float(pages * self.env.stat()["psize"] / self.map_bytes)
