"""``cachefs check --repair``: remove what cannot be returned, rebuild what follows from the rest.

Files are the truth: an inode and a recipe that carry their seals, and blocks that
have their digests. Names, counts, figures and the tables that blocks are found by
are counted from them anew, and only rows that differ are written, in one
transaction. Payloads that belong to nothing are deleted after it, so a crash
anywhere leaves a store that can be repaired again.

Where pages of an LMDB file are damaged, every row that can still be reached goes
into a new file, which takes the old one's place when all is done.
"""

import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np

from cachefs.sizes import MIB, count
from cachefs.store import home
from cachefs.store.check import Payloads, Progress, ReadVolumes, Report, check, is_unfinished
from cachefs.store.check_index import (
    BE_KEY,
    DIGEST,
    KEY,
    REFS,
    IndexCheck,
    footprints,
)
from cachefs.store.check_strays import delete_strays, drop_unknown
from cachefs.store.errors import StoreRefused
from cachefs.store.index import ROW_TABLES, TABLES, Index, seal
from cachefs.store.layout import PAGE
from cachefs.store.pages import Pages
from cachefs.store.records import Dirent, Inode, Refs, VolumeRow, be, be_pair, int_key, of_be
from cachefs.store.tree import NAME_MAX, ROOT

_NEW = "repaired"
_ROWS_A_TXN = 10_000
_LONGEST_KEY = 511


def repair(path: Path, *, deep: bool, progress: Progress) -> tuple[Report, list[str]]:
    """Repair a store that nobody has open; how it is then, and what was done. Raises StoreRefused."""
    home.check_format(path)
    if is_unfinished(path):
        return check(path), []
    lock = home.Lock(path)
    try:
        report, done = _repair(path, deep, progress)
    except lmdb.Error as error:
        lock.release()
        raise StoreRefused(f"{path}: cannot be repaired: {error}") from None
    except BaseException:
        lock.release()
        raise
    lock.release()
    if done:
        report = check(path, deep=deep, progress=progress)
    return report, done


