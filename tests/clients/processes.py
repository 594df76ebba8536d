"""Other processes: the peers, owners and pollers that clients share their directory with."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

_fork = multiprocessing.get_context("fork")
PATIENCE = 30
"""Seconds after which something that should happen counts as not happening."""


@contextmanager
def child(
    target: Callable[..., object], *args: object, stay: bool = False
) -> Iterator[tuple[BaseProcess, Connection]]:
    """Run `target(pipe, *args)` in a process of its own; the end of the block kills it or waits for it."""
    ours, theirs = _fork.Pipe()
    process = _fork.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        if not stay:
            process.kill()
        process.join(PATIENCE)
        ours.close()


def expect(pipe: Connection) -> object:
    """The next message of a child; fails rather than hangs."""
    assert pipe.poll(PATIENCE), "the other process said nothing"
    return pipe.recv()
