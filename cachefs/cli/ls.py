"""``cachefs ls``: the entries of one store."""

from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from cachefs.cli.check import REPAIR
from cachefs.cli.table import age, print_table, printable
from cachefs.cli.target import find, print_json, settle
from cachefs.sizes import count, format_size

if TYPE_CHECKING:
    from cachefs.store.reader import Entry

HELP = """\
List the entries: tokens, cells, layers and type of a recognised state; its
size; how much of that only this entry holds, and how much it shares.

PATH is a mountpoint, a store, or a directory in either; without it, your only
cachefs mount.

\b
Examples:
  cachefs ls
  cachefs ls --sort used /mnt/kv
  cachefs ls --json | jq '.entries[] | select(.pinned) | .name'
"""

_ORDERS = {
    "name": lambda entry: entry.name,
    "size": lambda entry: -entry.size,
    "exclusive": lambda entry: -entry.exclusive,
    "used": lambda entry: -entry.last_use,
}
_FIELDS = ("name", "tokens", "cells", "layers", "type", "size", "exclusive", "shared", "pinned")


@click.command("ls", help=HELP, short_help="List entries.")
@click.argument("path", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON document; names are only ever added.")
@click.option("--sort", type=click.Choice(list(_ORDERS)), default="name", show_default=True)
def command(path: str | None, as_json: bool, sort: str) -> int:
    from cachefs.store.check_index import Finding
    from cachefs.store.reader import Reader

    target = find(path)
    settle(target)
    with closing(Reader(target.store)) as reader:
        entries = [entry for entry in reader.entries() if _inside(entry.name, target.name)]
        unreadable = [name for name in reader.unreadable if _inside(name, target.name)]
    if unreadable:
        rows = count(len(unreadable), "damaged row")
        damage = Finding(f"cannot be listed, {rows} of the index", tuple(sorted(unreadable)))
        click.echo(f"cachefs: {printable(str(damage))}; {REPAIR}", err=True)
    entries.sort(key=_ORDERS[sort])
    if as_json:
        mountpoint = str(target.mount.path) if target.mount else None
        documents = [_document(entry) for entry in entries]
        document = {"store": str(target.store), "mountpoint": mountpoint, "entries": documents}
        print_json(document | {"damaged": sorted(unreadable)})
        return bool(unreadable)
    if not entries:
        if not unreadable:
            print(f"{target} holds no entries")
        return bool(unreadable)
    titles = ["name", "tokens", "cells", "layers", "type", "size", "only here", "shared", "used", "pinned"]
    print_table(titles, [_row(entry) for entry in entries], left=("name", "type", "pinned"))
    return bool(unreadable)


def _inside(name: str, directory: str) -> bool:
    return not directory or name == directory or name.startswith(directory + "/")


def _document(entry: "Entry") -> dict[str, Any]:
    return {**{field: getattr(entry, field) for field in _FIELDS}, "last_use_ns": entry.last_use}


def _row(entry: "Entry") -> list[str]:
    return [
        printable(entry.name),
        *("" if number is None else f"{number:,}" for number in (entry.tokens, entry.cells, entry.layers)),
        entry.type or "",
        *(format_size(size) for size in (entry.size, entry.exclusive, entry.shared)),
        age(entry.last_use),
        "yes" if entry.pinned else "",
    ]
