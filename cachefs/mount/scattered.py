"""What is written to a file out of order: gathered in memory, placed as plain blocks, cut anew at the end."""

from collections.abc import Awaitable, Callable

import trio

from cachefs.mount.overlay import Overlay
from cachefs.mount.stream import Stream
from cachefs.states.pieces import Buffer
from cachefs.store import Store, recipe
from cachefs.store.recipe import Recipe

_FOLD_AT = 16 << 20
_RUN_ENTRIES = 384
"""Bytes in the index for a run that is placed: its block's entries and records."""
_RECUT_FROM = 1 << 20
_STEP = 4 << 20


class Scattered:
    """The overlay of one file, and how much of it went into the recipe so far."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._overlay = Overlay()
        self._weight = 0
        self._holds: list[int] = []
        self.placed = 0
        """Bytes that went into the recipe as plain blocks."""

    def __bool__(self) -> bool:
        return bool(self._overlay)

    def write(self, offset: int, data: bytes) -> None:
        self._overlay.write(offset, data)
        self._weigh()

    def cut(self, start: int, stop: int) -> None:
        """Forget the bytes start … stop."""
        self._overlay.cut(start, stop)
        self._weigh()

    def clear(self) -> None:
        """Forget all bytes."""
        self._overlay = Overlay()
        self._weigh()

    def patch(self, start: int, into: bytearray) -> None:
        """Lay the overlay over ``into``, the file's bytes from ``start`` on."""
        self._overlay.patch(start, into)

    def _weigh(self) -> None:
        """Tell the store how many bytes of memory the overlay takes."""
        self._store.scattered += self._overlay.cost - self._weight
        self._weight = self._overlay.cost

    @property
    def is_heavy(self) -> bool:
        """Whether it weighs more than an overlay may; many share about twice what one may have."""
        most = min(_FOLD_AT, self._store.budget.index // 4)
        return self._weight > max(most // 16, min(most, 2 * most - self._store.scattered))

    @property
    def index_bytes(self) -> int:
        """Bytes in the index that placing takes."""
        return _RUN_ENTRIES * len(self._overlay.runs())

    async def place(self) -> list[tuple[int, int, recipe.Records]]:
        """Place the overlay's bytes as plain blocks: the edits of the recipe (`Recipe.replace`).

        They stay in the overlay, for readers and in case that some cannot be placed. Raises
        StoreFull or StoreFailed. Afterwards, either way, there may be holds to take.
        """
        runs = self._overlay.runs()
        edits: list[tuple[int, int, recipe.Records]] = []

        def place() -> None:
            placer = self._store.placer()
            try:
                for start, data in runs:
                    placer.place_bytes(bytes(data))
                    edits.append((start, start + len(data), placer.take()))
                    self._store.write_behind()
            finally:
                self._holds.extend(placer.take_holds())

        await trio.to_thread.run_sync(place)
        self.placed += sum(len(data) for _, data in runs)
        return edits

    def take_holds(self) -> list[int]:
        holds, self._holds = self._holds, []
        return holds

    def prevails(self, size: int) -> bool:
        """Whether so much of a file of ``size`` bytes came out of order that it is to be cut anew."""
        return self.placed > size // 2 and self.placed > _RECUT_FROM


async def recut(
    stream: Stream, source: Recipe, fetch: Callable[[Recipe, int, int], Awaitable[Buffer]]
) -> bool:
    """Have ``stream`` cut a file that was written out of order along its rows, as if it had come in order.

    False if the file cannot be read, or there is no room; the stream was abandoned then.
    """
    for start in range(0, source.size, _STEP):
        try:
            data = bytes(await fetch(source, start, _STEP))
        except OSError:
            await stream.abandon()
            return False
        if not stream.has_credit(len(data)) and not stream.reserve(len(data)):
            await stream.abandon()
            return False
        stream.put(data)
        await stream.wait_for_space()
    await stream.finish()
    return True
