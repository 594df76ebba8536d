"""Bytes written out of order, until they are folded into the recipe."""

from sortedcontainers import SortedDict

_MERGE_LIMIT = 1 << 20
_RUN_COST = 256


class Overlay:
    """Disjoint runs of bytes by file offset. ``size`` is their total in bytes."""

    def __init__(self) -> None:
        self._runs: SortedDict[int, bytearray] = SortedDict()
        self.size = 0

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def cost(self) -> int:
        """Bytes of memory: of a million single bytes far more than ``size``."""
        return self.size + _RUN_COST * len(self._runs)

    def _touching(self, start: int, stop: int) -> list[int]:
        """Starts of the runs that overlap start … stop."""
        before = self._runs.bisect_left(start)
        keys = list(self._runs.irange(start, stop, inclusive=(True, False)))
        if before:
            previous = self._runs.keys()[before - 1]
            if previous + len(self._runs[previous]) > start:
                keys.insert(0, previous)
        return keys

    def write(self, start: int, data: bytes) -> None:
        if not data:
            return
        stop = start + len(data)
        keys = self._touching(start, stop)
        if len(keys) == 1:
            run = self._runs[keys[0]]
            if keys[0] <= start and stop <= keys[0] + len(run):
                run[start - keys[0] : stop - keys[0]] = data
                return
        if not keys and (before := self._runs.bisect_left(start)):
            previous = self._runs.keys()[before - 1]
            run = self._runs[previous]
            if previous + len(run) == start and len(run) < _MERGE_LIMIT:
                run += data
                self.size += len(data)
                return
        self.cut(start, stop)
        self._runs[start] = bytearray(data)
        self.size += len(data)

    def cut(self, start: int, stop: int) -> None:
        """Forget the bytes start … stop."""
        for key in self._touching(start, stop):
            run = self._runs.pop(key)
            self.size -= len(run)
            for at, rest in ((key, run[: max(0, start - key)]), (stop, run[max(0, stop - key) :])):
                if rest:
                    self._runs[at] = rest
                    self.size += len(rest)

    def patch(self, start: int, into: bytearray) -> None:
        """Lay the overlay over ``into``, the file's bytes from ``start`` on."""
        stop = start + len(into)
        for key in self._touching(start, stop):
            run = self._runs[key]
            low, high = max(start, key), min(stop, key + len(run))
            into[low - start : high - start] = run[low - key : high - key]

    def runs(self) -> list[tuple[int, bytearray]]:
        """All runs in order."""
        return list(self._runs.items())

    def take(self) -> list[tuple[int, bytearray]]:
        """All runs in order; the overlay is empty afterwards."""
        runs = list(self._runs.items())
        self._runs.clear()
        self.size = 0
        return runs
