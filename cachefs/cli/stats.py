"""``cachefs stats``: the figures of one store."""

from contextlib import closing
from typing import Any

import click

from cachefs.cli.table import age, printable
from cachefs.cli.target import find, print_json, settle
from cachefs.sizes import format_size

HELP = """\
Show how much a store holds, shares and has evicted.

PATH is a mountpoint or a store; without it, your only cachefs mount. Works
with and without a running daemon.

\b
Examples:
  cachefs stats
  cachefs stats /mnt/kv
  cachefs stats --json /var/lib/cachefs | jq .dedup_ratio
"""


@click.command("stats", help=HELP, short_help="Figures of a store.")
@click.argument("path", required=False)
@click.option("--json", "as_json", is_flag=True, help="One JSON document; names are only ever added.")
def command(path: str | None, as_json: bool) -> None:
    figures = collect(path)
    if as_json:
        print_json(figures)
        return
    lines = describe(figures)
    width = max(len(title) for title, _ in lines)
    for title, text in lines:
        print(f"{title:<{width}}  {text}")


def collect(path: str | None) -> dict[str, Any]:
    from cachefs.store.reader import Reader

    target = find(path)
    settle(target)
    with closing(Reader(target.store)) as reader:
        figures = dict(reader.stats())
    figures["mountpoint"] = str(target.mount.path) if target.mount else None
    return figures


def describe(figures: dict[str, Any]) -> list[tuple[str, str]]:
    def size(name: str) -> str:
        return format_size(figures[name])

    def ratio(name: str) -> str:
        return f"{figures[name + '_ratio']:.2f} ×"

    bound = figures["max_bytes"]
    part = f" ({100 * figures['disk_bytes'] / bound:.0f} %)" if bound else ""
    lines = [
        ("store", figures["store"]),
        ("mountpoint", figures["mountpoint"] or "not mounted"),
        ("on disk", f"{size('disk_bytes')} of at most {format_size(bound)}{part}"),
        ("entries", f"{figures['entries']:,}, {size('logical_bytes')} to their readers"),
        ("KV rows", f"{size('row_bytes')} of that recognised"),
        ("stored", f"{size('stored_bytes')} in {figures['blocks']:,} blocks: sharing saves {ratio('dedup')}"),
        ("in volumes", f"{size('compressed_bytes')}, with compression and page ends"),
        ("removed", f"{size('victim_bytes')} kept until the space is needed"),
        ("evicted", f"{figures['evicted_entries']:,} entries, {size('evicted_bytes')}"),
        ("written", f"{size('written_bytes')} by clients, {size('new_block_bytes')} of it new"),
        ("read", f"{size('read_bytes')} by clients"),
    ]
    if figures["scrubbed_bytes"]:
        last = (
            f"last pass ended {age(figures['last_scrub_ns'])}" if figures["last_scrub_ns"] else "first pass"
        )
        lines.append(("scrubbed", f"{size('scrubbed_bytes')}, {last}"))
    if figures["torn_saves"]:
        lines.append(("torn saves", f"{figures['torn_saves']:,}: cut off by a kill"))
    if figures["corrupt_blocks"]:
        lines.append(("corrupt", f"{figures['corrupt_blocks']:,} blocks damaged on disk"))
    lines += [("damaged", printable(name)) for name in figures["damaged"]]
    return lines
