"""``cachefs explain``: what cachefs recognises in a file."""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from cachefs import __version__
from cachefs.cli.table import print_table, printable
from cachefs.cli.target import print_json
from cachefs.errors import UserError
from cachefs.sizes import MIB, format_size

if TYPE_CHECKING:
    from cachefs.states import Cutter, Module, Section

HELP = """\
Show what cachefs recognises in FILE: container, modules and sections, how many
bytes are KV rows and can be shared row by row, and where recognition stopped.

FILE is any file, in a mount or not; it is only read. Neither token ids nor
content are printed, so the output can be attached to a bug report.

\b
Examples:
  cachefs explain /mnt/kv/chat.bin
  cachefs explain --json state.bin | jq .row_bytes
"""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_RANGES_MOST = 4


@dataclass(slots=True)
class Explained:
    """One file, cut and forgotten: the cutter with its report, and how the bytes fell."""

    size: int
    cutter: "Cutter"
    groups: int
    chunks: int


@click.command("explain", help=HELP, short_help="What is recognised in a file.")
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="One JSON document; names are only ever added.")
def command(file: str, as_json: bool) -> None:
    explained = explain(file)
    if as_json:
        print_json(document(file, explained))
        return
    lines = describe(file, explained)
    width = max(len(title) for title, _ in lines)
    for title, text in lines:
        print(f"{title:<{width}}  {text}")
    rows = [row for module in explained.cutter.report.modules for row in _rows(module)]
    if rows:
        print()
        titles = ["at byte", "what", "layers", "type", "cells", "row", "rows", "size"]
        print_table(titles, rows, left=("what", "layers", "type"))


def explain(path: str) -> Explained:
    """Read the file once, a MiB at a time."""
    from cachefs.states import Chunk, Cutter

    cutter = Cutter()
    size = groups = chunks = 0
    for data in _parts(path):
        size += len(data)
        pieces = cutter.feed(data) if data else cutter.finish()
        chunk = sum(isinstance(piece, Chunk) for piece in pieces)
        chunks += chunk
        groups += len(pieces) - chunk
    return Explained(size, cutter, groups, chunks)


def _parts(path: str) -> Iterator[bytes]:
    """The file in pieces of a MiB, and an empty one at its end."""
    try:
        # Not to wait for the other end of a pipe that is given by mistake.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # a zero byte in the name
        raise UserError(f"{printable(path)} does not exist") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    try:
        mode = os.fstat(file).st_mode
        if stat.S_ISDIR(mode):
            raise UserError(f"{path} is a directory; name a file in it")
        if not stat.S_ISREG(mode):
            raise UserError(f"{path} is no regular file")
        while data := os.read(file, MIB):
            yield data
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    finally:
        os.close(file)
    yield b""


def document(path: str, explained: Explained) -> dict[str, Any]:
    cutter = explained.cutter
    report = cutter.report.to_dict()
    report["architecture"] = _architecture(cutter)
    return {
        "cachefs": __version__,
        "file": path,
        "size": explained.size,
        "row_bytes": cutter.row_bytes,
        "row_groups": explained.groups,
        "chunk_bytes": explained.size - cutter.row_bytes,
        "chunks": explained.chunks,
        "torn": cutter.torn,
        "promised": cutter.promised,
        **report,
    }


def describe(path: str, explained: Explained) -> list[tuple[str, str]]:
    cutter, size = explained.cutter, explained.size
    report = cutter.report
    rest = size - cutter.row_bytes
    lines = [
        ("cachefs", __version__),
        ("file", f"{printable(path)}, {size:,} bytes"),
        ("container", _container(cutter)),
    ]
    if report.tokens is not None:
        lines.append(("tokens", f"{report.tokens:,}"))
    if report.architecture is not None:
        lines.append(("architecture", _architecture(cutter) or "not a name"))
    if report.modules:
        kinds = " + ".join(_folded([module.kind for module in report.modules[:64]]))
        more = " …" if len(report.modules) > 64 else ""
        in_states = f", in {report.states:,} states" if report.states > 1 else ""
        lines.append(("modules", kinds + more + in_states))
    lines += [
        (
            "KV rows",
            f"{cutter.row_bytes:,} bytes{_share(cutter.row_bytes, size)} in {explained.groups:,} groups",
        ),
        ("the rest", f"{rest:,} bytes{_share(rest, size)} in {explained.chunks:,} chunks"),
        ("stopped", _stopped(cutter)),
    ]
    if cutter.torn:
        missing = cutter.promised - size
        lines.append(
            ("torn", f"the headers promise {format_size(missing)} more at least: the save was cut off")
        )
    if report.dropped:
        lines.append(("not listed", f"{report.dropped:,} further modules and sections"))
    return lines


def _container(cutter: "Cutter") -> str:
    report = cutter.report
    names = {
        "ggsq": "sequence state file (ggsq)",
        "ggsn": "session file (ggsn)",
        "blob": "sequence blob without a file header",
    }
    if report.container is None:
        return "none, modules from the first byte on" if _at_start(cutter) else "none recognised"
    version = "" if report.version is None else f", version {report.version}"
    return names.get(report.container, report.container) + version


def _at_start(cutter: "Cutter") -> bool:
    modules = cutter.report.modules
    return bool(modules) and modules[0].offset == 0


def _architecture(cutter: "Cutter") -> str | None:
    """The architecture if it looks like one: in a damaged file it could be a piece of anything."""
    name = cutter.report.architecture
    return name if name is not None and _NAME.fullmatch(name) else None


def _share(part: int, whole: int) -> str:
    return f" ({100 * part / whole:.1f} %)" if whole else ""


def _stopped(cutter: "Cutter") -> str:
    stopped = cutter.report.stopped
    if stopped is None:
        return "nowhere: recognised to the end"
    return f"at byte {stopped[0]:,}: {stopped[1]}"


def _rows(module: "Module") -> Iterator[list[str]]:
    """The module's line, and one for all its sections that are alike."""
    form = f" ({module.form})" if module.form else ""
    layers = f"{module.layers} layer{'s' * (module.layers > 1)}" if module.layers else ""
    cells = f"{module.cells:,}" if module.kind != "dsv4" else ""
    yield [f"{module.offset:,}", f"{module.kind}{form}", layers, "", cells, "", "", ""]
    alike: dict[tuple[object, ...], list[Section]] = {}
    for section in module.sections:
        key = (section.kind, section.type, section.row_bytes, section.cells, section.rows)
        alike.setdefault(key, []).append(section)
    for sections in alike.values():
        first = sections[0].to_dict()
        rows = first["rows"] if first["kind"] == "VT" else 0
        size = first["row_bytes"] * first["cells"] * (rows or 1)
        yield [
            f"{first['offset']:,}",
            f"  {first['kind']}" + (f" × {len(sections)}" if len(sections) > 1 else ""),
            _ranges([section.layer for section in sections]),
            first["type"],
            f"{first['cells']:,}",
            f"{first['row_bytes']:,} B",
            f"{rows:,}" if rows else "",
            format_size(size * len(sections)),
        ]


def _ranges(numbers: list[int]) -> str:
    """``0–3, 7``; of many ranges the first and the last number."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    if len(ranges) > _RANGES_MOST:
        return f"some of {ranges[0][0]}–{ranges[-1][1]}"
    return ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in ranges)


def _folded(names: Iterable[str]) -> Iterator[str]:
    """``kv, kv, kv`` as ``3 kv``."""
    last, count = "", 0
    for name in [*names, ""]:
        if name == last:
            count += 1
            continue
        if count:
            yield f"{count} {last}" if count > 1 else last
        last, count = name, 1
