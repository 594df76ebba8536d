"""The stores of each format, and how they were made.

``python tests/data/stores/make.py`` writes format-N.tar.zst, N being the format of this checkout. Run it once
for each new format, before the first release that writes it, and never again: the packs are what older
versions left on people's disks. A pack holds ``store/`` and ``expected.json``: path → SHA-256 and xattrs.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import sys
import tarfile
import tempfile
from pathlib import Path

import lmdb
import zstandard

HERE = Path(__file__).parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[2]))

from cachefs.sizes import MIB  # noqa: E402
from cachefs.store import shrink  # noqa: E402
from cachefs.store.layout import FORMAT  # noqa: E402
from tests.running import Mounted  # noqa: E402
from tests.states import build  # noqa: E402


def contents() -> dict[str, bytes]:
    """Files of every sort that a store keeps in a way of its own."""
    chance = random.Random(1)
    positions = range(96)
    one = [p if p < 64 else p + 1_000 for p in positions]
    text = b"".join(b"%d: the quick brown fox\n" % number for number in range(6_000))
    return {
        "chat-a.bin": build.ggsq(build.packed(positions), build.kv(positions, layers=1, width=64)),
        "chat-b.bin": build.ggsq(build.packed(one), build.kv(positions, layers=1, width=64, keys=one)),
        "slots/transposed.bin": build.ggsq(
            build.packed(positions), build.kv(positions, layers=1, width=64, v="transposed")
        ),
        "slots/session.bin": build.ggsn([1, 2, 3], build.kv(range(3), layers=1, width=64)),
        "slots/deep/er/text": text,
        "noise": chance.randbytes(20_000),
        "pinned.bin": chance.randbytes(5_000),
        "inline": b"short",
        "empty": b"",
        "zeros": bytes(1_000_000) + b"end",
    }


def make(folder: Path) -> None:
    """Fill ``folder`` with ``store`` and ``expected.json``, through a real mount."""
    m = Mounted(folder / "store", folder / "mnt")
    m.path.mkdir()
    m.mount("--max-size", "64M")
    try:
        expected = {}
        for name, data in contents().items():
            path = m.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            xattrs = {"user.note": f"of {name}"} if name != "empty" else {}
            for key, value in xattrs.items():
                os.setxattr(path, key, value.encode())
            expected[name] = {"sha256": hashlib.sha256(data).hexdigest(), "xattrs": xattrs}
        os.setxattr(m.path / "pinned.bin", "user.cachefs.pin", b"1")
        (m.path / "removed").write_bytes(random.Random(2).randbytes(10_000))
        m.remount()
        os.unlink(m.path / "removed")  # its block stays, as a victim
    finally:
        wrong = m.clean_up()
    assert not wrong, wrong
    (m.store / "cachefs.log").unlink()
    (folder / "expected.json").write_text(json.dumps(expected, indent=1))
    # LMDB leaves what was in memory in unused ends of pages.
    shrink.rewrite_index(m.store / "index", 16 * MIB)
    for volume in (m.store / "volumes").iterdir():
        _rewrite_volume(volume)


def _rewrite_volume(path: Path) -> None:
    fresh = path / "fresh"
    fresh.mkdir()
    flags = {b"payloads": True, b"parts": False}
    with lmdb.open(str(path), readonly=True, max_dbs=2) as old, lmdb.open(str(fresh), max_dbs=2) as new:
        new.set_mapsize(64 * MIB)
        for name, integerkey in flags.items():
            source = old.open_db(name, integerkey=integerkey, create=False)
            target = new.open_db(name, integerkey=integerkey)
            with old.begin(db=source) as reader, new.begin(db=target, write=True) as writer:
                writer.cursor().putmulti(reader.cursor())
    (fresh / "data.mdb").rename(path / "data.mdb")
    for name in (path / "lock.mdb", fresh / "lock.mdb"):
        name.unlink(missing_ok=True)
    fresh.rmdir()


def pack(folder: Path, target: Path) -> None:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in [folder / "expected.json", *sorted((folder / "store").rglob("*"))]:
            if path.is_file() and path.name != "lock.mdb":
                info = tarfile.TarInfo(str(path.relative_to(folder)))
                info.size = path.stat().st_size
                tar.addfile(info, io.BytesIO(path.read_bytes()))
    target.write_bytes(zstandard.ZstdCompressor(level=19).compress(raw.getvalue()))
    print(f"{target.name}  {target.stat().st_size} B")


def unpack(name: str, folder: Path) -> dict[str, dict[str, object]]:
    """Put the store of a pack at ``folder/store``; what its files should be."""
    raw = zstandard.ZstdDecompressor().stream_reader((HERE / name).read_bytes()).read()
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        # Older Pythons know no filters; the archive is our own.
        tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (folder / "store").chmod(0o700)
    expected: dict[str, dict[str, object]] = json.loads((folder / "expected.json").read_text())
    return expected


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        make(Path(place))
        pack(Path(place), HERE / f"format-{FORMAT}.tar.zst")
