"""Sizes as people write and read them: binary units, M is MiB."""

import os
import re
from pathlib import Path

from cachefs.errors import UsageError, UserError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

MIN_MAX_BYTES = 64 * MIB
DEFAULT_MAX_BYTES = 50 * GIB

_UNITS = "kmgtp"
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgtp])(?:i?b)?|b)?\s*", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """``300M``, ``1.5GiB``, ``50g`` or plain bytes; UsageError for anything else."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UsageError(f"'{text}' is not a size; write it like 300M, 1.5GiB or 50g")
    number, unit = match.groups()
    factor = 1024 ** (_UNITS.index(unit.lower()) + 1) if unit else 1
    return int(float(number) * factor) if "." in number else int(number) * factor


def parse_max_size(text: str) -> int:
    """A bound for a store: a size that is not too small to hold anything."""
    size = parse_size(text)
    if size < MIN_MAX_BYTES:
        raise UsageError(f"a maximum size of {text} is too small; give at least {format_size(MIN_MAX_BYTES)}")
    if size >= 1 << 62:
        raise UsageError(f"a maximum size of {text} is beyond what any disk holds")
    return size


def count(number: int, noun: str) -> str:
    """``1 block``, ``2,000 blocks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_size(size: int) -> str:
    """``1.5 GiB``: at most four figures, so that a column of them is easy to compare."""
    if abs(size) < KIB:
        return f"{size} B"
    value = float(size)
    for unit in _UNITS.upper():
        value /= 1024
        if abs(value) < 999.5 or unit == "P":
            break
    number = f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}".removesuffix(".0")
    return f"{number} {unit}iB"


def default_max_bytes(store: Path) -> int:
    """The bound of a new store: a quarter of what its disk has free, at most 50 GiB."""
    place = store
    while not place.exists() and place != place.parent:
        place = place.parent
    disk = os.statvfs(place)
    free = disk.f_bavail * disk.f_frsize
    if free // 4 < MIN_MAX_BYTES:
        raise UserError(
            f"the disk of {store} has only {format_size(free)} free; make room there, "
            f"or give --max-size (at least {format_size(MIN_MAX_BYTES)})"
        )
    return min(DEFAULT_MAX_BYTES, free // 4)
