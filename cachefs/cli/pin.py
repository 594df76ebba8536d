"""``cachefs pin``: files that eviction leaves alone."""

import os

import click

from cachefs.cli.change import change, files

PIN = "user.cachefs.pin"

HELP = """\
Keep FILEs, and the sidecars that belong to them, from being evicted.

FILE is a path in a mount, or STORE/NAME while the store is not mounted. A
pinned file can still be removed and overwritten.

\b
Examples:
  cachefs pin /mnt/kv/system-prompt.bin
  cachefs pin /var/lib/cachefs/system-prompt.bin      # not mounted
  setfattr -n user.cachefs.pin -v 1 /mnt/kv/system-prompt.bin    # the same
"""


@click.command("pin", help=HELP, short_help="Keep from eviction.")
@click.argument("paths", nargs=-1, required=True, metavar="FILE…")
def command(paths: tuple[str, ...]) -> int:
    return change(
        files(paths),
        lambda target: os.setxattr(target.mounted_path, PIN, b"1"),
        lambda store, name: store.pin(name, True),
    )
