"""A store's directory: made, recognised, locked."""

import errno
import fcntl
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cachefs.store.errors import StoreRefused
from cachefs.store.layout import FORMAT

_MARK = "format"


def is_store(path: Path) -> bool:
    return (path / _MARK).is_file()


def check_format(path: Path) -> None:
    """Raises StoreRefused unless ``path`` is a store that this version can read."""
    if not path.exists():
        raise StoreRefused(f"{path}: no such store")
    if not path.is_dir():
        raise StoreRefused(f"{path}: not a directory; a store is a directory")
    try:
        if not is_store(path):
            raise StoreRefused(f"{path}: not a cachefs store; give an empty or a new directory to make one")
        version = json.loads((path / _MARK).read_text())["cachefs"]
    except PermissionError:
        raise StoreRefused(f"{path}: belongs to another user; run as its owner") from None
    except (ValueError, KeyError, TypeError):
        raise StoreRefused(
            f"{path}: the file '{_MARK}' in it is damaged; restore it or make a new store"
        ) from None
    if not isinstance(version, int) or version > FORMAT:
        raise StoreRefused(
            f"{path}: written by a newer cachefs (format {version}, this one reads up to {FORMAT}); "
            "upgrade cachefs, or make a new store"
        )


def prepare(path: Path) -> bool:
    """Make a store's directory if there is none yet; whether it was made.

    Raises StoreRefused, and then nothing was changed.
    """
    if path.is_dir():
        owner = path.stat().st_uid
        if owner != os.geteuid():
            raise StoreRefused(f"{path}: belongs to another user (uid {owner}); run as its owner")
        # A crash while a store was made leaves the mark under its temporary name.
        if is_store(path) or any(each.name != _MARK + ".tmp" for each in path.iterdir()):
            check_format(path)
            return False
    elif path.exists():
        raise StoreRefused(f"{path}: not a directory; a store is a directory")
    elif not path.parent.is_dir():
        raise StoreRefused(f"{path.parent}: no such directory; make it first")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        path.chmod(0o700)
        _write_mark(path, str(uuid.uuid4()))
    except OSError as error:
        raise StoreRefused(f"{path}: cannot make a store there: {_reason(error)}") from None
    return True


def _write_mark(path: Path, identity: str) -> None:
    mark = path / (_MARK + ".tmp")
    with mark.open("w") as file:
        os.fchmod(file.fileno(), 0o600)
        json.dump({"cachefs": FORMAT, "uuid": identity}, file)
        file.flush()
        os.fsync(file.fileno())
    mark.rename(path / _MARK)


def upgrade(path: Path) -> None:
    """Mark a store of an older format as one of this, before it is written as that."""
    mark = json.loads((path / _MARK).read_text())
    if mark["cachefs"] < FORMAT:
        _write_mark(path, mark.get("uuid") or str(uuid.uuid4()))


def _reason(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "the disk is full"
    return error.strerror or str(error)


class Lock:
    """The store's lock file, held until `release` or the end of the process.

    Raises StoreRefused with who holds it.
    """

    def __init__(self, path: Path, mountpoint: str = "") -> None:
        try:
            self._fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreRefused(f"{path}: cannot be locked: {_reason(error)}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = read_holder(path)
            os.close(self._fd)
            where = f", mounted at {holder['mountpoint']}" if holder.get("mountpoint") else ""
            raise StoreRefused(
                f"{path}: in use by process {holder.get('pid', 'unknown')}{where}; unmount it first"
            ) from None
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps({"pid": os.getpid(), "mountpoint": mountpoint}).encode(), 0)
            # After a power cut it must tell that the store was in use.
            os.fsync(self._fd)
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            os.fsync(directory)
            os.close(directory)
        except OSError as error:
            os.close(self._fd)
            raise StoreRefused(f"{path}: cannot be locked: {_reason(error)}") from None

    def release(self) -> None:
        os.ftruncate(self._fd, 0)
        os.close(self._fd)


@contextmanager
def unused(path: Path) -> Iterator[bool]:
    """Whether nobody has the store open for writing; then nobody can, inside the with block."""
    try:
        fd = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    except OSError as error:
        raise StoreRefused(f"{path}: cannot be read: {_reason(error)}") from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def read_holder(path: Path) -> dict[str, object]:
    """Who holds the store's lock, as it says itself; empty if nobody does."""
    try:
        found = json.loads((path / "lock").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def disk_bytes(path: Path) -> int:
    """What ``du`` says of a store, in bytes."""
    total = 0
    for root, _, files in os.walk(path):
        for name in [".", *files]:
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
