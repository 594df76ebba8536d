"""One mount for most tests, and a directory of its own in it for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..running import Mounted

MountFactory = Callable[..., Mounted]
"""What the ``mount`` fixture is."""


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """A mount that tests use one after the other. They never fill it, nor change its bound."""
    base = tmp_path_factory.mktemp("shared")
    (base / "mnt").mkdir()
    mounted = Mounted(base / "store", base / "mnt")
    mounted.mount("--max-size", "512M")
    yield mounted
    wrong = mounted.clean_up()
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


@pytest.fixture
def here(shared: Mounted, request: pytest.FixtureRequest) -> Path:
    """An empty directory on the shared mount."""
    if not shared.alive:  # what ended it has failed already
        shared.mount()
    path = shared.path / re.sub(r"\W", "_", request.node.name)[:100]
    path.mkdir()
    return path
