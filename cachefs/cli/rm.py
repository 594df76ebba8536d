"""``cachefs rm``: remove files, mounted or not."""

import os
import sys
from contextlib import closing

import click

from cachefs.cli.change import change, files
from cachefs.cli.target import Target, find, settle
from cachefs.errors import UsageError
from cachefs.sizes import format_size

HELP = """\
Remove FILEs. Their space is given up lazily: what a later save repeats is
found again until the space is needed.

FILE is a path in a mount, or STORE/NAME while the store is not mounted. With
--all, PATH is a mountpoint, a store or a directory in either (default: your
only cachefs mount), and all files in it go, pinned ones too; directories stay.

Of a whole store that is not mounted, --all leaves nothing of the files in the
store: neither content nor names. It does not wipe the disk: what its filesystem,
a snapshot or an SSD keeps of deleted files is kept.

\b
Examples:
  cachefs rm /mnt/kv/old.bin /mnt/kv/old.bin.meta
  cachefs rm --all /mnt/kv
  cachefs umount /mnt/kv && cachefs rm --all --yes /var/lib/cachefs
"""


@click.command("rm", help=HELP, short_help="Remove files.")
@click.argument("paths", nargs=-1, metavar="FILE…")
@click.option("--all", "everything", is_flag=True, help="Remove all files in PATH.")
@click.option("--yes", "-y", is_flag=True, help="With --all: do not ask.")
def command(paths: tuple[str, ...], everything: bool, yes: bool) -> int:
    if everything:
        if len(paths) > 1:
            raise UsageError("rm --all takes one PATH")
        return _remove_all(find(paths[0] if paths else None), yes)
    if not paths:
        raise UsageError("name the files to remove, or say --all")
    return _remove(files(paths))


def _remove(targets: list[Target]) -> int:
    return change(
        targets, lambda target: os.unlink(target.mounted_path), lambda store, name: store.remove(name)
    )


def _remove_all(target: Target, yes: bool) -> int:
    targets = _all(target, yes)
    if target.name:
        return _remove(targets)
    if target.mount is None:
        return change([target], lambda _: None, lambda store, _: store.remove_all())
    status = _remove(targets)
    click.echo(
        "cachefs: removed; what they held lies in the store until the space is needed. To leave nothing: "
        f"cachefs umount {target.mount.path} && cachefs rm --all {target.store}",
        err=True,
    )
    return status


def _all(target: Target, yes: bool) -> list[Target]:
    from cachefs.store.reader import Reader

    settle(target)
    inside = target.name + "/" if target.name else ""
    with closing(Reader(target.store)) as reader:
        entries = [e for e in reader.entries() if e.name == target.name or e.name.startswith(inside)]
        damaged = [n for n in reader.unreadable if n == target.name or n.startswith(inside)]
    targets = [Target(target.store, target.mount, name) for name in (*(e.name for e in entries), *damaged)]
    if not targets or yes:
        return targets
    if not sys.stdin.isatty():
        raise UsageError("rm --all asks before it removes; without a terminal add --yes")
    pinned = sum(entry.pinned for entry in entries)
    size = format_size(sum(entry.size for entry in entries))
    also = f", {pinned} of them pinned" if pinned else ""
    click.confirm(f"Remove {len(targets)} files ({size}{also}) from {target}?", abort=True, err=True)
    return targets
