"""Versions of a file: what is kept of the one before, and whether the new one is whole."""

import json
from dataclasses import dataclass
from typing import Any

from cachefs.mount.stream import Stream
from cachefs.store.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Version:
    """A file's content as the tree has it."""

    recipe: Recipe
    row_bytes: int
    about: bytes | None
    mtime: int


def is_torn(stream: Stream | None, base: Version | None, size: int) -> bool:
    """Whether a save over ``base`` ended before its state did, as far as headers and ``base`` tell.

    ``stream`` is None if nothing came in order, ``size`` the bytes of the file. Over a
    state, a beginning too short to be recognised is torn, too.

    A state may have fewer V sections than layers, so one cut exactly between two
    sections looks whole by itself; the old version of the same shape knows better.
    """
    unknown = not size or (stream is not None and not stream.start and not stream.report.container)
    if unknown and base is not None and base.about is not None:
        return True
    if stream is None:
        return False
    if stream.torn or stream.start or base is None:
        return stream.torn
    old, new = json.loads(base.about or b"{}"), _summary(stream)
    alike = all(old.get(name) == new[name] for name in ("container", "version", "layers", "types"))
    return alike and int(new["sections"]) < int(old.get("sections", 0))


def about(stream: Stream, *, in_order: bool = True) -> bytes | None:
    """What the tree keeps of a recognised state, as JSON."""
    if not stream.row_bytes and not stream.report.container:
        return None
    return json.dumps({**_summary(stream), "in_order": in_order}).encode()


def _summary(stream: Stream) -> dict[str, Any]:
    report = stream.report
    return {
        "container": report.container,
        "version": report.version,
        "architecture": report.architecture,
        "tokens": report.tokens,
        "cells": report.cells,
        "layers": report.layers,
        "types": report.types,
        "sections": report.dropped + sum(len(module.sections) for module in report.modules),
    }
