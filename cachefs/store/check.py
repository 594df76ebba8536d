"""``cachefs check``: is a store sound, whether its daemon runs or not.

Three looks, each only where the one before found that it is safe: at the pages of
the LMDB files (`pages`), at the index (`check_index`), and at the payloads: that
they are there and, with ``deep``, that every block's bytes have its digest. Every
slice of every recipe lies inside a block that exists, so then every file can be
returned whole.

A running daemon writes payloads before the index names them, and deletes them
before their rows. So beside one, strange payloads mean nothing, and a missing one
only if the index still names it in a newer snapshot. After a crash the same holds
for what the next start sweeps.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import lmdb
import numpy as np
import xxhash

from cachefs.sizes import count
from cachefs.store import home
from cachefs.store.blocks import BlockReader, Blocks
from cachefs.store.check_index import Finding, Ids, IndexCheck
from cachefs.store.errors import Damaged, StoreRefused
from cachefs.store.index import Index
from cachefs.store.pages import Pages
from cachefs.store.records import BlockRow, Refs, VolumeRow, int_key
from cachefs.store.volumes import Volume, Volumes

Progress = Callable[[str, int, int], None]
"""Told of a step by name, with bytes done and to do (0 and 0 where they are not known)."""

_BATCH_BYTES = 16 << 20
PART = np.dtype([("block", ">u8"), ("number", ">u4")])


def _quiet(step: str, done: int, of: int) -> None:
    pass


@dataclass
class Report:
    """What a check found. ``notes`` are worth saying, and no fault."""

    deep: bool
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: int = 0
    blocks: int = 0
    bytes_read: int = 0
    damaged: set[int] = field(default_factory=set)
    """Blocks that are missing, or differ from their digests."""
    absent: set[int] = field(default_factory=set)
    """Victims without payloads, as a crash leaves them: no fault, but a repair drops them."""
    lost: dict[int, str] = field(default_factory=dict)
    """Inodes of files that cannot be returned in full, with why."""
    unreadable: list[str] = field(default_factory=list)
    """LMDB environments ("index", "volumes/0001") with damaged pages: nobody may open them."""

    @property
    def sound(self) -> bool:
        return not self.findings


class ReadVolumes(Volumes):
    """The volumes of a store, for reading only."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.by_number = {}

    def add(self, number: int, row: VolumeRow) -> Volume:
        volume = Volume(number, self._path(number), row, readonly=True)
        self.by_number[number] = volume
        return volume


def check(path: Path, *, deep: bool = False, progress: Progress = _quiet) -> Report:
    """Look through the store at ``path``, beside its daemon if it has one. Raises StoreRefused."""
    home.check_format(path)
    report = Report(deep)
    if is_unfinished(path):
        report.notes.append("left unfinished by a crash while it was made; the next mount makes it anew")
        return report
    try:
        with ExitStack() as stack:
            live = not stack.enter_context(home.unused(path))
            _check(stack, path, report, live, progress)
    except lmdb.Error as error:
        raise StoreRefused(f"{path}: cannot be read: {error}") from None
    return report


def is_unfinished(path: Path) -> bool:
    """Whether a store was never more than begun: nothing was written to it yet."""
    index = path / "index" / "data.mdb"
    return not (index.exists() and index.stat().st_size) and not any((path / "volumes").glob("[0-9]*"))


def _check(stack: ExitStack, path: Path, report: Report, live: bool, progress: Progress) -> None:
    progress("pages", 0, 0)
    if not live and not _pages(path, "index", report):
        return
    index = Index(path / "index", None)
    stack.callback(index.close)
    if live and not _live_pages(path, "index", index.env, report):
        return
    volumes = ReadVolumes(path / "volumes")
    stack.callback(volumes.close)
    with index.snapshot() as txn:
        found = IndexCheck(index, txn, lambda step: progress(step, 0, 0))
        found.run()
        for number, row in sorted(found.volumes.items()):
            name = f"volumes/{number:04d}"
            if not (path / name / "data.mdb").exists():
                report.findings.append(Finding(f"{name} is missing"))
            elif live or _pages(path, name, report):
                volume = volumes.add(number, VolumeRow(*(int(each) for each in row.tolist())))
                if live and not _live_pages(path, name, volume.env, report):
                    volume.close()
                    del volumes.by_number[number]
        crashed = not live and bool(home.read_holder(path))
    # Beside a daemon no snapshot may last for as long as it takes to read everything: no page of
    # the index that is given up meanwhile could be used again.
    Payloads(index, volumes, found, report, settled=not live and not crashed, live=live).run(progress)


