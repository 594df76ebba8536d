"""``cachefs check``: is a store sound; with --repair, make it so."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from cachefs.cli.table import printable
from cachefs.cli.target import Target, find, print_json, settle
from cachefs.errors import UsageError, UserError
from cachefs.sizes import count, format_size

if TYPE_CHECKING:
    from cachefs.store.check import Progress, Report

HELP = """\
Check that a store is sound: that every file's recipe is whole and leads to
blocks that exist, that names, reference counts and figures agree, and that no
page of the databases is damaged. PATH is a mountpoint or a store; without it,
your only cachefs mount. A mount stays in use meanwhile.

With --deep every block is read and compared with its digest.

With --repair, on a store that is not mounted, a file that cannot be returned in
full is removed and named; everything else stays, and what follows from the
files (counts, figures, tables to find blocks by) is rebuilt. Give --deep too,
or damage that nobody has met yet stays.

Exit status: 0 sound (or repaired); 1 something is wrong, a line each; 2 the
check could not run.

\b
Examples:
  cachefs check
  cachefs check --deep /var/lib/cachefs
  cachefs check --deep --repair /var/lib/cachefs
  cachefs check --json ~/kv | jq .findings
"""

REPAIR = "'cachefs check --deep --repair' on the unmounted store removes what is lost"


@click.command("check", help=HELP, short_help="Check a store, and repair it.")
@click.argument("path", required=False)
@click.option("--deep", is_flag=True, help="Read every block and verify it.")
@click.option("--repair", is_flag=True, help="Remove what cannot be returned, rebuild the rest.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document; names are only ever added.")
def command(path: str | None, deep: bool, repair: bool, as_json: bool) -> int:
    try:
        return run(find(path), deep=deep, repair=repair, as_json=as_json)
    except UsageError:
        raise
    except UserError as error:
        error.status = 2
        raise
    except OSError as error:
        raise _CannotRun(f"{error.filename or path}: {error.strerror}") from None


class _CannotRun(UserError):
    status = 2


def run(target: Target, *, deep: bool, repair: bool, as_json: bool) -> int:
    from cachefs.store.check import check
    from cachefs.store.check_repair import repair as repair_store

    if target.name:
        raise UsageError(f"{target} lies in a store; check looks at a whole store or mount")
    if repair and target.mount is not None:
        raise _CannotRun(f"{target.store} is mounted at {target.mount.path}; unmount it to repair it")
    settle(target)
    done: list[str] = []
    with _progress(quiet=as_json) as progress:
        if repair:
            report, done = repair_store(target.store, deep=deep, progress=progress)
        else:
            report = check(target.store, deep=deep, progress=progress)
    if as_json:
        print_json(document(target, report, done))
    else:
        for line in describe(report, done):
            print(printable(line))
    return 0 if report.sound else 1


def document(target: Target, report: "Report", done: list[str]) -> dict[str, Any]:
    return {
        "store": str(target.store),
        "mountpoint": str(target.mount.path) if target.mount else None,
        "sound": report.sound,
        "deep": report.deep,
        "findings": [{"text": each.text, "files": list(each.files)} for each in report.findings],
        "notes": report.notes,
        "repairs": done,
        "entries": report.files,
        "blocks": report.blocks,
        "bytes_read": report.bytes_read,
        "damaged_blocks": len(report.damaged),
    }


def describe(report: "Report", done: list[str]) -> Iterator[str]:
    yield from done
    yield from map(str, report.findings)
    yield from (f"note: {note}" for note in report.notes)
    seen = f"{count(report.files, 'file')}, {count(report.blocks, 'block')}"
    how = f", {format_size(report.bytes_read)} read and verified" if report.deep else ""
    if report.sound:
        yield f"{seen}{how}: {'sound now' if done else 'sound'}"
    else:
        hint = "" if done else f"; {REPAIR}"
        yield f"{seen}{how}: {count(len(report.findings), 'finding')}{hint}"


@contextmanager
def _progress(*, quiet: bool) -> Iterator["Progress"]:
    """A bar on a terminal, nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda step, done, of: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(True),
        Speed(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda step, done, of: bar.update(task, description=step, completed=done, total=of or None)
