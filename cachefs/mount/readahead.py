"""Sequential reads: the next pieces of the file are put together while the client takes this one."""

import logging
from collections import deque
from collections.abc import Awaitable, Callable

import trio

from cachefs.states.pieces import Buffer

log = logging.getLogger("cachefs.readahead")

STEP = 4 << 20
DEPTH = 2

Fetch = Callable[[int, int], Awaitable[Buffer]]


ANNOUNCED = 8 << 20
"""Bytes that the disk is told of ahead of a sequential reader."""


class Announcer:
    """One handle's: tells the disk what will be wanted, once a read in a row had to wait for it."""

    def __init__(self, nursery: trio.Nursery, will_need: Callable[[int, int], Awaitable[None]]) -> None:
        self._nursery = nursery
        self._will_need = will_need
        self._next = -1
        self._told = 0
        self._cold = False

    def read(self, offset: int, size: int, *, cold: bool) -> None:
        """Note a read of ``size`` bytes from ``offset``; ``cold``: it has to wait."""
        end = offset + size
        in_a_row, self._next = offset == self._next, end
        if not in_a_row:
            self._told, self._cold = end, False
            return
        self._cold = self._cold or cold
        if self._cold and self._told - end <= ANNOUNCED // 2:
            start, self._told = max(self._told, end), end + ANNOUNCED
            self._nursery.start_soon(self._will_need, start, self._told)


class _Piece:
    """``size`` bytes from ``start``, when ``ready``; ``data`` None if fetching failed."""

    def __init__(self, start: int, size: int) -> None:
        self.start = start
        self.size = size
        self.data: Buffer | None = None
        self.ready = trio.Event()


class ReadAhead:
    """One handle's reads. Starts with the second read in a row: the first may be a probe of the tail."""

    def __init__(self, nursery: trio.Nursery, fetch: Fetch) -> None:
        self._nursery = nursery
        self._fetch = fetch
        self._pieces: deque[_Piece] = deque()
        self._next = -1
        self._in_a_row = 0
        self._version = 0

    def reset(self) -> None:
        """Forget what was fetched; the file has changed."""
        self._pieces.clear()
        self._in_a_row = 0

    async def read(self, offset: int, size: int, end: int, version: int = 0) -> Buffer:
        """``size`` bytes from ``offset`` of a file of ``end`` bytes; ``version`` moves when it changes."""
        if version != self._version:
            self._version = version
            self.reset()
        self._in_a_row = self._in_a_row + 1 if offset == self._next else 0
        self._next = offset + size
        if not self._in_a_row or size < 32 << 10:
            if not self._in_a_row:
                self._pieces.clear()
            return await self._fetch(offset, size)
        while self._pieces and self._pieces[0].start + self._pieces[0].size <= offset:
            self._pieces.popleft()
        if self._pieces and self._pieces[0].start > offset:
            self._pieces.clear()
        at = self._pieces[-1].start + self._pieces[-1].size if self._pieces else offset
        while len(self._pieces) < DEPTH and at < end:
            piece = _Piece(at, min(STEP, end - at))
            self._pieces.append(piece)
            self._nursery.start_soon(self._get, piece)
            at += piece.size
        return await self._take(offset, size)

    async def _get(self, piece: _Piece) -> None:
        try:
            piece.data = await self._fetch(piece.start, piece.size)
        except OSError:
            piece.data = None  # the read that needs it will fail on its own
        except Exception:  # it would end the mount
            log.exception("reading ahead failed")
        finally:
            piece.ready.set()

    async def _take(self, offset: int, size: int) -> Buffer:
        if not self._pieces:
            return await self._fetch(offset, size)
        piece = self._pieces[0]
        await piece.ready.wait()
        low, high = offset - piece.start, offset - piece.start + size
        if piece.data is None or high > len(piece.data):
            return await self._fetch(offset, size)
        return memoryview(piece.data)[low:high]