def _pages(path: Path, name: str, report: Report, txnid: int | None = None) -> bool:
    """Whether LMDB may open an environment."""
    try:
        pages = Pages(path / name / "data.mdb", txnid)
    except OSError as error:
        raise StoreRefused(f"{path / name}: cannot be read: {error.strerror}") from None
    try:
        # Values' own headers count only when they are deleted, and are scattered over the file.
        found = pages.check(values=name == "index" or (report.deep and txnid is None))
    except OSError as error:
        found = [f"cannot be read: {error.strerror}"]
    finally:
        pages.close()
    if found:
        report.unreadable.append(name)
        report.findings += [Finding(f"{name}/data.mdb: {fault}") for fault in found]
    if pages.leaked > 0:
        report.notes.append(f"{name}/data.mdb: {count(pages.leaked, 'page')} neither used nor free")
    return not found


def _live_pages(path: Path, name: str, env: lmdb.Environment, report: Report) -> bool:
    with env.begin() as txn:
        return _pages(path, name, report, txn.id())


class Payloads:
    """Whether every block's payload is where its row says.

    ``settled``: the store was closed in order, so that nothing else may lie there.
    """

    def __init__(self, index: Index, volumes: Volumes, found: IndexCheck, report: Report, *,
                 settled: bool, live: bool = False) -> None:  # fmt: skip
        self._index = index
        self._volumes = volumes
        self._found = found
        self._report = report
        self._settled = settled
        self._live = live
        self._blocks = Blocks(index, volumes)

    def run(self, progress: Progress) -> None:
        found, report = self._found, self._report
        report.damaged.update(found.damaged.tolist())
        broken = {int(name[-4:]) for name in report.unreadable if name.startswith("volumes/")}
        missing: set[int] = set()
        progress("payloads", 0, 0)
        for number in np.unique(found.blocks["volume"]).tolist():
            volume = self._volumes.by_number.get(number)
            if volume is not None:
                missing |= self._missing(volume)
            else:
                missing |= set(found.ids[found.blocks["volume"] == number].tolist())
                if number in broken:
                    self._settled = False
        if self._settled:
            for number, volume in self._volumes.by_number.items():
                if number not in found.blocks["volume"] and (stray := len(volume.ids())):
                    self._say(f"{count(stray, 'payload')} in volume {number} without a block")
        faults = {block for block in missing if self._matters(block)}
        report.absent |= missing - faults
        if faults:
            report.damaged |= faults
            self._say(f"{count(len(faults), 'block')} without a payload")
        if report.deep:
            self._read_all(missing, progress)
        report.lost |= found.lost
        for ino, number in found.files_of(report.damaged).items():
            if ino in found.tree.inodes and ino not in report.lost:
                report.lost[ino] = count(number, "damaged block")
                found.say(f"cannot be returned, {report.lost[ino]}", [ino])
        if len(found.damaged) and not found.files_of(found.damaged.tolist()):
            self._say(f"{count(len(found.damaged), 'damaged block')} still kept that no file names")
        report.findings += found.findings
        report.files = found.counts()["entries"]
        report.blocks = len(found.ids)

    def _say(self, text: str) -> None:
        self._found.say(text)

    def _missing(self, volume: Volume) -> set[int]:
        """Blocks whose payloads are not in their volume; what else lies there is a finding."""
        found = self._found
        mine = found.blocks["volume"] == volume.number
        ids, parts = found.ids[mine], found.blocks["parts"][mine]
        with volume.env.begin() as txn:
            keys = b"".join(txn.cursor(volume.db).iternext(values=False))
            there: Ids = np.frombuffer(keys, np.uint64)
            part_keys = b"".join(txn.cursor(volume.parts).iternext(values=False))
        there = there[there != 0]
        pieces = np.frombuffer(part_keys[: len(part_keys) // 12 * 12], PART)
        pieces = pieces[pieces["block"] != 0]  # the journal of `replace`
        owners, number = np.unique(pieces["block"].astype(np.uint64), return_counts=True)
        split = parts > 0
        whole = np.zeros(len(ids), np.int64)
        at = np.searchsorted(owners, ids)
        at[at == len(owners)] = 0
        if len(owners):
            whole = np.where(owners[at] == ids, number[at], 0)
        short = ids[split & (whole < parts)]
        absent = np.setdiff1d(ids, there)
        stray = np.setdiff1d(there, ids)
        odd = int((whole > parts).sum()) + len(np.setdiff1d(owners, ids))
        # A crash leaves what it was just writing; the next start deletes it.
        newest = int(ids.max()) if len(ids) else 0
        if self._settled and (len(stray) or odd):
            self._say(f"{count(len(stray) + odd, 'payload')} in volume {volume.number} without a block")
        elif not self._live and len(stray):
            old = int((stray < newest).sum())
            if old:
                self._say(f"{count(old, 'payload')} in volume {volume.number} without a block")
            if len(stray) > old:
                self._report.notes.append(
                    f"{count(len(stray) - old, 'block')} left unfinished by a crash, gone with the next mount"
                )
        used = volume.row
        counted = found.volume_counts().get(volume.number, (0, 0))
        if self._settled and (used.used, used.blocks) != counted:
            self._say(
                f"volume {volume.number} counts {used.used} bytes of {used.blocks} blocks, not {counted}"
            )
        return set(absent.tolist()) | set(short.tolist())

    def _matters(self, block: int) -> bool:
        """Whether a payload that was not found is a fault; a victim's may be gone, by a crash or just now."""
        at, known = self._found.find(np.array([block], np.uint64))
        if not self._live:
            return bool(known[0]) and bool(self._found.named[at[0]])
        with self._index.env.begin() as txn:
            refs = txn.get(int_key(block), db=self._index.dbs["refs"])
            row = txn.get(int_key(block), db=self._index.dbs["blocks"])
        if refs is None or row is None or not Refs.unpack(refs).number:
            return False
        return int(self._found.blocks["volume"][at[0]]) == BlockRow.unpack(row).volume

    def _read_all(self, missing: set[int], progress: Progress) -> None:
        """Every block against its digest, in the order in which they were written."""
        found, report = self._found, self._report
        order = np.lexsort((found.ids, found.blocks["volume"]))
        total = int(found.blocks["stored"].sum(dtype=np.int64))
        readable = np.isin(found.blocks["volume"], list(self._volumes.by_number))
        bad: set[int] = set()
        batch: list[int] = []
        size = 0
        for at in order[readable[order]].tolist():
            batch.append(int(found.ids[at]))
            size += int(found.blocks["stored"][at])
            if size >= _BATCH_BYTES:
                bad |= self._read(batch)
                report.bytes_read += size
                progress("reading", report.bytes_read, total)
                batch, size = [], 0
        bad |= self._read(batch)
        report.bytes_read += size
        progress("reading", report.bytes_read, total)
        bad -= missing
        if new := bad - report.damaged:
            self._say(f"{count(len(new), 'block')} unlike the digest")
        report.damaged |= bad

    def _read(self, batch: list[int]) -> set[int]:
        with self._blocks.reader() as reader:
            return {block for block in batch if not is_sound(reader, block) and self._matters_now(block)}

    def _matters_now(self, block: int) -> bool:
        return not self._live or self._matters(block)


def is_sound(reader: BlockReader, block: int) -> bool:
    """Whether a block's bytes have its digest, whatever was verified before."""
    try:
        row = reader.row(block)
        if row is None:
            return False
        return xxhash.xxh3_128_digest(reader.raw(block, verify=False)) == row.digest
    except Damaged:
        return False


def check_open(index: Index, volumes: Volumes, *, settled: bool = True, deep: bool = False) -> Report:
    """The same for a store that this process has open, with nothing pending."""
    report = Report(deep)
    for env in [index.env, *(volume.env for volume in volumes.by_number.values())]:
        with env.begin() as txn:
            place = Path(env.path())
            _pages(place.parent, place.name, report, txn.id())
    with index.snapshot() as txn:
        found = IndexCheck(index, txn)
        found.run()
        Payloads(index, volumes, found, report, settled=settled).run(_quiet)
    return report
