"""The pages of an LMDB file, looked at from outside: whether LMDB may follow them.

LMDB trusts its pages. A flipped bit in a header or a node makes it read beyond
the page or the map (SIGSEGV, SIGBUS), fail an assertion (SIGABRT), or hand out
pages that are in use. So before it gets an environment that lay on a disk, every
page that a reader or a writer would follow is checked here with plain reads:
headers, node sizes, order of keys, page numbers, counts, and that no page is
used twice or listed as free.

Knows LMDB 0.9 (data version 1) with pages of 4096 bytes. What values hold is not
looked at. Measured: 20 µs a page, its read included.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachefs.store.errors import StoreRefused
from cachefs.store.layout import PAGE

_HEADER = 16
_MAGIC = 0xBEEFC0DE
_BRANCH, _LEAF, _OVERFLOW, _META, _DIRTY, _LEAF2, _SUBP = 1, 2, 4, 8, 0x10, 0x20, 0x40
_BIG, _SUB, _DUP = 1, 2, 4
_DUPSORT, _INTEGER, _DUPFIXED, _INTEGERDUP = 4, 8, 16, 32
_FLAGS = dict.fromkeys(("blocks", "refs", "damaged", "payloads"), _INTEGER)
_FLAGS |= dict.fromkeys(("heads", "tails"), _DUPSORT | _INTEGER | _DUPFIXED | _INTEGERDUP)
_NONE = (1 << 64) - 1
_UNWRITTEN = 1 << 15
"""Pages that the newest commit may have at the file's end without having written them."""
_DEEPEST = 32
_BATCH = 2048
_DB = np.dtype(
    [("pad", "<u4"), ("flags", "<u2"), ("depth", "<u2"), ("branch", "<u8"), ("leaf", "<u8"),
     ("overflow", "<u8"), ("entries", "<u8"), ("root", "<u8")]
)  # fmt: skip
_META_AT = np.dtype(
    {"names": ["pgno", "flags", "magic", "version", "map", "free", "main", "last", "txnid"],
     "formats": ["<u8", "<u2", "<u4", "<u4", "<u8", _DB, _DB, "<u8", "<u8"],
     "offsets": [0, 10, 16, 20, 32, 40, 88, 136, 144], "itemsize": PAGE}
)  # fmt: skip

Words = npt.NDArray[np.uint64]
Longs = npt.NDArray[np.int64]
Octets = npt.NDArray[np.uint8]


@dataclass(slots=True)
class _Nodes:
    """Nodes of one batch of pages, in order; offsets in bytes from the batch's start."""

    page: Longs
    at: Longs
    low: Longs
    flags: Longs
    ksize: Longs


@dataclass(slots=True)
class _Count:
    branch: int = 0
    leaf: int = 0
    overflow: int = 0
    entries: int = 0
    trees: int = 0


