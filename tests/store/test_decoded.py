"""Decoded blocks: few enough to fit, and each decoded once for many small reads."""

from __future__ import annotations

import pytest

from cachefs.store import Store, codec
from cachefs.store.decoded import Decoded

from .filling import add
from .test_recompress import GROUP, joined, run, state


def test_the_last_used_stay() -> None:
    pool = Decoded(1000)
    for block in range(1, 5):
        pool.add(block, bytes(300))
        assert pool.get(1) is not None
        assert pool.size <= 1000
    assert [block for block in range(1, 5) if pool.get(block) is not None] == [1, 3, 4]
    pool.add(9, bytes(2000))
    assert pool.get(9) is None
    pool.add(1, bytes(300))
    assert pool.size == 900


def test_small_reads_decode_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ino = add(store, b"a", state(5))
    store.commit()
    run(store)
    calls: list[int] = []
    decode = codec.decode

    def counted(payload: bytes, which: int, raw: int) -> object:
        calls.append(which)
        return decode(payload, which, raw)

    monkeypatch.setattr(codec, "decode", counted)
    recipe = store.tree.recipe(ino)
    parts = [bytes(store.read(recipe, at, 10_000)) for at in range(0, recipe.size, 10_000)]
    assert b"".join(parts) == joined(state(5))
    assert len(calls) == 5
    assert store.blocks.decoded.size == 5 * GROUP
