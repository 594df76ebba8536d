"""Raw bytes of packed blocks that were read last: a block larger than a read is not decoded for each."""

import threading
from collections import OrderedDict

from cachefs.sizes import MIB
from cachefs.states.pieces import Buffer

LIMIT = 32 * MIB


class Decoded:
    """At most `LIMIT` bytes, the least recently used go first. A block's bytes never change."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._raw: OrderedDict[int, Buffer] = OrderedDict()
        self.size = 0

    def get(self, block: int) -> Buffer | None:
        with self._lock:
            found = self._raw.get(block)
            if found is not None:
                self._raw.move_to_end(block)
            return found

    def add(self, block: int, raw: Buffer) -> None:
        """``raw`` was checked against the block's digest, and is not the map's memory."""
        with self._lock:
            if block in self._raw or len(raw) > self._limit:
                return
            self._raw[block] = raw
            self.size += len(raw)
            while self.size > self._limit:
                self.size -= len(self._raw.popitem(last=False)[1])
