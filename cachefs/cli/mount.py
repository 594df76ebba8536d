"""``cachefs mount``: check everything that can be checked, then start the daemon."""

from pathlib import Path

import click

from cachefs.config import (
    SCRUB_AGE,
    WRITEBACK,
    MountConfig,
    parse_age,
    parse_compress,
    parse_mount_options,
)
from cachefs.errors import UsageError, UserError
from cachefs.mount import daemon
from cachefs.mount import mountpoint as places
from cachefs.mount.allocator import start_with_huge_pages
from cachefs.sizes import default_max_bytes, format_size, parse_max_size

HELP = """\
Mount STORE at MOUNTPOINT and return when the mount is usable.

STORE is made if it is missing or empty; its size stays below --max-size, which
a store remembers. A dead mount at MOUNTPOINT ("Transport endpoint is not
connected") is replaced.

\b
Examples:
  cachefs mount ~/kv-store ~/kv
  cachefs mount --max-size 20G /var/lib/cachefs /mnt/kv
  cachefs mount --compress=off ~/kv-store ~/kv     # nothing is compressed
  cachefs mount --foreground ~/kv-store ~/kv       # under a supervisor
  cachefs mount -o allow_other,max_size=20G ~/kv-store ~/kv
  mount -t fuse.cachefs /var/lib/cachefs /mnt/kv -o max_size=20G

\b
Options of -o, separated by commas:
  max_size=SIZE   foreground   debug   allow_other   keep_torn   log_file=FILE   scrub=AGE
  compress=MODE[:LEVEL]
  fsname=NAME     the name in the mount table (default: the store's path)
  noexec          programs in the mount cannot be run
  writeback=auto|on|off
Of mount(8)'s own options those that do not matter are ignored; nodev, nosuid
and noatime always hold. With allow_other the mount shows to other users, but
files keep mode 0600: only root and their owner can read them.

\b
Signals to the daemon: TERM, INT, HUP unmount cleanly; USR1 writes what all its
tasks and threads are doing to the log.
"""


@click.command("mount", help=HELP, short_help="Mount a store.")
@click.argument("store")
@click.argument("mountpoint")
@click.option(
    "--max-size",
    metavar="SIZE",
    help="The store never takes more than this on disk: 300M, 1.5GiB, 50g. Default: what the store "
    "remembers; for a new one a quarter of the disk's free space, at most 50 GiB.",
)
@click.option("--foreground", "-f", is_flag=True, help="Stay in the foreground and log to standard error.")
@click.option("--allow-other", is_flag=True, help="Let other users into the mount.")
@click.option(
    "--keep-torn",
    is_flag=True,
    help="When a save over an old file was cut off by a kill, keep the torn file "
    "instead of bringing the old one back.",
)
@click.option(
    "--writeback",
    type=click.Choice(WRITEBACK),
    help="Have the kernel gather small writes: the saves of a server without flash attention (-fa off), "
    "tens of thousands of 8 KiB, go three times as fast. But a lack of space shows at fsync or close only, "
    "and there are no extended attributes. "
    "Default: auto, which is on when the last state saved here was such a one.",
)
@click.option(
    "--compress",
    metavar="MODE[:LEVEL]",
    help="idle (default): what is stored is compressed when nobody has read or written for half a minute. "
    "always: at once, in the background of the save. off: not at all. LEVEL is zstandard's, 1 to 19, "
    "default 1; what was compressed earlier can always be read.",
)
@click.option("--fsname", metavar="NAME", help="Name in the mount table. Default: the store's path.")
@click.option(
    "--log-file", metavar="FILE", help="Default: STORE/cachefs.log; in the foreground standard error."
)
@click.option(
    "--scrub",
    metavar="AGE",
    help=f"How often to read every block again, while idle: 7d, 12h, off.  [default: {SCRUB_AGE}]",
)
@click.option("-o", "options", multiple=True, metavar="OPT[,OPT…]", help="The same as in fstab; see above.")
@click.option("--debug", is_flag=True, help="Log in detail.")
def command(
    store: str,
    mountpoint: str,
    max_size: str | None,
    foreground: bool,
    allow_other: bool,
    keep_torn: bool,
    writeback: str | None,
    compress: str | None,
    fsname: str | None,
    log_file: str | None,
    scrub: str | None,
    options: tuple[str, ...],
    debug: bool,
) -> int:
    if click.get_current_context().obj:
        start_with_huge_pages()
    given = parse_mount_options(options)
    size = max_size if max_size is not None else given.get("max_size")
    log = log_file or given.get("log_file")
    gather = writeback or given.get("writeback", "auto")
    if gather not in WRITEBACK:
        raise UsageError(f"-o writeback={gather}: give one of {', '.join(WRITEBACK)}")
    mode, level = parse_compress(compress if compress is not None else given.get("compress", "idle"))
    config = MountConfig(
        store=_path(store, "STORE"),
        mountpoint=_path(mountpoint, "MOUNTPOINT"),
        max_bytes=parse_max_size(size) if size is not None else None,
        foreground=foreground or "foreground" in given,
        debug=debug or "debug" in given,
        allow_other=allow_other or "allow_other" in given,
        keep_torn=keep_torn or "keep_torn" in given,
        noexec="noexec" in given,
        writeback=gather,
        compress=mode,
        compress_level=level,
        fsname=fsname or given.get("fsname", ""),
        log_file=places.absolute(log) if log else None,
        scrub_seconds=parse_age(scrub if scrub is not None else given.get("scrub", SCRUB_AGE)),
    )
    return start(config)


def _path(text: str, what: str) -> Path:
    if not text:
        raise UsageError(f"{what} is empty; give a directory")
    return places.absolute(text)


def start(config: MountConfig) -> int:
    places.check_fuse(config.allow_other)
    launch = daemon.Launch(config, dead=places.check(config.mountpoint, config.store))
    if _is_new(config.store) and config.max_bytes is None:
        bound = default_max_bytes(config.store)
        launch.use_bound(bound)
        launch.note(f"new store {config.store}, at most {format_size(bound)} (--max-size sets another bound)")
    if config.foreground:
        return daemon.run(launch)
    for note in daemon.spawn(launch):
        click.echo(f"cachefs: {note}", err=True)
    return 0


def _is_new(store: Path) -> bool:
    """Whether opening ``store`` makes it."""
    try:
        return not any(store.iterdir())
    except FileNotFoundError:
        return True
    except PermissionError:
        raise UserError(f"the store {store} may not be read by you; run as its owner") from None
    except NotADirectoryError:
        return False  # refused when it is opened
