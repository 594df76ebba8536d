"""Sharing and recognition at their limits, for every kind of state the real server writes."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from .conftest import SLACK, Mount, Mounted, copy_in, understood

pytestmark = pytest.mark.llama

States = Callable[[str], list[Path]]


@dataclass
class Line:
    """Sums of one row of a printed table, in bytes but for the counts."""

    models: int = 0
    files: int = 0
    total: int = 0
    rows: int = 0
    recognised: int = 0
    best: int = 0
    stored: int = 0

    def add(self, other: "Line") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def coverage(self) -> float:
        """Recognised rows of those the oracle sees."""
        return self.recognised / self.rows if self.rows else 1.0

    def problem(self) -> str | None:
        """What of the two bounds is broken, if any."""
        if self.coverage < 0.99:
            return f"{self.coverage:.1%} of {self.rows} row bytes recognised"
        bound = 1.01 * self.best + SLACK * self.files
        if self.stored > bound:
            return f"{self.stored} bytes stored, bound {bound:.0f}"
        return None

    def __str__(self) -> str:
        return (
            f"{self.models:>6} {self.files:>5} {self.total:>12,} {self.rows / max(self.total, 1):>6.1%} "
            f"{self.coverage:>8.2%} {self.best:>12,} {self.stored:>12,} "
            f"{self.stored / max(self.best, 1):>7.4f}"
        )


HEADER = " models files        bytes   rows    found       oracle       stored   ratio"


def copy_and_measure(paths: list[Path], mounted: Mounted, *, runs: bool = False) -> Line:
    """Copy files into a new mount; its stats beside the oracle's figures."""
    best = understood(paths)
    copy_in(paths, mounted)
    stats = mounted.stats()
    return Line(
        models=1,
        files=len(paths),
        total=best.total,
        rows=best.row_bytes,
        recognised=stats["row_bytes"],
        best=best.stored_in_runs if runs else best.stored,
        stored=stats["stored_bytes"],
    )


def print_table(title: str, lines: dict[str, Line], capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{title}\n{'':34}{HEADER}")
        for name, line in sorted(lines.items()):
            print(f"{name:34} {line}")


@pytest.mark.parametrize("kind", ["archs", "archs-fa-off"])
def test_every_architecture(
    kind: str, states: States, mount: Mount, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three states of each architecture: rows are found, and repeated ones stored once.

    All random models have the same weights, so each gets a store of its own: in one for all, they would
    share with each other.
    """
    by_model: dict[str, list[Path]] = defaultdict(list)
    for path in states(kind):
        by_model[path.name.split(".")[0]].append(path)
    assert len(by_model) >= 124
    problems, table, everything = [], defaultdict[str, Line](Line), Line()
    for model, paths in by_model.items():
        family = understood(paths[:1]).files[0].state.family
        if kind == "archs-fa-off" and "/T" not in family:
            continue  # without V to transpose it is the same state as with -fa on
        mounted = mount()
        line = copy_and_measure(paths, mounted)
        mounted.umount()
        table[family].add(line)
        everything.add(line)
        if problem := line.problem():
            problems.append(f"{model}: {problem}")
    print_table(f"{kind}, {everything.models} models", {**table, "~ all": everything}, capsys)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("kind", ["variants", "slots", "fragmented", "shift", "session"])
def test_every_variant(kind: str, states: States, mount: Mount, capsys: pytest.CaptureFixture[str]) -> None:
    """Cache types, transposed V, slots, shifted and fragmented caches, session files: the same bounds."""
    folders: dict[str, list[Path]] = defaultdict(list)
    for path in states(kind):
        folders[path.parent.name].append(path)
    assert folders
    # In one cache for all slots the same prefix is rounded differently in each, and equal rows stand alone.
    table = {
        name: copy_and_measure(paths, mount(), runs=name in ("slots-kv-unified", "fragmented"))
        for name, paths in folders.items()
    }
    print_table(kind, table, capsys)
    assert not {name: problem for name, line in table.items() if (problem := line.problem())}


def test_ten_growing_turns(states: States, mount: Mount) -> None:
    """Ten turns of one chat under ten names take little more than the last of them."""
    turns = states("turns")
    assert len(turns) == 10
    mounted = mount()
    copy_in(turns, mounted)
    last, other = turns[-1].stat().st_size, understood(turns).other_bytes
    assert mounted.stats()["stored_bytes"] <= 1.02 * last + other