def _repair(path: Path, deep: bool, progress: Progress) -> tuple[Report, list[str]]:
    done: list[str] = []
    shutil.rmtree(path / "index" / _NEW, ignore_errors=True)  # what a crash left
    rows = _salvage(path / "index", done, {name: name in ("blocks", "refs", "damaged") for name in TABLES})
    folder = path / "index" / _NEW if rows else path / "index"
    drop_unknown(path, folder, done)
    for each in sorted((path / "volumes").glob("[0-9]*")):
        if (each / "data.mdb").exists():
            shutil.rmtree(each / _NEW, ignore_errors=True)
            if _salvage(each, done, {"payloads": True, "parts": False}):
                _take_place(each)
    size = (folder / "data.mdb").stat().st_size
    with ExitStack() as stack:
        index = Index(folder, max(64 * MIB, 2 * size) // PAGE * PAGE)
        stack.callback(index.close)
        volumes = ReadVolumes(path / "volumes")
        stack.callback(volumes.close)
        report = Report(deep)
        with index.snapshot() as txn:
            found = IndexCheck(index, txn, lambda step: progress(step, 0, 0))
            found.run()
            for each in sorted((path / "volumes").glob("[0-9]*")):
                if (each / "data.mdb").exists():
                    volumes.add(int(each.name), _volume_row(each, found))
            Payloads(index, volumes, found, report, settled=True).run(progress)
            if report.sound and not done:
                return report, []
            plan = _Plan(index, found, report, done, {n: v.map_bytes for n, v in volumes.by_number.items()})
            with index.env.begin(write=True) as writing:
                plan.write(writing)
        volumes.close()
        volumes.by_number.clear()
        index.env.sync(True)
    if rows:
        _take_place(path / "index")
    delete_strays(path, done)
    return report, done


def _volume_row(path: Path, found: IndexCheck) -> VolumeRow:
    row = found.volumes.get(int(path.name))
    if row is not None:
        return VolumeRow(*(int(each) for each in row.tolist()))
    return VolumeRow((path / "data.mdb").stat().st_size // PAGE * PAGE, 0, 0)


# -- damaged pages


def _salvage(path: Path, done: list[str], tables: dict[str, bool]) -> bool:
    """Where an environment's pages are damaged, put the rows that can be reached into a new one beside it.

    ``tables``: those to keep, and whether their keys are integers.
    """
    with closing(Pages(path / "data.mdb")) as pages:
        if not pages.check(values=True):
            return False
        if pages.meta is None and not pages.rescue():
            raise StoreRefused(f"{path}: its header is damaged, nothing can be saved; make a new store")
        (path / _NEW).mkdir(mode=0o700)
        size = (path / "data.mdb").stat().st_size
        kept = 0
        with lmdb.open(
            str(path / _NEW), map_size=2 * size + 16 * MIB, max_dbs=len(TABLES), mode=0o600
        ) as env:
            dbs = {
                name: env.open_db(name.encode(), integerkey=integer)
                for name, integer in tables.items()
                if name not in ROW_TABLES
            }
            rows = (row for row in pages.salvage() if row[0] in dbs)
            for batch in _batches(rows):
                with env.begin(write=True) as txn:
                    for name, key, value in batch:
                        if len(key) == 8 or (not tables[name] and 0 < len(key) <= _LONGEST_KEY):
                            kept += txn.put(key, value, db=dbs[name], overwrite=False)
    done.append(f"{path.name}/data.mdb: damaged pages; saved {count(kept, 'row')} from the others")
    return True


def _batches(rows: Iterable[tuple[str, bytes, bytes]]) -> Iterator[list[tuple[str, bytes, bytes]]]:
    batch: list[tuple[str, bytes, bytes]] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += len(row[2])
        if len(batch) >= _ROWS_A_TXN or size > 64 * MIB:
            yield batch
            batch, size = [], 0
    yield batch


def _take_place(path: Path) -> None:
    """Let the new environment's file replace the damaged one."""
    (path / _NEW / "data.mdb").rename(path / "data.mdb")
    (path / "lock.mdb").unlink(missing_ok=True)
    folder = os.open(path, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    shutil.rmtree(path / _NEW)


# -- what the index should say


@dataclass(frozen=True, slots=True)
class _Link:
    parent: int
    name: bytes
    cookie: int


class _Plan:
    """What is to be kept of a store, and the rows that say so."""

    def __init__(self, index: Index, found: IndexCheck, report: Report, done: list[str],
                 maps: dict[int, int]) -> None:  # fmt: skip
        self._index = index
        self._found = found
        self._done = done
        self._maps = maps
        self._lost = set(report.lost)
        for ino in sorted(self._lost & found.tree.inodes.keys()):
            done.append(f"removed {found.tree.path(ino)!r}: {report.lost[ino]}")
        for ino in sorted(self._lost - found.tree.inodes.keys()):
            names = [
                key[8:].decode(errors="replace") for key, d in found.tree.dirents.items() if d.ino == ino
            ]
            done.append(f"removed {names[0] if names else f'inode {ino}'!r}: {report.lost[ino]}")
        self._inodes = {n: i for n, i in found.tree.inodes.items() if n not in self._lost}
        self._links = self._link()
        self._recipes: set[int] = set()
        self._named = np.zeros(len(found.ids), np.int64)
        for ino, recipe in found.recipes({}):
            if ino in self._inodes and ino not in self._lost:
                self._recipes.add(ino)
                ids, counts = recipe.blocks()
                at, known = found.find(ids)
                np.add.at(self._named, at[known], counts[known])
        lost = np.array(sorted(report.damaged | report.absent), np.uint64)
        gone = np.isin(found.ids, lost) & (self._named == 0)
        self._kept = ~gone
        if gone.any():
            done.append(f"dropped {count(int(gone.sum()), 'damaged block')}")

    def _link(self) -> dict[int, _Link]:
        """A name for every inode: its own where that can be found. Orphans are dropped."""
        tree, inodes = self._found.tree, self._inodes
        now = time.time_ns()
        if ROOT not in inodes or not stat.S_ISDIR(inodes[ROOT].mode):
            mode = stat.S_IFDIR | 0o700
            inodes[ROOT] = Inode(mode, os.getuid(), os.getgid(), 2, 0, now, now, now, now, now, 0, ROOT, 0)
        known: dict[int, list[_Link]] = {}
        for key, dirent in tree.dirents.items():
            known.setdefault(dirent.ino, []).append(_Link(of_be(key[:8]), key[8:], dirent.cookie))
        for key, value in tree.cookies.items():
            ino = Dirent.unpack(value[:20]).ino
            known.setdefault(ino, []).append(_Link(of_be(key[:8]), value[20:], of_be(key[8:])))
        links: dict[int, _Link] = {}
        names: set[tuple[int, bytes]] = set()
        cookies: set[tuple[int, int]] = set()
        for ino, inode in sorted(inodes.items()):
            if ino == ROOT:
                continue
            own = (inode.parent, inode.cookie)
            choice = sorted(known.get(ino, ()), key=lambda link: (link.parent, link.cookie) != own)
            if not choice and not inode.nlink:
                del inodes[ino]  # unlinked, and still open when the daemon ended
                continue
            link = choice[0] if choice else _Link(ROOT, b"", 0)
            parent = inodes.get(link.parent)
            if (
                not link.name
                or parent is None
                or not stat.S_ISDIR(parent.mode)
                or (link.parent, link.name) in names
            ):
                old = b"." + link.name if link.name else b""
                link = _Link(ROOT, (b"recovered.%d" % ino + old)[:NAME_MAX], link.cookie)
                self._done.append(f"gave inode {ino} the name {link.name.decode(errors='replace')!r}")
            cookie = link.cookie or now
            while (link.parent, cookie) in cookies:
                cookie += 1
            links[ino] = _Link(link.parent, link.name, cookie)
            names.add((link.parent, link.name))
            cookies.add((link.parent, cookie))
        return links

    # -- writing

    def write(self, txn: lmdb.Transaction) -> None:
        changed = self._tree(txn) + self._blocks(txn) + self._lookups(txn) + self._figures(txn)
        if changed:
            self._done.append(f"rebuilt {count(changed, 'row')} of the index")

    def _replace(self, txn: lmdb.Transaction, table: str, rows: dict[bytes, bytes]) -> int:
        """Make these the rows of a table; how many had to be changed."""
        db, changed = self._index.dbs[table], 0
        wanted = {key: self._index.to_disk(table, key, value) for key, value in rows.items()}
        have = dict(txn.cursor(db))
        for key in have.keys() - wanted.keys():
            changed += txn.delete(bytes(key), db=db)
        for key, value in wanted.items():
            if have.get(key) != value:
                changed += txn.put(key, value, db=db)
        return changed

    def _tree(self, txn: lmdb.Transaction) -> int:
        subdirs: dict[int, int] = {}
        for ino, link in self._links.items():
            if stat.S_ISDIR(self._inodes[ino].mode):
                subdirs[link.parent] = subdirs.get(link.parent, 0) + 1
        inodes, dirents, cookies, uses = {}, {}, {}, {}
        for ino, inode in self._inodes.items():
            if ino in self._links:
                link = self._links[ino]
                inode = inode._replace(parent=link.parent, cookie=link.cookie)
                dirent = Dirent(ino, link.cookie, stat.S_IFMT(inode.mode)).pack()
                dirents[be(link.parent) + link.name] = dirent
                cookies[be_pair(link.parent, link.cookie)] = dirent + link.name
            nlink = 2 + subdirs.get(ino, 0) if stat.S_ISDIR(inode.mode) else 1
            self._inodes[ino] = inode = inode._replace(nlink=nlink)
            inodes[be(ino)] = inode.pack()
            if stat.S_ISREG(inode.mode):
                uses[be_pair(inode.last_use, ino)] = b""
        changed = self._replace(txn, "inodes", inodes) + self._replace(txn, "dirents", dirents)
        changed += self._replace(txn, "cookies", cookies) + self._replace(txn, "uses", uses)
        changed += self._replace(txn, "orphans", {})
        for table, keep in (("recipes", self._recipes), ("about", self._inodes), ("xattrs", self._inodes)):
            db = self._index.dbs[table]
            for key, value in list(txn.cursor(db)):
                plain, own = bytes(value[:-8]), bytes(key)
                if of_be(own[:8]) not in keep or (
                    self._index.sealed and seal(table, own, plain) != value[-8:]
                ):
                    changed += txn.delete(own, db=db)
        return changed

    def _blocks(self, txn: lmdb.Transaction) -> int:
        """Rows, counts and victims. Those that are victims already keep their turns."""
        found = self._found
        ids, named = found.ids[self._kept], self._named[self._kept]
        old_ids, old = found.table("refs", KEY, REFS)
        turns: dict[int, int] = {}
        free = old["number"] == 0
        victims = dict(zip(*(each.tolist() for each in found.table("victims", BE_KEY, KEY)), strict=True))
        for block, turn in zip(old_ids[free].tolist(), old["turn"][free].tolist(), strict=True):
            if victims.get(turn) == block:
                turns[block] = turn
        following = max([*victims, *turns.values()], default=0) + 1
        refs: dict[int, bytes] = {}
        wanted: dict[int, int] = {}
        for block, number in zip(ids.tolist(), named.tolist(), strict=True):
            turn = 0
            if not number:
                turn = turns.get(block) or following
                following += turn == following
                wanted[turn] = block
            refs[block] = Refs(number, turn).pack()
        changed = self._ints(txn, "refs", refs)
        rows = {
            block: row.tobytes() for block, row in zip(ids.tolist(), found.blocks[self._kept], strict=True)
        }
        changed += self._ints(txn, "blocks", rows)
        db = self._index.dbs["victims"]
        for key, value in list(txn.cursor(db)):
            if len(key) != 8 or int_key(wanted.get(of_be(key), 0)) != value:
                changed += txn.delete(bytes(key), db=db)
        for turn, block in wanted.items():
            if victims.get(turn) != block:
                changed += txn.put(be(turn), int_key(block), db=db)
        return changed + self._ints(txn, "damaged", {})

    def _ints(self, txn: lmdb.Transaction, table: str, rows: dict[int, bytes]) -> int:
        return self._replace(txn, table, {int_key(block): row for block, row in rows.items()})

    def _lookups(self, txn: lmdb.Transaction) -> int:
        found, changed = self._found, 0
        kept = found.blocks[self._kept]
        ids = found.ids[self._kept]
        tables: list[tuple[str, np.dtype[np.generic], Callable[[int], bytes]]] = [
            ("digest", DIGEST, lambda at: kept["digest"][at].ljust(16, b"\0")),
            ("head", KEY, lambda at: int_key(int(kept["head"][at]))),
            ("tail", KEY, lambda at: int_key(int(kept["tail"][at]))),
        ]
        for column, kind, key_of in tables:
            db = self._index.dbs[column + "s"]
            keys, owners = found.table(column + "s", kind, KEY)
            for key in found.odd.get(column + "s", ()):
                changed += txn.delete(key, db=db)
            at, known = found.find(owners)
            if len(keys):
                known[known] = self._kept[at[known]]
                known[known] = found.blocks[column][at[known]] == keys[known]
            for key, owner in zip(keys[~known], owners[~known], strict=True):
                raw = key.ljust(16, b"\0") if kind is DIGEST else int_key(int(key))
                changed += txn.delete(raw, int_key(int(owner)) if kind is KEY else b"", db=db)
            if kind is DIGEST:
                lacking = ~np.isin(kept["digest"], keys[known])
            else:
                lacking = (kept["head"] != 0) & ~np.isin(ids, owners[known])
            for at_kept in np.flatnonzero(lacking).tolist():
                changed += txn.put(key_of(at_kept), int_key(int(ids[at_kept])), db=db)
        return changed

    def _figures(self, txn: lmdb.Transaction) -> int:
        found = self._found
        for key in [bytes(key) for key, _ in txn.cursor(self._index.dbs["meta"])]:
            if key not in found.meta:
                txn.delete(key, db=self._index.dbs["meta"])
                self._done.append(f"{key.decode(errors='replace')} is forgotten")
        kept = found.blocks[self._kept]
        files = [inode for inode in self._inodes.values() if stat.S_ISREG(inode.mode)]
        used = self._named[self._kept] > 0
        prints = footprints(kept)
        counters = dict(found.meta.get(b"counters", {})) | {
            "entries": len(files),
            "logical_bytes": sum(inode.size for inode in files),
            "row_bytes": sum(inode.row_bytes for inode in files),
            "blocks": len(kept),
            "stored_bytes": int(kept["raw"][used].sum(dtype=np.int64)),
            "compressed_bytes": int(prints[used].sum()),
            "victim_bytes": int(prints[~used].sum()),
            "corrupt_blocks": 0,
        }
        old = found.meta.get(b"counters", {})
        changed = any(old.get(name, 0) != value for name, value in counters.items())
        if changed:
            txn.put(b"counters", json.dumps(counters).encode(), db=self._index.dbs["meta"])
        rows = {}
        for number, map_bytes in self._maps.items():
            mine = kept["volume"] == number
            rows[number] = VolumeRow(map_bytes, int(prints[mine].sum()), int(mine.sum())).pack()
        return self._ints(txn, "volumes", rows) + int(changed)
