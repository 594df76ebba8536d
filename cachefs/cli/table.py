"""How people see lists: aligned columns, never cut when piped."""

import sys
import time
from collections.abc import Sequence

_AGES = ((60, "s"), (3600, "min"), (86400, "h"), (30 * 86400, "d"))


def printable(text: str) -> str:
    """A name on one line, whatever is in it."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def age(time_ns: int) -> str:
    """``5 min ago``; the date when it is more than a month."""
    seconds = time.time() - time_ns / 1e9
    unit = 1
    for limit, name in _AGES:
        if seconds < limit:
            return f"{max(0, int(seconds // unit))} {name} ago"
        unit = limit
    return time.strftime("%Y-%m-%d", time.localtime(time_ns / 1e9))


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]) -> None:
    """Print ``rows``; the columns named in ``left`` are text, the others figures.

    On a terminal the first column shrinks to what is left of the width; in a pipe
    nothing is shortened and nothing coloured.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    on_terminal = sys.stdout.isatty()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold" if on_terminal else "")
    for number, title in enumerate(titles):
        table.add_column(
            title,
            justify="left" if title in left else "right",
            no_wrap=True,
            overflow="ellipsis",
            min_width=min(20, *(len(row[0]) for row in rows)) if number == 0 and rows else len(title),
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    if on_terminal:
        Console().print(table)
        return
    width = sum(max(len(row[i]) for row in [titles, *rows]) + 2 for i in range(len(titles))) + 2
    console = Console(width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))
