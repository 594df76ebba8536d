"""Where a store's bytes lie on disk, and how its maximum is shared out.

::

    STORE/              0700
      format            JSON: {"cachefs": 2, "uuid": …}; its presence makes a directory a store
      lock              flock held by the daemon; JSON: {"pid": …, "mountpoint": …}
      index/            LMDB: what exists (tree, recipes, digests, reference counts)
      volumes/0001/ …   LMDB: payloads of blocks by id, nothing else
      cachefs.log       the background daemon's log
      clean             left by who closed the store in order (see `clean`)

Every LMDB environment has a map size, and LMDB never writes past it. The map
sizes of the index and of all volumes, and ``SPARE`` for lock files and the
log, add up to at most the store's maximum, so that ``du`` cannot pass it.
"""

from dataclasses import dataclass

from cachefs.sizes import GIB, MIB

FORMAT = 2
"""On-disk format version. A store with a greater one is refused, with a smaller one brought up to it.
2: the tree's rows carry seals."""

PAGE = 4096
SPARE = 4 * MIB
MAX_VOLUME = 4 * GIB
MIN_VOLUME = 8 * MIB
PART_BYTES = (8 * PAGE - 16, PAGE - 16)
"""Where no run of free pages is long enough for a payload it is split into parts of
eight pages, or of one."""
HEADROOM = 0.10
"""Part of a volume never filled: LMDB puts a payload into one run of free pages, and
without slack such a run cannot be found (MDB_MAP_FULL with pages still free)."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How ``max_bytes`` is shared out; all in bytes."""

    max_bytes: int
    index: int
    volume: int
    """Map size of a new volume: all in one for a small store, else at least eight, so
    that one can be emptied and dropped."""
    data: int
    """For all volumes together."""
    batch: int
    """Payload bytes written out in one transaction."""
    pool: int
    """Payload bytes that may wait in memory to be written out."""
    queue: int
    """Bytes of all saves that may wait to be placed. What waits counts as used, so in a
    small store little may."""

    @classmethod
    def of(cls, max_bytes: int, disk: int | None = None) -> "Budget":
        """Shares of ``max_bytes`` on a disk that has ``disk`` bytes for the store (None: enough)."""
        index = max(16 * MIB, max_bytes // 40) // MIB * MIB
        data = max_bytes - index - SPARE
        volume = min(MAX_VOLUME, max(data // 8, min(data, GIB))) // PAGE * PAGE
        room = data if disk is None else max(MIN_VOLUME, min(data, disk))
        batch = min(16 * MIB, min(volume, room) // 16)
        pool, queue = min(5 * batch // 2, room // 8), min(96 * MIB, room // 16)
        return cls(max_bytes, index, volume, data, batch, pool, queue)


def footprint(stored: int) -> int:
    """Bytes of a volume that a payload of ``stored`` bytes takes.

    LMDB keeps a value in whole pages of its own once it is longer than about half
    a page, with a 16-byte header in the first; shorter values share leaf pages,
    which random inserts leave about three quarters full.
    """
    if stored > 2000:
        return (stored + 16 + PAGE - 1) // PAGE * PAGE
    return (stored + 32) * 4 // 3
