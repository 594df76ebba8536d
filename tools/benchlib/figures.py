"""What a measurement is, and what the modules that measure are given."""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Row:
    """One line of the table: a name, a target, and the values of all repeats.

    ``limit`` None: there is no target. ``at_most``: values should be no greater than the limit, else no less.
    """

    group: str
    name: str
    values: list[float]
    limit: float | None = None
    at_most: bool = True
    unit: str = "×"
    note: str = ""
    details: dict[str, float] = field(default_factory=dict)
    all_count: bool = False
    """Whether the worst value decides, not the median."""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def passed(self) -> bool | None:
        if self.limit is None or not self.values:
            return None
        worst = max(self.values) if self.at_most else min(self.values)
        value = worst if self.all_count else self.median
        return value <= self.limit if self.at_most else value >= self.limit

    @property
    def reached(self) -> float | None:
        """1 at the target, more is better."""
        if not self.limit or not self.values:
            return None
        value = max(self.median, 1e-9)
        return self.limit / value if self.at_most else value / self.limit


@dataclass
class Bench:
    """Where and how much to measure; ``stack`` takes down at the end what was put up."""

    work: Path
    quick: bool
    repeat: int
    states: Path | None
    bound: int | None
    stack: ExitStack

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def folder(self, name: str) -> Path:
        path = self.work / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def rounds(self) -> range:
        return range(self.repeat)


Group = Callable[[Bench], Iterator[Row]]


def say(text: str) -> None:
    """Progress and whatever was left out, to standard error."""
    print(text, file=sys.stderr, flush=True)


def rate(size: float, seconds: float) -> float:
    """MB/s."""
    return size / seconds / 1e6


def median(values: list[float]) -> float:
    return statistics.median(values)


def settle() -> None:
    """Let what was written earlier reach the disk, so that it does not cost the next one."""
    os.sync()


def drop_caches() -> bool:
    """Empty the kernel's page cache; False when that is not permitted."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    time.sleep(0.2)
    return True
