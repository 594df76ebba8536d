"""Bits flipped in a store's files: found or harmless, never served, never a crash."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from .filling import in_memory
from .flipping import Flip, in_a_child, make_template


@pytest.mark.parametrize(
    ("first", "flips"), [(0, 10), (10, 10), (20, 10), pytest.param(30, 1000, marks=pytest.mark.soak)]
)
def test_flipped_bits_are_found_or_harmless(
    first: int, flips: int, capsys: pytest.CaptureFixture[str]
) -> None:
    totals: Counter[str] = Counter()
    with in_memory() as path:
        template, store = Path(path) / "template", Path(path) / "store"
        files = make_template(template)
        for seed in range(first, first + flips):
            shutil.copytree(template, store)
            flip = Flip.choose(template, seed)
            flip.apply(store)
            outcome = in_a_child(store, files)
            assert not isinstance(outcome, str), f"{flip}: {outcome}"
            totals.update({name: bool(number) for name, number in outcome.items()})
            shutil.rmtree(store)
            shutil.rmtree(store.with_name("copy"))
    with capsys.disabled():
        if flips > 100:
            print(
                f"\n{flips} bits flipped: {totals['found']} found by check, the rest harmless; "
                f"{totals['refused']} refused at open, {totals['error']} with files that gave an error, "
                f"{totals['lost']} lost files to the repair"
            )