class Pages:
    """One ``data.mdb``. `faults` after `check` says what is wrong, a line each.

    A file that another process writes is looked at from a snapshot: ``txnid`` of a
    read transaction that is open all the while. Raises OSError.
    """

    def __init__(self, path: Path, txnid: int | None = None) -> None:
        self.faults: list[str] = []
        self.used = 0
        """Pages in trees and values."""
        self.leaked = 0
        """Pages neither used nor free: lost room, no harm."""
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._pages = os.fstat(self._fd).st_size // PAGE
        self._seen: npt.NDArray[np.bool_] = np.zeros(0, bool)
        self._tables: dict[str, np.void] = {}
        self._lists: list[tuple[Octets, Longs]] = []
        self._metas: list[np.void] = []
        self.meta = self._choose(txnid)

    def close(self) -> None:
        os.close(self._fd)

    # -- metas

    def _choose(self, txnid: int | None) -> np.void | None:
        """The meta page that LMDB would start from, or the snapshot's."""
        if self._pages < 2:
            self.faults.append("has no header pages")
            return None
        metas = np.frombuffer(os.pread(self._fd, 2 * PAGE, 0), _META_AT)
        self._metas = list(metas)
        for number, meta in enumerate(metas):
            intact = meta["flags"] == _META and meta["magic"] == _MAGIC and meta["version"] == 1
            intact &= meta["free"]["pad"] == PAGE and meta["free"]["flags"] == _INTEGER
            intact &= meta["pgno"] == number and meta["main"]["flags"] == 0
            # LMDB maps as much as this says; a writer may have asked for more since.
            room = int(meta["map"]) // PAGE
            if not intact or int(meta["map"]) % PAGE or not int(meta["last"]) < room < 1 << 34:
                self.faults.append(f"header page {number} is damaged")
                return None
        ids = metas["txnid"].tolist()
        if txnid is not None:
            return next((meta for meta in metas if int(meta["txnid"]) == txnid), None)
        # Commits take turns. With another number an older state would be taken for the latest.
        if ids != [0, 0] and (abs(ids[0] - ids[1]) != 1 or ids[0] % 2 or not ids[1] % 2):
            self.faults.append("header pages are of commits that do not follow each other")
            return None
        latest: np.void = metas[int(ids[1] > ids[0])]
        return latest

    # -- the walk

    def check(self, *, values: bool = False) -> list[str]:
        """Walk everything; `faults`. ``values``: also the headers of values in pages of their own."""
        if self.meta is not None and not self.faults:
            self._walk(self.meta, values=values)
        return self.faults

    def rescue(self) -> bool:
        """For `salvage` when the header pages are damaged: start from the one that leads to most.

        That may be the commit before the last.
        """
        best, most = None, 0
        for meta in sorted(self._metas, key=lambda meta: int(meta["txnid"]), reverse=True):
            self._tables, self._lists, self.meta = {}, [], meta
            self._walk(meta, values=False)
            if (rows := sum(1 for _ in self.salvage())) > most:
                best, most = meta, rows
        if best is not None:
            self._tables, self._lists, self.meta = {}, [], best
            self._walk(best, values=False)
        return best is not None

    def _walk(self, meta: np.void, *, values: bool) -> list[str]:
        last = int(meta["last"])
        # A page that was handed out and given back in one transaction is never written.
        if last >= self._pages + _UNWRITTEN or last < 1:
            self.faults.append(f"ends before page {last}")
            return self.faults
        self._seen = np.zeros(last + 1, bool)
        self._seen[:2] = True
        try:
            self._tree("free pages", meta["free"], values=values, free=True)
            self._tree("tables", meta["main"], values=values, main=True)
            for name, db in self._tables.items():
                if int(db["flags"]) != _FLAGS.get(name, 0):
                    self._fault(name, "is of a wrong kind")
                self._tree(name, db, values=values)
            self.used = int(self._seen.sum())
            self._free_lists(last)
        except (ValueError, IndexError) as error:
            self.faults.append(f"cannot be followed: {error}")
        return self.faults

    def _fault(self, where: str, text: str) -> None:
        if len(self.faults) < 100:
            self.faults.append(f"{where}: {text}")

    def _read(self, numbers: Longs) -> Octets:
        """Pages by number, one a row; missing ones are zeros."""
        out = np.zeros((len(numbers), PAGE), np.uint8)
        ends = np.flatnonzero(np.diff(numbers) != 1) + 1
        for first, stop in zip([0, *ends.tolist()], [*ends.tolist(), len(numbers)], strict=True):
            os.preadv(self._fd, [out[first:stop].reshape(-1).data], int(numbers[first]) * PAGE)
        return out

    def _take(self, where: str, numbers: Longs) -> npt.NDArray[np.bool_]:
        """Mark pages as used; which of them may be followed: in the file, and not met before."""
        good = (numbers >= 2) & (numbers < min(len(self._seen), self._pages))
        good[good] = ~self._seen[numbers[good]]
        _, first = np.unique(numbers, return_index=True)
        once = np.zeros(len(numbers), bool)
        once[first] = True
        good &= once
        self._seen[numbers[good]] = True
        for number in numbers[~good][:3].tolist():
            self._fault(where, f"page {number} does not exist or is used twice")
        return good

    def _tree(self, name: str, db: np.void, *, values: bool = False, free: bool = False,
              main: bool = False, leaf2: bool = False) -> _Count:  # fmt: skip
        """Walk a tree level by level."""
        count = _Count()
        root, depth = int(db["root"]), 0
        if root != _NONE:
            level: Longs = np.array([root], np.int64) if root < 1 << 62 else np.array([-1], np.int64)
            bounds: Words | None = None
            while len(level):
                good = self._take(name, level)
                depth += 1
                if depth > _DEEPEST:
                    self._fault(name, "is too deep")
                    break
                children: list[Longs] = []
                separators: list[Words] = []
                firsts: list[Words] = []
                lasts: list[Words] = []
                level = level[good]
                whole = bool(good.all())
                for start in range(0, len(level), _BATCH):
                    numbers = level[start : start + _BATCH]
                    pages = self._read(numbers)
                    kind = self._kind(name, numbers, pages, free=free, leaf2=leaf2)
                    whole &= bool((kind != 0).all())
                    for each in np.unique(kind).tolist():
                        mine = np.flatnonzero(kind == each)
                        if each == _BRANCH:
                            count.branch += len(mine)
                        elif each:
                            count.leaf += len(mine)
                        if each == _LEAF2:
                            count.entries += int(((_shorts(pages)[mine, 6].astype(int) - _HEADER) // 2).sum())
                        if each in (0, _LEAF2):
                            continue
                        nodes = self._nodes(name, numbers[mine], pages[mine], each)
                        if nodes is None:
                            whole = False
                            continue
                        flat = np.ascontiguousarray(pages[mine]).reshape(-1)
                        keys = self._keys(name, db, flat, nodes)
                        starts = np.flatnonzero(np.diff(nodes.page, prepend=-1))
                        if each == _BRANCH:
                            children.append(nodes.low | nodes.flags << 32)
                            # The first key of a branch is not looked at, and may be empty.
                            keys[starts] = 0
                            separators.append(keys)
                        else:
                            firsts.append(keys[starts])
                            lasts.append(keys[np.append(starts[1:], len(keys)) - 1])
                            self._leaf(name, db, flat, nodes, count, values=values, free=free, main=main)
                            inner = np.diff(nodes.page) == 0
                            if not free and not (_less(keys[:-1], keys[1:], db, leaf=True) | ~inner).all():
                                self._fault(name, f"keys are out of order near page {int(numbers[mine[0]])}")
                if bounds is not None and firsts and whole and len(bounds) == sum(map(len, firsts)):
                    first, final, given = np.concatenate(firsts), np.concatenate(lasts), bounds
                    fits = ~_less(first, given, db)[1:] & _less(final[:-1], first[1:], db, leaf=True)
                    right = (given[1:] == 0).all(axis=1) | _less(final[:-1], given[1:], db, leaf=True)
                    if not (fits & right).all():
                        self._fault(name, "a branch leads to pages of other keys")
                level = np.concatenate(children) if children else np.empty(0, np.int64)
                bounds = np.concatenate(separators) if separators else None
        got: tuple[int, ...] = (count.branch, count.leaf, count.overflow, count.entries, depth)
        said: tuple[int, ...] = tuple(
            int(db[field]) for field in ("branch", "leaf", "overflow", "entries", "depth")
        )
        if count.trees:  # LMDB counts pages of inner trees with the outer one's, and not always
            got, said = got[3:], said[3:]
        if got != said and not self.faults:
            self._fault(name, f"has {got} branch, leaf and overflow pages, entries and levels, not {said}")
        return count

    def _kind(self, name: str, numbers: Longs, pages: Octets, *, free: bool, leaf2: bool) -> Longs:
        """Flags of each page; 0 where its header is wrong."""
        shorts = _shorts(pages)
        flags = shorts[:, 5].astype(np.int64)
        lower, upper = shorts[:, 6].astype(np.int64), shorts[:, 7].astype(np.int64)
        leaf = _LEAF | _LEAF2 if leaf2 else _LEAF
        good = pages.view("<u8")[:, 0].astype(np.int64) == numbers
        good &= (flags == _BRANCH) | (flags == leaf)
        good &= (lower >= _HEADER + 2) & (lower <= upper) & (upper <= PAGE) & (lower % 2 == 0)
        good &= (flags != _BRANCH) | (lower >= _HEADER + (2 if free else 4))
        if leaf2:
            good &= (flags == _BRANCH) | ((shorts[:, 4] == 8) & (_HEADER + (lower - _HEADER) * 4 <= PAGE))
        for number in numbers[~good][:3].tolist():
            self._fault(name, f"page {number} is damaged")
        flags[flags == leaf] = _LEAF2 if leaf2 else _LEAF
        return np.where(good, flags, 0)

    def _nodes(self, name: str, numbers: Longs, pages: Octets, kind: int) -> _Nodes | None:
        """The nodes of pages whose headers are sound; None if one lies outside of its page."""
        shorts = _shorts(pages)
        number = (shorts[:, 6].astype(np.int64) - _HEADER) // 2
        page = np.repeat(np.arange(len(pages)), number)
        column = np.arange(len(page)) - np.repeat(np.cumsum(number) - number, number)
        pointer = shorts[page, 8 + column].astype(np.int64)
        upper = shorts[:, 7].astype(np.int64)
        good = (pointer >= upper[page]) & (pointer % 2 == 0) & (pointer + 8 <= PAGE)
        if good.all():
            at = page * PAGE + pointer
            flat = np.ascontiguousarray(pages).reshape(-1).view("<u2").astype(np.int64)
            low = flat[at // 2] | flat[at // 2 + 1] << 16
            flags, ksize = flat[at // 2 + 2], flat[at // 2 + 3]
            size = 8 + ksize
            if kind == _LEAF:
                size = size + np.where(flags & _BIG, 8, low)
                good = (flags & ~(_BIG | _SUB | _DUP)) == 0
            good &= pointer + size <= PAGE
            # Nodes lie side by side up to the page's end: an overlap or a gap is a wrong size.
            total = np.bincount(page, weights=size + size % 2, minlength=len(pages)).astype(np.int64)
            good &= (total == PAGE - upper)[page]
        if not good.all():
            self._fault(name, f"page {int(numbers[page[~good][0]])} is damaged")
            return None
        return _Nodes(page, at, low, flags, ksize)

    def _keys(self, name: str, db: np.void, flat: Octets, nodes: _Nodes) -> Words:
        """The first 16 bytes of each key as two numbers that sort like it."""
        columns = np.arange(16)
        index = np.minimum(nodes.at[:, None] + 8 + columns, len(flat) - 1)
        octets = np.where(columns < nodes.ksize[:, None], flat[index], 0).astype(np.uint8)
        if int(db["flags"]) & _INTEGER:
            octets[:, :8] = octets[:, 7::-1]
        return octets.view(">u8").astype(np.uint64)

    def _leaf(self, name: str, db: np.void, flat: Octets, nodes: _Nodes, count: _Count, *,
              values: bool, free: bool, main: bool) -> None:  # fmt: skip
        """What the nodes of leaves lead to: values in pages of their own, and trees."""
        allowed = (_SUB,) if main else (0, _DUP, _DUP | _SUB) if int(db["flags"]) & _DUPSORT else (0, _BIG)
        good = np.isin(nodes.flags, allowed)
        if int(db["flags"]) & _INTEGER:
            good &= nodes.ksize == 8
        if not good.all():
            self._fault(name, "a node is of a wrong kind")
            return
        data = nodes.at + 8 + nodes.ksize
        big = nodes.flags == _BIG
        if big.any():
            first = _gather(flat, data[big], "<u8").astype(np.int64)
            long = (_HEADER - 1 + nodes.low[big]) // PAGE + 1
            bad = (long > len(self._seen)) | (first < 2)
            if bad.any():
                self._fault(name, "a value lies outside of the file")
                return
            self._take(name, np.repeat(first, long) + _within(long))
            count.overflow += int(long.sum())
            if values:
                self._check_values(name, first, long)
        count.entries += int((nodes.flags & _DUP == 0).sum())
        if free:
            self._lists.append((flat, np.stack([data, nodes.low, nodes.flags], axis=1)))
        for at, size, flags, key_at in zip(
            *(each[nodes.flags >= _SUB].tolist() for each in (data, nodes.low, nodes.flags, nodes.at)),
            strict=True,
        ):
            if flags & _SUB:
                db_inside = np.frombuffer(flat[at : at + size].tobytes().ljust(48)[:48], _DB)[0]
                inner = main or int(db_inside["flags"]) == _DUPFIXED | _INTEGER
                if size != _DB.itemsize or not inner:
                    self._fault(name, "a tree's record is damaged")
                    continue
                if main:
                    self._tables[flat[key_at + 8 : at].tobytes().decode(errors="replace")] = db_inside
                else:
                    count.entries += self._tree(name, db_inside, leaf2=True).entries
                    count.trees += 1
            else:
                head = flat[at : at + _HEADER].view("<u2").tolist()
                entries = (head[6] - _HEADER) // 2
                fits = head[5] & ~_DIRTY == _LEAF | _LEAF2 | _SUBP and head[4] == 8 and entries > 0
                if not fits or size < _HEADER + 8 * entries or head[7] > size:
                    self._fault(name, "a list of values is damaged")
                count.entries += max(0, entries)

    def _check_values(self, name: str, first: Longs, long: Longs) -> None:
        for number, pages in zip(first.tolist(), long.tolist(), strict=True):
            head = np.frombuffer(os.pread(self._fd, _HEADER, number * PAGE), "<u2")
            said = int(head[6]) | int(head[7]) << 16 if len(head) == 8 else 0
            if (
                len(head) < 8
                or int(head[:4].view("<u8")[0]) != number
                or head[5] != _OVERFLOW
                or said != pages
            ):
                self._fault(name, f"page {number} is damaged")

    # -- free pages

    def _free_lists(self, last: int) -> None:
        """Pages that a writer may take must not be in use."""
        free: list[Words] = []
        for flat, rows in self._lists:
            for at, size, flags in rows.tolist():
                data = flat[at : at + size].tobytes()
                if flags == _BIG:
                    first = int.from_bytes(flat[at : at + 8].tobytes(), "little")
                    data = os.pread(self._fd, size, first * PAGE + _HEADER)
                ids = np.frombuffer(data[: len(data) // 8 * 8], "<u8")
                if len(ids) < 1 or len(data) != size or int(ids[0]) > len(ids) - 1:
                    self._fault("free pages", "a list is damaged")
                    continue
                mine = ids[1 : 1 + int(ids[0])]
                if (mine[:-1] <= mine[1:]).any():
                    self._fault("free pages", "a list is out of order")
                free.append(mine)
        listed = np.concatenate(free) if free else np.empty(0, np.uint64)
        if (listed < 2).any() or (listed > last).any() or len(np.unique(listed)) != len(listed):
            self._fault("free pages", "are listed twice or do not exist")
        elif self._seen[listed.astype(np.int64)].any():
            self._fault("free pages", "some are in use")
        elif not self.faults:
            self.leaked = last + 1 - self.used - len(listed)

    # -- saving what can be read

    def salvage(self) -> Iterator[tuple[str, bytes, bytes]]:
        """(table, key, value) of every row that can be reached and lies inside its page.

        After `check`. The values may still be wrong. Lists of dupsort tables are left out.
        """
        if self.meta is None:
            return
        for name, db in self._tables.items():
            if int(db["flags"]) & _DUPSORT:
                continue
            yield from ((name, key, value) for key, value in self._rows(int(db["root"]), set()))

    def _rows(self, root: int, met: set[int]) -> Iterator[tuple[bytes, bytes]]:
        if root in met or not 2 <= root < self._pages:
            return
        met.add(root)
        page = os.pread(self._fd, PAGE, root * PAGE)
        head = np.frombuffer(page, "<u2")
        kind = int(head[5])
        number = min((int(head[6]) - _HEADER) // 2, (PAGE - _HEADER) // 2)
        for pointer in head[8 : 8 + max(0, number)].tolist():
            if pointer % 2 or not _HEADER <= pointer <= PAGE - 8:
                continue
            low, high, flags, ksize = head[pointer // 2 : pointer // 2 + 4].tolist()
            start = pointer + 8 + ksize
            if kind == _BRANCH:
                yield from self._rows(low | high << 16 | flags << 32, met)
            elif kind == _LEAF and start <= PAGE:
                size = low | high << 16
                key, value = page[pointer + 8 : start], page[start : start + size]
                if flags == _BIG:
                    first = int.from_bytes(page[start : start + 8], "little")
                    inside = 2 <= first < self._pages and size <= (self._pages - first) * PAGE
                    value = os.pread(self._fd, size, first * PAGE + _HEADER) if inside else b""
                if len(value) == size and flags in (0, _BIG):
                    yield key, value


def _shorts(pages: Octets) -> npt.NDArray[np.uint16]:
    return pages.view("<u2")


def _gather(flat: Octets, at: Longs, dtype: str) -> npt.NDArray[np.uint64]:
    size = np.dtype(dtype).itemsize
    return np.ascontiguousarray(flat[at[:, None] + np.arange(size)]).view(dtype).reshape(-1)


def _within(lengths: Longs) -> Longs:
    """0 … length - 1 for each length, one after the other."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _less(one: Words, other: Words, db: np.void, *, leaf: bool = False) -> npt.NDArray[np.bool_]:
    """Whether each key of ``one`` sorts before its neighbour; keys that begin alike may (``leaf``)."""
    less = (one[:, 0] < other[:, 0]) | ((one[:, 0] == other[:, 0]) & (one[:, 1] < other[:, 1]))
    if leaf and not int(db["flags"]) & _INTEGER:
        less |= (one == other).all(axis=1)
    found: npt.NDArray[np.bool_] = less
    return found


def faults(path: Path, *, values: bool = False) -> list[str]:
    """What is wrong with the pages of an environment (a directory) that nobody writes."""
    if not (path / "data.mdb").exists() or not (path / "data.mdb").stat().st_size:
        return []  # a crash while it was made
    pages = Pages(path / "data.mdb")
    try:
        return pages.check(values=values)
    finally:
        pages.close()


def require_sound(store: Path) -> None:
    """Raises StoreRefused when LMDB must not be let at a store's files."""
    for place in (store / "index", *sorted((store / "volumes").glob("[0-9]*"))):
        # A volume's long values are looked at when they are deleted: see `overflow`.
        if found := faults(place, values=place.name == "index"):
            raise StoreRefused(
                f"{store}: cannot be opened: {place.relative_to(store)}/data.mdb is damaged ({found[0]}); "
                f"'cachefs check --deep --repair {store}' saves what can be saved"
            )
