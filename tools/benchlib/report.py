"""The table: as text, JSON and SVG."""

import json
import os
import platform
import subprocess
from collections.abc import Iterable
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import cachefs

from . import realserver
from .figures import Row
from .mounts import ROOT

PACKAGES = ("pyfuse3", "trio", "lmdb", "numpy", "xxhash", "zstandard", "pyfastcdc")
COLUMNS = "{:<36} {:>9} {:>9} {:>17}  {:<5}  {}"


def header(work: Path) -> dict[str, str]:
    """What the figures depend on."""
    device, fstype = _disk(work)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    packages = ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)))
    return {
        "cachefs": f"{cachefs.__version__} ({_commit()})",
        "kernel": platform.release(),
        "disk": f"{device}, {fstype}",
        "machine": f"{os.cpu_count()} cores ({_cpu()}), {memory / 2**30:.0f} GiB",
        "load": f"{os.getloadavg()[0]:.1f} at the start",
        "versions": f"Python {platform.python_version()}, {packages}",
        "llama": _llama(),
    }


def _llama() -> str:
    found = realserver.find()
    if found is None:
        return "no llama-server"
    done = subprocess.run([found.server, "--version"], capture_output=True, text=True)
    return (done.stderr + done.stdout).strip().partition("\n")[0]


def _disk(path: Path) -> tuple[str, str]:
    command = ["findmnt", "-n", "-o", "SOURCE,FSTYPE", "--target", str(path)]
    try:
        device, fstype = subprocess.run(command, capture_output=True, text=True).stdout.split()
    except (OSError, ValueError):
        return "unknown disk", "unknown filesystem"
    return device, fstype


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "no commit"
    except OSError:
        return "no commit"


def _number(value: float, unit: str) -> str:
    if unit == "×":
        return f"{value:.3f} ×" if value < 2 else f"{value:.2f} ×"
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.2f} {unit}"


def _target(row: Row) -> str:
    if row.limit is None:
        return ""
    return f"{'≤' if row.at_most else '≥'} {row.limit:g} {row.unit}"


def _verdict(row: Row) -> str:
    return {True: "pass", False: "SHORT", None: ""}[row.passed]


def titles() -> str:
    return COLUMNS.format("what", "target", "median", "min to max", "", "")


def line(row: Row) -> str:
    """One row as text."""
    low, high = (_number(f(row.values), row.unit).split()[0] for f in (min, max))
    spread = f"{low} to {high}" if len(row.values) > 1 else ""
    median = _number(row.median, row.unit)
    return COLUMNS.format(row.name, _target(row), median, spread, _verdict(row), row.note).rstrip()


def as_json(head: dict[str, str], rows: Iterable[Row], took: float) -> str:
    """Everything, for programs."""
    table = [
        {
            "group": row.group,
            "name": row.name,
            "target": row.limit,
            "at_most": row.at_most,
            "unit": row.unit,
            "median": row.median,
            "min": min(row.values),
            "max": max(row.values),
            "values": row.values,
            "pass": row.passed,
            "note": row.note,
            "details": row.details,
        }
        for row in rows
    ]
    return json.dumps({**head, "seconds": round(took, 1), "rows": table}, indent=1, ensure_ascii=False)


def as_svg(head: dict[str, str], rows: list[Row]) -> str:
    """A bar a row with a target: how far it is reached, on a scale that ends at twice."""
    shown = [(row, reached) for row in rows if (reached := row.reached) is not None]
    step, left, width = 22, 300, 360
    height = 60 + step * len(shown)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 150}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20">cachefs {escape(head["cachefs"])}, {escape(head["disk"])}: '
        "share of the target reached (longer is better)</text>",
    ]
    for number, (row, reached) in enumerate(shown):
        y = 36 + step * number
        colour = "#2a7f4f" if row.passed else "#c0392b"
        length = width * min(reached, 2.0) / 2
        value = f"{_number(row.median, row.unit)} ({_target(row)})"
        out.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(row.name)}</text>')
        out.append(f'<rect x="{left}" y="{y}" width="{length:.1f}" height="{step - 6}" fill="{colour}"/>')
        out.append(f'<text x="{left + length + 6:.1f}" y="{y + 13}">{escape(value)}</text>')
    x = left + width / 2
    out.append(f'<line x1="{x}" y1="30" x2="{x}" y2="{height - 20}" stroke="black" stroke-dasharray="3 3"/>')
    return "\n".join([*out, "</svg>", ""])
