"""What one would take instead: bytes on disk, time to store, time to get back, for the same files."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cachefs.sizes import GIB, MIB
from cachefs.store.home import disk_bytes

from . import client, statefile
from .figures import Bench, Row, say
from .mounts import CacheMount
from .statefile import State

PACKAGES = {
    "btrfs + duperemove": ("btrfs-progs", "duperemove"),
    "borg": ("borgbackup",),
    "restic": ("restic",),
    "casync": ("casync",),
}
PROGRAMS = {
    "btrfs + duperemove": ("mkfs.btrfs", "duperemove"),
    "borg": ("borg",),
    "restic": ("restic",),
    "casync": ("casync",),
}


def missing() -> list[str]:
    """Debian's names of what is not installed."""
    return [p for name in PACKAGES if not _installed(name) for p in PACKAGES[name]]


def _installed(name: str) -> bool:
    return all(shutil.which(program) for program in PROGRAMS[name])


@dataclass(frozen=True)
class Result:
    stored: int
    store_seconds: float
    back_seconds: float


def _run(*command: object, **environment: str) -> None:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, env={**os.environ, **environment}
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]}: {(done.stderr or done.stdout).strip()[-300:]}")


def _timed(function: Callable[[], None]) -> float:
    os.sync()
    start = time.perf_counter()
    function()
    os.sync()
    return time.perf_counter() - start


def _copy(source: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for path in sorted(source.iterdir()):
        with path.open("rb") as file, (target / path.name).open("wb") as out:
            shutil.copyfileobj(file, out, 8 * MIB)


def _cachefs(source: Path, work: Path, out: Path) -> Result:
    with CacheMount(work / "cachefs", 4 * GIB) as mount:

        def store() -> None:
            _copy(source, mount.path)
            directory = os.open(mount.path, os.O_RDONLY)
            os.fsync(directory)  # sync(2) does not reach a FUSE daemon
            os.close(directory)

        stored = _timed(store)
        return Result(mount.disk(), stored, _timed(lambda: _copy(mount.path, out)))


def _plain(source: Path, work: Path, out: Path) -> Result:
    stored = _timed(lambda: _copy(source, work / "copy"))
    return Result(disk_bytes(work / "copy"), stored, _timed(lambda: _copy(work / "copy", out)))


@contextmanager
def _btrfs_mount(work: Path, size: int) -> Iterator[Path]:
    image, path = work / "btrfs.img", work / "btrfs"
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(size)
    _run("mkfs.btrfs", "-q", image)
    _run("mount", "-o", "loop", image, path)
    try:
        yield path
    finally:
        _run("umount", path)


def _btrfs(source: Path, work: Path, out: Path) -> Result:
    size = sum(path.stat().st_size for path in source.iterdir())
    with _btrfs_mount(work, 2 * size + GIB) as path:
        before = _used(path)

        def store() -> None:
            _copy(source, path / "files")
            os.sync()
            _run("duperemove", "-dr", "-b", "4096", "--hashfile", work / "hashes", path / "files")

        stored = _timed(store)
        time.sleep(1)
        os.sync()
        return Result(_used(path) - before, stored, _timed(lambda: _copy(path / "files", out)))


def _used(path: Path) -> int:
    found = os.statvfs(path)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def _borg(source: Path, work: Path, out: Path) -> Result:
    repo = work / "borg"
    environment = {"BORG_BASE_DIR": str(work), "BORG_UNKNOWN_UNENCRYPTED_REPO_ACCESS_IS_OK": "yes"}
    _run("borg", "init", "-e", "none", repo, **environment)
    stored = _timed(lambda: _run("borg", "create", f"{repo}::a", source, **environment))

    def back() -> None:
        _run("sh", "-c", f"cd '{out}' && borg extract '{repo}::a'", **environment)

    return Result(disk_bytes(repo), stored, _timed(back))


def _restic(source: Path, work: Path, out: Path) -> Result:
    repo = work / "restic"
    base = ("restic", "-q", "-r", repo, "--cache-dir", work / "restic-cache")
    _run(*base, "init", RESTIC_PASSWORD="bench")
    stored = _timed(lambda: _run(*base, "backup", source, RESTIC_PASSWORD="bench"))
    back = _timed(lambda: _run(*base, "restore", "latest", "--target", out, RESTIC_PASSWORD="bench"))
    return Result(disk_bytes(repo), stored, back)


def _casync(source: Path, work: Path, out: Path) -> Result:
    store, index = work / "chunks.castr", work / "files.caidx"
    stored = _timed(lambda: _run("casync", "make", f"--store={store}", "--without=all", index, source))
    back = _timed(
        lambda: _run("casync", "extract", f"--store={store}", "--without=all", index, out / "files")
    )
    return Result(disk_bytes(store), stored, back)


RIVALS: dict[str, Callable[[Path, Path, Path], Result]] = {
    "plain directory": _plain,
    "cachefs": _cachefs,
    "btrfs + duperemove": _btrfs,
    "borg": _borg,
    "restic": _restic,
    "casync": _casync,
}


def _source(bench: Bench) -> Path:
    """The files that all get: real chats, or made-up ones."""
    kind = "smol/bf16" if bench.quick else "smol/chats"
    if bench.states is not None and (bench.states / kind).is_dir():
        return bench.states / kind
    folder = bench.folder("rivals-source")
    for i in range(3):
        shape = statefile.Shape(30, 384)
        state: State = statefile.make(shape, [(1, bench.size(3000, 600)), (2 + i, 400)])
        client.plain_save(folder / f"chat{i}.bin", state)
    return folder


def rivals(bench: Bench) -> Iterator[Row]:
    """Three chats with a common prefix in cachefs, and in what else would share it."""
    source = _source(bench)
    total = sum(path.stat().st_size for path in source.iterdir())
    for name, run in RIVALS.items():
        if name in PROGRAMS and not _installed(name):
            say(f"rivals: {name} is not installed (--install does that)")
            continue
        work, out = bench.folder(f"rival-{run.__name__}"), bench.folder("rival-out")
        try:
            found = run(source, work, out)
        except (RuntimeError, OSError) as error:
            say(f"rivals: {name} left out: {error}")
            continue
        finally:
            shutil.rmtree(work, ignore_errors=True)
            shutil.rmtree(out, ignore_errors=True)
        note = f"{found.stored / 1e6:.1f} of {total / 1e6:.1f} MB; store {found.store_seconds:.2f} s, "
        note += f"get back {found.back_seconds:.2f} s"
        details = {"stored": found.stored, "total": total, "store_seconds": found.store_seconds,
                   "back_seconds": found.back_seconds}  # fmt: skip
        yield Row("rivals", f"{name}: saves", [total / found.stored], note=note, details=details)
    say("rivals: zfs-fuse is not looked at (Debian has none)")
