"""A bit of a store's files flipped, and everything that may be done with the store afterwards.

Each trial runs in a process of its own: LMDB follows pages blindly, and what it does on a damaged
one (SIGSEGV, SIGBUS, SIGABRT, a loop without end) must be seen, not suffered.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from cachefs.errors import UserError
from cachefs.sizes import MIB
from cachefs.states import Cutter
from cachefs.store import Damaged, Store
from cachefs.store.check import check
from cachefs.store.check_repair import repair
from cachefs.store.records import be
from cachefs.store.tree import PIN, ROOT

from ..states import build
from .filling import add, chunks, content, noise, remove

SECONDS = 60


def known_files(seed: int = 0) -> dict[str, bytes]:
    """Files of all kinds: rows with a common beginning, noise, text, many small chunks, tiny, empty."""
    positions = list(range(400))

    def chat(branch: int) -> bytes:
        keys = [p if p < 300 else p + branch * 10_000 for p in positions]
        return build.ggsq(build.packed(positions), build.kv(positions, width=256, keys=keys, layers=2))

    chance = random.Random(seed)
    return {
        **{f"chat{n}.bin": chat(n) for n in range(3)},
        "noise": noise(500_000, 1),
        "noise2": noise(500_000, 1)[:300_000] + noise(100_000, 2),
        "text": b"".join(b"%d," % n for n in range(40_000)),
        "dir/small": b"".join(noise(chance.randrange(65, 400), n) for n in range(150)),
        "dir/tiny": b"forty-two bytes that live in the recipe ...",
        "dir/empty": b"",
        **{f"dir/f{n}": noise(3000, n) for n in range(30)},
    }


def make_template(path: Path) -> dict[str, bytes]:
    """A store with these files and some history (victims, free pages), closed in order."""
    files = known_files()
    store = Store.open(path, 64 * MIB)
    parent = store.tree.create(ROOT, b"dir", 0o40700, 0, 0)[0]
    for round in range(2):  # the second time over what the first one left
        for name, data in files.items():
            folder, _, last = name.rpartition("/")
            if round:
                remove(store, last.encode(), parent if folder else ROOT)
            cutter = Cutter(target=16 << 10)
            size = 200 if name == "dir/small" else 16 << 10
            cut = [*cutter.feed(data), *cutter.finish()] if name.startswith("chat") else chunks(data, size)
            ino = add(store, last.encode(), cut, parent if folder else ROOT)
            store.index.put("about", be(ino), json.dumps({"tokens": 400}).encode())
            store.commit()
        for n in range(20):
            add(store, b"gone%d" % n, noise(20_000, 100 + n + 50 * round))
        store.commit()
        for n in range(20):
            remove(store, b"gone%d" % n)
        store.commit()
        store.writer.purge(100_000)
    store.tree.set_xattr(store.resolve("noise")[2], PIN, b"1")
    store.close()
    return files


@dataclass(frozen=True)
class Flip:
    """A bit of a file of the store."""

    file: str
    byte: int
    bit: int

    @classmethod
    def choose(cls, template: Path, seed: int) -> Flip:
        """Half of them in the index; in a volume half in tree pages and the heads of values."""
        chance = random.Random(seed)
        files = sorted(str(each.relative_to(template)) for each in template.glob("*/**/data.mdb"))
        index = [each for each in files if each.startswith("index")]
        file = chance.choice(index if chance.random() < 0.5 else files)
        size = (template / file).stat().st_size
        byte = chance.randrange(size)
        if chance.random() < 0.3:  # headers, where a bit does most
            byte = byte // 4096 * 4096 + chance.randrange(64)
        return cls(file, byte, chance.randrange(8))

    def apply(self, store: Path) -> None:
        with (store / self.file).open("r+b") as file:
            file.seek(self.byte)
            old = file.read(1)[0]
            file.seek(self.byte)
            file.write(bytes([old ^ 1 << self.bit]))


def read_all(store: Store, files: dict[str, bytes]) -> Counter[str]:
    """How the files are: whole, an error, gone. AssertionError for other bytes."""
    out: Counter[str] = Counter()
    for name, data in files.items():
        try:
            got = content(store, store.resolve(name)[2])
        except UserError:
            out["gone"] += 1
        except (OSError, Damaged):
            out["error"] += 1
        else:
            assert got == data, f"{name}: wrong bytes"
            out["whole"] += 1
    return out


def trial(store: Path, files: dict[str, bytes]) -> dict[str, int]:
    """What a flip did: found by the check, files lost to it."""
    report = check(store, deep=True)
    out = {"found": int(not report.sound), "refused": 0, "error": 0, "gone": 0, "lost": 0}
    before = store.with_name("copy")
    shutil.copytree(store, before)
    try:
        opened = Store.open(before)
    except UserError:
        out["refused"] = 1
    else:
        seen = read_all(opened, files)
        out["error"], out["gone"] = seen["error"], seen["gone"]
        try:
            add(opened, b"new", noise(200_000, 7))
            opened.commit()
            opened.writer.purge(1 << 20)
            assert content(opened, opened.resolve("new")[2]) == noise(200_000, 7)
            seen = read_all(opened, files)
        finally:
            opened.close()
        if seen["error"] + seen["gone"]:
            assert out["found"], "the check saw nothing wrong"
    fixed, done = repair(store, deep=True, progress=lambda step, at, of: None)
    assert fixed.sound, ([str(each) for each in fixed.findings], done)
    assert bool(done) == bool(out["found"]), done
    opened = Store.open(store)
    try:
        left = read_all(opened, files)
        out["lost"] = left["gone"]
        assert not left["error"]
        add(opened, b"new", noise(200_000, 7))
        opened.commit()
        opened.writer.purge(1 << 20)
        assert read_all(opened, files) == left
    finally:
        opened.close()
    after = check(store, deep=True)
    assert after.sound, [str(each) for each in after.findings]
    return out


def in_a_child(store: Path, files: dict[str, bytes]) -> dict[str, int] | str:
    """`trial`, or how it ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(SECONDS)
            try:
                answer: object = trial(store, files)
            except Exception:
                answer = traceback.format_exc()
            os.write(writer, json.dumps(answer).encode()[:60_000])
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    result: dict[str, int] | str = json.loads(answer) if answer else "ended without an answer"
    return result
