"""What was recognised in a file."""

from dataclasses import dataclass, field
from typing import Any

from .types import type_name

# Sections and modules a report keeps; what comes after is only counted.
KEPT = 4096


@dataclass(slots=True)
class Section:
    """One tensor of a module.

    ``kind``: K or V (one row a cell), VT (V transposed), R, P (the PLE convolution's row) or S (recurrent).
    ``row_bytes`` is the width of a row; for VT the width of one element. ``rows`` is the embedding rows of
    VT, else equal to ``cells``.
    """

    layer: int
    kind: str
    type: int
    row_bytes: int
    cells: int
    offset: int
    rows: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "kind": self.kind,
            "type": type_name(self.type),
            "row_bytes": self.row_bytes,
            "cells": self.cells,
            "rows": self.rows,
            "offset": self.offset,
        }


@dataclass(slots=True)
class Module:
    """One module of a state: ``kind`` is kv, recurrent, dsv4-k (compressed K) or dsv4-state.

    ``layers`` is the n_layer of its header, ``state`` counts the containers and blobs of the file, ``form``
    says which variant of the layout was met (see recognise.py).
    """

    kind: str
    offset: int
    state: int
    cells: int = 0
    layers: int = 0
    form: str = ""
    sections: list[Section] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "offset": self.offset,
            "state": self.state,
            "cells": self.cells,
            "layers": self.layers,
            "form": self.form,
            "sections": [section.to_dict() for section in self.sections],
        }


@dataclass(slots=True)
class Report:
    """What was recognised so far; at most ``KEPT`` modules and ``KEPT`` sections are kept.

    ``container`` is that of the first state in the file: ggsq, ggsn, blob, or None (also for a state without
    any header). ``dropped`` counts the modules and sections beyond the cap. ``stopped`` is where recognition
    last gave up and why.
    """

    container: str | None = None
    version: int | None = None
    tokens: int | None = None
    architecture: str | None = None
    states: int = 0
    modules: list[Module] = field(default_factory=list)
    stopped: tuple[int, str] | None = None
    dropped: int = 0
    _sections: int = 0

    def add_module(self, kind: str, offset: int) -> Module:
        module = Module(kind, offset, max(0, self.states - 1))
        if len(self.modules) < KEPT:
            self.modules.append(module)
        else:
            self.dropped += 1
        return module

    def add_section(self, module: Module, section: Section) -> None:
        if self._sections < KEPT:
            self._sections += 1
            module.sections.append(section)
        else:
            self.dropped += 1

    @property
    def cells(self) -> int:
        """Cells of the largest kv module (of any module where there is no kv)."""
        kv = [module.cells for module in self.modules if module.kind == "kv"]
        return max(kv or [module.cells for module in self.modules], default=0)

    @property
    def layers(self) -> int:
        """Layers of the first state: those of its kv modules, or more if a recurrent module says so."""
        first = [module for module in self.modules if module.state == 0]
        kv = sum(module.layers for module in first if module.kind == "kv")
        return max([kv, *(module.layers for module in first if module.kind == "recurrent")])

    @property
    def types(self) -> list[str]:
        """Names of the types of all sections, in order of appearance."""
        sections = (section for module in self.modules for section in module.sections if section.type >= 0)
        return list(dict.fromkeys(type_name(section.type) for section in sections))

    def to_dict(self) -> dict[str, Any]:
        return {
            "container": self.container,
            "version": self.version,
            "tokens": self.tokens,
            "architecture": self.architecture,
            "states": self.states,
            "cells": self.cells,
            "layers": self.layers,
            "types": self.types,
            "modules": [module.to_dict() for module in self.modules],
            "stopped": {"offset": self.stopped[0], "reason": self.stopped[1]} if self.stopped else None,
            "dropped": self.dropped,
        }
