"""Whether one snapshot of the index agrees with itself, counted from scratch.

Blocks may be a million: what is known of them lies in numpy arrays, ordered by
id. Files and names are few. Measured: 5 s and 500 MB for a million blocks.
"""

import json
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import lmdb
import numpy as np
import numpy.typing as npt

from cachefs.sizes import count
from cachefs.store import recipe
from cachefs.store.errors import Damaged
from cachefs.store.index import Index
from cachefs.store.layout import footprint
from cachefs.store.recipe import Recipe
from cachefs.store.records import Dirent, Inode, be_pair, of_be
from cachefs.store.tree import ROOT

Ids = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.void]

BLOCK = np.dtype(
    [("digest", "S16"), ("volume", "<u2"), ("codec", "u1"), ("kind", "u1"), ("raw", "<u4"), ("stored", "<u4"),
     ("width", "<u4"), ("rows", "<u4"), ("parts", "<u2"), ("head", "<u8"), ("tail", "<u8"), ("hint", "<u8")]
)  # fmt: skip
REFS = np.dtype([("number", "<u4"), ("turn", "<u8")])
VOLUME = np.dtype([("map_bytes", "<u8"), ("used", "<u8"), ("blocks", "<u8")])
KEY, BE_KEY, DIGEST = np.dtype("=u8"), np.dtype(">u8"), np.dtype("S16")

