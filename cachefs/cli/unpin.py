"""``cachefs unpin``: undo ``cachefs pin``."""

import errno
import os

import click

from cachefs.cli.change import change, files
from cachefs.cli.pin import PIN
from cachefs.cli.target import Target

HELP = """\
Let pinned FILEs be evicted again. A file that is not pinned is left as it is.

\b
Examples:
  cachefs unpin /mnt/kv/system-prompt.bin
  cachefs unpin /mnt/kv/*.bin
"""


@click.command("unpin", help=HELP, short_help="Allow eviction.")
@click.argument("paths", nargs=-1, required=True, metavar="FILE…")
def command(paths: tuple[str, ...]) -> int:
    return change(files(paths), _unpin, lambda store, name: store.pin(name, False))


def _unpin(target: Target) -> None:
    try:
        os.removexattr(target.mounted_path, PIN)
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
