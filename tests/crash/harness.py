"""Rounds of writing, breaking and looking at what is left."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ..running import Mounted, environment
from .sound import complaints
from .writer import Story

WRITER = Path(__file__).with_name("writer.py")
KEPT = 4
"""Directories of the latest rounds that are looked at again after each crash."""


class Rounds:
    """``crash`` must leave the store unmounted, as after the crash, and ready to be mounted again."""

    def __init__(
        self, m: Mounted, options: tuple[str, ...], crash: Callable[[], None], writers: int = 2
    ) -> None:
        self._m = m
        self._options = options
        self._crash = crash
        self._writers = writers
        self._stories: dict[Path, Story] = {}
        self.syncs = 0

    def run(self, seed: int, seconds: tuple[float, float]) -> None:
        """One round; AssertionError when something is lost, torn or unsound."""
        chance = random.Random(seed)
        directories = {self._m.path / f"{seed}-{n}": seed * 10 + n for n in range(self._writers)}
        processes = []
        for directory, number in directories.items():
            directory.mkdir()
            with (self._m.path.parent / "writers.log").open("ab") as errors:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, WRITER, directory, str(number)],
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                        env=environment(),
                    )
                )
        try:
            begun = [process.stdout.readline() for process in processes if process.stdout]
            assert all(begun), "a writer could not begin"
            time.sleep(chance.uniform(*seconds))
            assert all(process.poll() is None for process in processes), "a writer ended by itself"
            self._crash()
        finally:
            for process in processes:
                process.kill()
        for (directory, number), process, first in zip(directories.items(), processes, begun, strict=True):
            rest, _ = process.communicate()
            self._stories[directory] = Story(number, (first + rest).splitlines())
            self.syncs += self._stories[directory].syncs
        unsound = complaints(self._m.store)
        assert not unsound, unsound
        self._m.mount(*self._options)
        for path, story in self._stories.items():
            complaint = story.judge(path) if path.is_dir() else "lost" if story.syncs else None
            assert complaint is None, f"round {seed}, {path.name}: {complaint}"
        self._forget()

    def _forget(self) -> None:
        for path in list(self._stories)[: -KEPT * self._writers]:
            del self._stories[path]
            shutil.rmtree(path, ignore_errors=True)
