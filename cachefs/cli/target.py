"""Which store a PATH on the command line means, and whether a daemon has it mounted."""

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path

import click

from cachefs.errors import UserError
from cachefs.log import LOG_NAME
from cachefs.mount import mountpoint as places
from cachefs.mount.mountpoint import COMMIT, FSTYPE, Mount
from cachefs.mount.processes import store_served_at


@dataclass(frozen=True, slots=True)
class Target:
    """A store, the live mount of it (if any), and the file in it that was meant ('': all of it)."""

    store: Path
    mount: Mount | None
    name: str = ""

    @property
    def mounted_path(self) -> Path:
        assert self.mount is not None
        return self.mount.path / self.name

    def __str__(self) -> str:
        return str((self.mount.path if self.mount else self.store) / self.name)


def is_store(path: Path) -> bool:
    try:
        return (path / "format").is_file()
    except PermissionError:
        raise UserError(f"{path} belongs to another user; run as its owner") from None
    except OSError:  # its disk does not answer
        return False


def find(path: str | None) -> Target:
    """The target of PATH; without one, the only cachefs mount of this user."""
    if path is None:
        return _only_mount()
    given = places.absolute(path)
    mount = places.mount_above(given)
    if mount is not None:
        name = str(given.relative_to(mount.path))
        return _of_mount(mount, "" if name == "." else name)
    for directory in (given, *given.parents):
        if is_store(directory):
            name = str(given.relative_to(directory))
            return Target(directory, mount_of(directory), "" if name == "." else name)
    if not given.exists() and not given.parent.exists():
        raise UserError(f"{path} does not exist")
    raise UserError(f"{path} is neither in a cachefs mount nor in a store")


def mount_of(store: Path) -> Mount | None:
    """The live mount of ``store``."""
    for mount in reversed(places.mounts()):
        if mount.fstype == FSTYPE and store_of(mount) == store and not places.is_dead(mount):
            return mount
    return None


def store_of(mount: Mount) -> Path | None:
    """The store behind ``mount``: by its name in the mount table, or else by its daemon's files."""
    source = Path(mount.source)
    if source.is_absolute() and is_store(source):
        return source
    return store_served_at(mount.path)


def _of_mount(mount: Mount, name: str) -> Target:
    store = store_of(mount)
    if store is None:
        raise UserError(
            f"the store of the mount at {mount.path} cannot be found; give the store's directory instead"
        )
    # A store can be looked at beside a dead mount of it, as if it were not mounted.
    return Target(store, None if places.is_dead(mount) else mount, name)


def _only_mount() -> Target:
    own = {
        mount.path: mount for mount in places.mounts() if mount.fstype == FSTYPE and mount.user == os.getuid()
    }
    if not own:
        raise UserError("you have no cachefs mount; give a mountpoint or a store")
    if len(own) > 1:
        raise UserError(f"you have several cachefs mounts; say which: {', '.join(map(str, own))}")
    return _of_mount(next(iter(own.values())), "")


def settle(target: Target) -> None:
    """Have a running daemon write down what it holds in memory, so that figures are current.

    Where it cannot (full or broken disk) that is said, and what was committed last is shown.
    """
    if target.mount is None:
        return
    try:
        os.setxattr(target.mount.path, COMMIT, b"")
    except OSError as error:
        if error.errno not in (errno.EIO, errno.ENOSPC):
            raise
        log = target.store / LOG_NAME
        click.echo(
            f"cachefs: {target.mount.path} cannot write to its store ({error.strerror}; see {log}): "
            "what follows is of its last commit",
            err=True,
        )


def print_json(document: object) -> None:
    print(json.dumps(document, indent=2))
