"""The parser's side of the input: wait for bytes, give out pieces.

Parsers are generators. They yield the number of bytes they need in the window and are resumed when so many
are there, or when the file has ended. What they take they give out in the same step, so the pieces always
add up to the input.
"""

from collections.abc import Generator, Iterable
from typing import TypeVar

from pyfastcdc import FastCDC

from .headers import LOOK, MAGICS, SHARED_MAGIC_TAIL, container_start
from .pieces import Band, Chunk, Piece, Rows
from .report import Report
from .window import Window

T = TypeVar("T")
Step = Generator[int, None, T]

CHUNK_AVERAGE = 64 * 1024
CHUNK_LEAST = 16 * 1024
CHUNK_MOST = 256 * 1024
# Largest transposed band in bytes: it is held back whole.
BAND_MOST = 64 * 1024 * 1024
BAND_ROWS = 64
# Magics in one file that turn out to start nothing before the search is given up: a file made of nothing but
# magics shall cost no more than another.
CANDIDATES_MOST = 1 << 16


class Source:
    """The window, the pieces given out and what is known about the file.

    ``offset`` is the window's place in the file. ``promised`` is the size that headers promise, as long as
    the file was recognised from its first byte on (``whole``); a state's fragment inside a foreign file
    promises nothing. ``expected`` is the first bytes of a header that may, but need not, come next.
    ``wasted`` counts bytes that were looked at in vain, or what took as long.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.window = Window()
        self.out: list[Piece] = []
        self.report = Report()
        self.eof = False
        self.offset = 0
        self.row_bytes = 0
        self.promised = 0
        self.whole = True
        self.expected = b""
        self.wasted = 0
        self._candidates = CANDIDATES_MOST
        self._cdc: FastCDC | None = None

    def promise(self, size: int) -> None:
        """The file is at least ``size`` bytes long if its headers hold."""
        self.promised = size if self.whole else 0

    def stop(self, reason: str) -> None:
        """Recognition ends here, until the next magic."""
        self.report.stopped = (self.offset, reason)
        self.whole = False
        self.promised = 0

    def charge(self, cost: int, size: int) -> None:
        """Something of ``size`` bytes was recognised that took as long as ``cost`` bytes take to cut."""
        self.wasted += max(0, cost - size)

    def fill(self, n: int) -> Step[bool]:
        """Wait for ``n`` bytes; False when the file ends before."""
        while self.window.have < n:
            if self.eof:
                return False
            yield n
        return True

    def peek(self, n: int, start: int = 0) -> Step[bytes]:
        """``n`` bytes from ``start`` on, fewer at the end of the file; nothing is consumed."""
        if self.window.have < start + n and not self.eof:
            yield start + n
        return self.window.peek(n, start)

    def chunk(self, n: int) -> None:
        """Give out ``n`` bytes that are there as one chunk (a header)."""
        if n:
            self.out.append(Chunk(self.window.take(n)))
            self.offset += n

    def fixed(self, n: int) -> Step[bool]:
        """``n`` bytes in pieces of ``target`` from here on; False when the file ends before."""
        while n:
            size = min(n, self.target)
            if not (yield from self.fill(size)):
                self.chunk(self.window.have)
                return False
            self.chunk(size)
            n -= size
        return True

    def rows(self, cuts: Iterable[int], width: int) -> Step[bool]:
        """A linear section: groups of ``cuts`` rows of ``width`` bytes; False when the file ends before."""
        window = self.window
        for cells in cuts:
            size = cells * width
            while window.have < size:
                if self.eof:
                    self._rest_of_rows(width)
                    return False
                yield size
            self.out.append(Rows(window.take(size), width))
            self.offset += size
            self.row_bytes += size
        return True

    def _rest_of_rows(self, width: int) -> None:
        size = self.window.have // width * width
        if size:
            self.out.append(Rows(self.window.take(size), width))
            self.offset += size
            self.row_bytes += size
        self.chunk(self.window.have)

    def bands(self, cuts: tuple[int, ...], rows: int, width: int) -> Step[bool]:
        """A transposed section of ``rows`` embedding rows of ``sum(cuts)`` elements of ``width`` bytes."""
        line = sum(cuts) * width
        if line > BAND_MOST:
            return (yield from self.fixed(rows * line))
        step = BAND_ROWS
        while step > 1 and step * line > BAND_MOST:
            step //= 2
        while rows:
            count = min(step, rows)
            if not (yield from self.fill(count * line)):
                count = self.window.have // line
                if count:
                    self._band(count, width, cuts, line)
                self.chunk(self.window.have)
                return False
            self._band(count, width, cuts, line)
            rows -= count
        return True

    def _band(self, rows: int, width: int, cuts: tuple[int, ...], line: int) -> None:
        self.out.append(Band(self.window.take(rows * line), rows, width, cuts))
        self.offset += rows * line
        self.row_bytes += rows * line

    def chunks(self, n: int) -> Step[bool]:
        """``n`` bytes in content-defined chunks; False when the file ends before."""
        while n:
            if not (yield from self.fill(min(n, 2 * CHUNK_MOST))):
                self._cut_all(self.window.have)
                return False
            size = min(n, self.window.have)
            before = self.offset
            if size == n:
                self._cut_all(size)
            else:
                self._cut_sure(size)
            n -= self.offset - before
        return True

    def plain(self) -> Step[None]:
        """Content-defined chunks to the end of the file, without looking for anything."""
        while (yield from self.fill(2 * CHUNK_MOST)):
            self._cut_sure(self.window.have)
        self._cut_all(self.window.have)

    def foreign(self) -> Step[None]:
        """Content-defined chunks up to the next container, or to the end of the file.

        A chunk is given out when no container starts within CHUNK_MOST bytes of its beginning, so that the
        cuts do not depend on how much of the file is there.
        """
        clear = 0
        while True:
            if not (yield from self.fill(2 * CHUNK_MOST + 3)) and not self.window.have:
                return
            data, at = self.window.whole()
            hit = find_magic(data, at + clear) - at if self._candidates else -1
            if hit >= 0:
                if container_start((yield from self.peek(LOOK, hit))):
                    self._cut_all(hit)
                    return
                self._candidates -= 1
                clear = hit + 1
                continue
            if self.eof:
                self._cut_all(self.window.have)
                return
            clear = self.window.have - 3
            before = self.offset
            self._cut_sure(clear)
            clear -= self.offset - before

    def _cut_all(self, n: int) -> None:
        """Cut the next ``n`` bytes as a region that ends there."""
        while n > 0:
            n -= self._cut(n)

    def _cut_sure(self, n: int) -> None:
        """Cut off the chunks that the next ``n`` bytes determine wholly."""
        while n >= CHUNK_MOST:
            n -= self._cut(CHUNK_MOST)

    def _cut(self, n: int) -> int:
        """Give out one chunk of the next ``n`` bytes and tell its length."""
        if n > CHUNK_LEAST:
            if self._cdc is None:
                self._cdc = FastCDC(CHUNK_AVERAGE, min_size=CHUNK_LEAST, max_size=CHUNK_MOST)
            data, at = self.window.whole()
            first = next(iter(self._cdc.cut_buf(memoryview(data)[at : at + min(n, CHUNK_MOST)])))
            n = int(first.length)
        self.chunk(n)
        return n


def find_magic(data: bytes, start: int) -> int:
    """Index of the first magic at or after ``start``, or -1."""
    # In growing steps: looking for each magic in all of the data would cost that much for every hit.
    step = 4096
    while start < len(data):
        end = start + step
        hit = _magic_between(data, start, end + 3)
        if hit >= 0:
            return hit
        start, step = end, step * 4
    return -1


def _magic_between(data: bytes, start: int, end: int) -> int:
    """Index of the first magic that lies in ``data[start:end]``, or -1."""
    blob = data.find(MAGICS["blob"], start, end)
    if blob >= 0:
        end = blob
    # ggsq and ggsn differ in their first byte only, so one search finds both.
    at = data.find(SHARED_MAGIC_TAIL, start + 1, end)
    while at >= 0:
        if data[at - 1] in (MAGICS["ggsq"][0], MAGICS["ggsn"][0]):
            return at - 1
        at = data.find(SHARED_MAGIC_TAIL, at + 1, end)
    return blob
