"""``cachefs umount``: take a mount away and wait for its daemon to finish."""

import errno
import os
from pathlib import Path

import click

from cachefs.cli.target import store_of
from cachefs.errors import UserError
from cachefs.mount import mountpoint as places
from cachefs.mount.processes import daemons_of, users_of, wait_for_end

HELP = """\
Unmount MOUNTPOINT and wait until its daemon has written everything and gone,
so that the store can be mounted again at once.

Refuses while files there are open, and says which programs have them. With
--lazy the mount disappears now and the daemon ends with the last open file.
A dead mount ("Transport endpoint is not connected") is taken away as well.

\b
Examples:
  cachefs umount ~/kv
  cachefs umount --lazy ~/kv
"""


@click.command("umount", help=HELP, short_help="Unmount.")
@click.argument("mountpoint")
@click.option("--lazy", "-z", is_flag=True, help="Do not wait for open files.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the daemon to end.",
)
def command(mountpoint: str, lazy: bool, timeout: float) -> None:
    path = places.absolute(mountpoint)
    os.chdir("/")  # so as not to be the one that keeps it busy
    mount = places.mounted_at(path)
    if mount is None:
        above = places.mount_above(path)
        hint = f"; the mount is at {above.path}" if above else ""
        raise UserError(f"nothing is mounted at {path}{hint}")
    if mount.fstype != places.FSTYPE:
        raise UserError(f"{path} is no cachefs mount but {mount.source} ({mount.fstype}); use umount for it")
    if not lazy and places.is_dead(mount):
        places.clear_dead(mount)
        return
    store = store_of(mount)
    daemons = daemons_of(store) if store else []
    try:
        places.unmount(path, lazy=lazy)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise UserError(_busy(path)) from None
        raise UserError(f"{path} cannot be unmounted: {error.strerror}") from None
    if lazy:
        return
    left = wait_for_end(daemons, timeout)
    if left:
        raise UserError(
            f"{path} is unmounted, but its daemon (pid {left[0]}) is still writing to {store}; wait for it"
        )


def _busy(path: Path) -> str:
    users = users_of(path)
    if not users:
        return f"{path} is busy: a program of another user has files open there; --lazy unmounts all the same"
    shown = ", ".join(map(str, users[:5])) + (f" and {len(users) - 5} more" if len(users) > 5 else "")
    return f"{path} is busy: {shown} has files open there; stop it, or use --lazy"