_SHOWN = 20
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, and the files concerned, by path."""

    text: str
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        more = f" and {len(self.files) - _SHOWN} more" if len(self.files) > _SHOWN else ""
        return self.text + (": " + ", ".join(map(repr, self.files[:_SHOWN])) + more if self.files else "")


@dataclass
class Tree:
    """The tables of the tree, rows that are damaged left out."""

    inodes: dict[int, Inode] = field(default_factory=dict)
    dirents: dict[bytes, Dirent] = field(default_factory=dict)
    cookies: dict[bytes, bytes] = field(default_factory=dict)
    orphans: set[int] = field(default_factory=set)
    uses: set[bytes] = field(default_factory=set)

    def path(self, ino: int) -> str:
        """The path of an inode as far as it is known."""
        parts: list[str] = []
        for _ in range(1000):
            if ino == ROOT:
                return "/".join(reversed(parts))
            inode = self.inodes.get(ino)
            value = self.cookies.get(be_pair(inode.parent, inode.cookie)) if inode else None
            if inode is None or value is None:
                break
            parts.append(value[20:].decode(errors="backslashreplace"))
            ino = inode.parent
        return "/".join([f"inode {ino}", *reversed(parts)])


def _quiet(step: str) -> None:
    pass


class IndexCheck:
    """One snapshot, looked through by `run`; then `findings` says what is wrong in it.

    ``lost`` are the inodes of files that cannot be returned in full by what the index
    says; ``blocks`` every block's row, ``named`` how many records of recipes name it.
    """

    def __init__(self, index: Index, txn: lmdb.Transaction, step: Callable[[str], None] = _quiet) -> None:
        self._index = index
        self._txn = txn
        self._step = step
        self.findings: list[Finding] = []
        self.tree = Tree()
        self.lost: dict[int, str] = {}
        self.ids: Ids = np.empty(0, np.uint64)
        self.blocks: Rows = np.empty(0, BLOCK)
        self.named: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self.damaged: Ids = np.empty(0, np.uint64)
        self.volumes: dict[int, Any] = {}
        self.meta: dict[bytes, Any] = {}
        self.odd: dict[str, set[bytes]] = {}
        """Keys of rows that have not their table's size."""

    def run(self) -> None:
        self._meta()
        self._step("blocks")
        self.damaged, _ = self.table("damaged", KEY, BE_KEY)
        self.ids, self.blocks = self.table("blocks", KEY, BLOCK)
        self.named = np.zeros(len(self.ids), np.int64)
        self._step("tree")
        self._read_tree()
        self._step("recipes")
        self._recipes()
        self._check_tree()
        self._step("references")
        self._references()
        self._step("digests and keys")
        self._lookups()
        self._figures()
        self._quarantined()

    # -- reading

    def _pairs(self, name: str) -> Iterator[tuple[bytes, bytes]]:
        db = self._index.dbs.get(name)
        if db is not None:
            yield from cast(Iterator[tuple[bytes, bytes]], self._txn.cursor(db))

    def _keys(self, name: str) -> Iterator[bytes]:
        return cast(Iterator[bytes], self._txn.cursor(self._index.dbs[name]).iternext(values=False))

    def say(self, text: str, inos: Iterable[int] = ()) -> None:
        self.findings.append(Finding(text, tuple(sorted(map(self.tree.path, inos)))))

    def table(self, name: str, key: np.dtype[Any], row: np.dtype[Any]) -> tuple[Any, Any]:
        """Keys and values of a table of fixed-size rows; others are a finding and left out."""
        keys, rows, bad = [], [], 0
        some: list[tuple[bytes, bytes]] = []

        def take() -> None:
            keys.append(np.frombuffer(b"".join(k for k, _ in some), key))
            rows.append(np.frombuffer(b"".join(v for _, v in some), row))
            some.clear()

        for pair in self._pairs(name):
            if len(pair[0]) != key.itemsize or len(pair[1]) != row.itemsize:
                bad += 1
                self.odd.setdefault(name, set()).add(pair[0])
                continue
            some.append(pair)
            if len(some) == _CHUNK:
                take()
        take()
        if bad:
            self.say(f"{count(bad, 'damaged row')} of {name}")
        return np.concatenate(keys), np.concatenate(rows)

    def _rows(self, name: str, strange: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """The sound rows of a table of the tree; the keys of the others go into ``strange``."""
        last = b""
        for key, value in self._pairs(name):
            try:
                plain = self._index.from_disk(name, key, value)
                if len(key) < 8 or key <= last:
                    raise Damaged("out of order")
            except (OSError, Damaged):
                strange.append(key)
                continue
            last = key
            yield key, plain

    def _meta(self) -> None:
        for key, value in self._pairs("meta"):
            try:
                self.meta[key] = json.loads(value)
            except ValueError:
                self.say(f"{key.decode(errors='replace')} in the index cannot be read")
        counters = self.meta.get(b"counters", {})
        if not isinstance(counters, dict) or not all(isinstance(n, int) for n in counters.values()):
            self.say("the figures of stats cannot be read")
            self.meta[b"counters"] = {}
        if not isinstance(self.meta.get(b"max_bytes", 1), int):
            self.say("the maximum size cannot be read")
            del self.meta[b"max_bytes"]
        numbers, rows = self.table("volumes", KEY, VOLUME)
        self.volumes = dict(zip(numbers.tolist(), rows, strict=True))

    # -- the tree

    def _read_tree(self) -> None:
        tree, bad = (
            self.tree,
            {name: list[bytes]() for name in ("inodes", "dirents", "cookies", "xattrs", "about")},
        )
        tree.inodes = {of_be(key): Inode.unpack(value) for key, value in self._rows("inodes", bad["inodes"])}
        tree.dirents = {key: Dirent.unpack(value) for key, value in self._rows("dirents", bad["dirents"])}
        tree.cookies = {key: value for key, value in self._rows("cookies", bad["cookies"]) if len(value) > 20}
        tree.orphans = {of_be(key) for key in self._keys("orphans")}
        tree.uses = set(self._keys("uses"))
        for key in bad["inodes"]:
            self.lost[of_be(key[:8])] = "its inode is damaged"
        for name in ("xattrs", "about"):
            strange = Counter(of_be(key[:8]) for key, _ in self._rows(name, bad[name]))
            if unknown := strange.keys() - tree.inodes.keys():
                self.say(f"{name} of {count(len(unknown), 'inode')} that do not exist")
        for name, keys in bad.items():
            if keys and name != "inodes":
                self.say(f"{count(len(keys), 'damaged row')} of {name}", {of_be(key[:8]) for key in keys})

    def _check_tree(self) -> None:
        tree = self.tree
        subdirs: Counter[int] = Counter()
        linked = {ROOT}
        cookies = {}
        for key, dirent in tree.dirents.items():
            parent, name = of_be(key[:8]), key[8:]
            cookies[be_pair(parent, dirent.cookie)] = dirent.pack() + name
            subdirs[parent] += dirent.kind == stat.S_IFDIR
            linked.add(dirent.ino)
            inode = tree.inodes.get(dirent.ino)
            shown = name.decode(errors="backslashreplace")
            if inode is None:
                # No file may go by another's bytes: without the inode nothing says which are its own.
                self.lost[dirent.ino] = "its inode is missing"
                self.say(f"the name {shown!r} leads to inode {dirent.ino}, which does not exist")
            elif (inode.parent, inode.cookie) != (parent, dirent.cookie):
                self.say(f"the name {shown!r} leads to inode {dirent.ino}, which has another", [dirent.ino])
            elif stat.S_IFMT(inode.mode) != dirent.kind:
                self.say(f"the name {shown!r} is of another kind than its inode", [dirent.ino])
        if wrong := {of_be(key[:8]) for key, _ in cookies.items() ^ tree.cookies.items()}:
            self.say("names in the order of listing differ from names", wrong & tree.inodes.keys())
        nameless = tree.inodes.keys() - linked
        if wrong := tree.orphans ^ nameless:
            self.say(f"{count(len(wrong), 'inode')} without a name and no orphan, or the reverse", wrong)
        for ino, inode in tree.inodes.items():
            nlink = 2 + subdirs[ino] if stat.S_ISDIR(inode.mode) else 1
            if inode.nlink != (0 if ino in nameless else nlink):
                self.say(f"a link count is {inode.nlink}", [ino])
        expected = {be_pair(i.last_use, ino) for ino, i in self._files()}
        if wrong := {of_be(key[8:16]) for key in expected ^ tree.uses}:
            self.say("the order of eviction is not that of last uses", wrong)
        if tree.inodes and ROOT not in tree.inodes:
            self.say("the root directory is missing")
        for ino in sorted(self.lost):
            self.say(f"cannot be returned, {self.lost[ino]}", [ino])

    def _files(self) -> Iterator[tuple[int, Inode]]:
        return ((n, i) for n, i in self.tree.inodes.items() if stat.S_ISREG(i.mode) and i.nlink)

    # -- recipes

    def recipes(self, bad: dict[int, str]) -> Iterator[tuple[int, Recipe]]:
        """Every file's recipe; those with damaged or missing pages go into ``bad`` instead."""
        ino, pages = -1, list[bytes]()

        def close() -> Iterator[tuple[int, Recipe]]:
            if ino >= 0 and ino not in bad:
                yield ino, Recipe.from_pages(pages)

        for key, value in self._pairs("recipes"):
            if len(key) != 12:
                bad[of_be(key[:8])] = "its recipe is damaged"
                continue
            if of_be(key[:8]) != ino:
                yield from close()
                ino, pages = of_be(key[:8]), []
            try:
                plain = self._index.from_disk("recipes", key, value)
            except OSError:
                plain = b"?"
            if len(plain) % 24 or of_be(key[8:]) != len(pages):
                bad[ino] = "its recipe is damaged"
            pages.append(plain)
        yield from close()

    def _recipes(self) -> None:
        bad: dict[int, str] = {}
        covered: dict[int, int] = {}
        strange = 0
        for ino, each in self.recipes(bad):
            covered[ino] = each.size
            if ino not in self.tree.inodes:
                strange += ino not in self.lost
                continue
            if fault := self._judge(each):
                self.lost[ino] = fault
        for ino, inode in self.tree.inodes.items():
            if ino in bad:
                self.lost[ino] = bad[ino]
            elif stat.S_ISREG(inode.mode) and inode.size != covered.get(ino, 0) and inode.nlink:
                self.lost[ino] = f"it has {inode.size} bytes and a recipe of {covered.get(ino, 0)}"
        strange += len(bad.keys() - self.tree.inodes.keys() - self.lost.keys())
        if strange:
            self.say(f"{count(strange, 'recipe')} of inodes that do not exist")

    def _judge(self, each: Recipe) -> str:
        """Count the blocks of a recipe; what keeps it from being followed."""
        kinds, lengths, a, b = recipe.columns(each.records)
        slices = (kinds == recipe.SLICE) | (kinds == recipe.PART)
        at, known = self.find(a[slices])
        if known.any():
            np.add.at(self.named, at[known], 1)
        if (kinds > recipe.PART).any():
            return "its recipe is damaged"
        if not known.all():
            return count(len(np.unique(a[slices][~known])), "missing block")
        bands = np.flatnonzero(kinds == recipe.BAND)
        parts = (b[bands] >> np.uint64(48)).astype(np.int64)
        rows = np.ones(len(kinds), np.uint64)
        inside = np.repeat(bands + 1, parts) + _within(parts)
        if (inside >= len(kinds)).any() or not np.array_equal(inside, np.flatnonzero(kinds == recipe.PART)):
            return "its recipe is damaged"
        rows[inside] = np.repeat(a[bands], parts)
        room = self.blocks["raw"][at].astype(np.uint64)
        if (rows == 0).any() or (((b + lengths) * rows)[slices] > room).any():
            return "a slice lies outside of its block"
        return ""

    def find(self, ids: Ids) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Where blocks lie in `ids`, and whether they exist."""
        at = np.searchsorted(self.ids, ids)
        at[at == len(self.ids)] = 0
        known = self.ids[at] == ids if len(self.ids) else np.zeros(len(ids), bool)
        return at, known

    def files_of(self, blocks: Collection[int]) -> dict[int, int]:
        """Inodes whose recipes name one of these blocks, with how many of them each."""
        wanted = np.array(sorted(blocks), np.uint64)
        found: dict[int, int] = {}
        if len(wanted):
            # A snapshot of its own: the one looked through may have ended long ago.
            with self._index.snapshot() as now:
                for ino, each in IndexCheck(self._index, now).recipes({}):
                    if number := int(np.isin(each.blocks()[0], wanted).sum()):
                        found[ino] = number
        return found

    # -- blocks

    def _references(self) -> None:
        ids, refs = self.table("refs", KEY, REFS)
        if len(ids) != len(self.ids) or (ids != self.ids).any():
            self.say(f"{count(len(np.setxor1d(ids, self.ids)), 'block')} with a row or a count, not both")
        at, known = self.find(ids)
        counted = np.zeros(len(ids), np.int64)
        counted[known] = self.named[at[known]]
        if wrong := int((refs["number"] != counted).sum()):
            self.say(count(wrong, "wrong reference count"))
        turns, owners = self.table("victims", BE_KEY, KEY)
        free = refs["number"] == 0
        order = np.argsort(refs["turn"][free], kind="stable")
        expected = refs["turn"][free][order], ids[free][order]
        if len(turns) != len(order) or (turns != expected[0]).any() or (owners != expected[1]).any():
            self.say("the blocks that may be deleted are not those without references")

    def _lookups(self) -> None:
        """Digests and row keys must lead to blocks that have them.

        Of two blocks with one digest, as after damage, only the newer is found by it.
        """
        keys, owners = self.table("digests", DIGEST, KEY)
        at, known = self.find(owners)
        if len(keys):
            known[known] = self.blocks["digest"][at[known]] == keys[known]
        if not known.all():
            self.say(f"{count(int((~known).sum()), 'digest')} leading to other blocks")
        for name, column in (("heads", "head"), ("tails", "tail")):
            keys, owners = self.table(name, KEY, KEY)
            have = self.blocks["head"] != 0
            at, known = self.find(owners)
            if len(keys):
                known[known] = self.blocks[column][at[known]] == keys[known]
            wrong = int((~known).sum()) + abs(int(have.sum()) - int(known.sum()))
            if wrong:
                self.say(f"{name} missing or leading to other blocks: {wrong:,}")

    def counts(self) -> dict[str, int]:
        """What the counters should say."""
        files = [inode for _, inode in self._files()]
        used = self.named > 0
        prints = footprints(self.blocks)
        return {
            "entries": len(files),
            "logical_bytes": sum(inode.size for inode in files),
            "row_bytes": sum(inode.row_bytes for inode in files),
            "blocks": len(self.ids),
            "stored_bytes": int(self.blocks["raw"][used].sum(dtype=np.int64)),
            "compressed_bytes": int(prints[used].sum()),
            "victim_bytes": int(prints[~used].sum()),
            "corrupt_blocks": len(self.damaged),
        }  # fmt: skip

    def volume_counts(self) -> dict[int, tuple[int, int]]:
        """Volume → bytes (footprints) and blocks that it should hold."""
        prints = footprints(self.blocks)
        out = {}
        for number in np.unique(self.blocks["volume"]).tolist():
            mine = self.blocks["volume"] == number
            out[number] = int(prints[mine].sum()), int(mine.sum())
        return out

    def _figures(self) -> None:
        counters = self.meta.get(b"counters", {})
        for name, value in self.counts().items():
            if counters.get(name, 0) != value:
                self.say(f"stats say {counters.get(name, 0)} {name}, counted are {value}")
        counted = self.volume_counts()
        for number in self.volumes.keys() | counted.keys():
            row = self.volumes.get(number)
            if row is None:
                self.say(f"{count(counted[number][1], 'block')} in volume {number}, which does not exist")
            elif (int(row["used"]), int(row["blocks"])) != counted.get(number, (0, 0)):
                self.say(f"volume {number} is said to hold {int(row['used'])} bytes of {int(row['blocks'])} "
                         f"blocks, counted are {counted.get(number, (0, 0))}")  # fmt: skip

    def _quarantined(self) -> None:
        if len(self.damaged) and not self.find(self.damaged)[1].all():
            self.say("blocks that do not exist are noted as damaged")


def footprints(blocks: Rows) -> npt.NDArray[np.int64]:
    """`footprint` of each block."""
    sizes, back = np.unique(blocks["stored"], return_inverse=True)
    return np.array([footprint(size) for size in sizes.tolist()], np.int64)[back]


def _within(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
