"""A desk for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from . import desk as desks


@pytest.fixture
async def desk() -> AsyncIterator[desks.Desk]:
    async with desks.desk() as made:
        yield made
