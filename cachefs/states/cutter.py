"""The cutter: bytes in file order in, pieces out."""

from collections.abc import Generator

from .headers import ROW_HEADER
from .pieces import Piece
from .recognise import parse_file
from .report import Report
from .source import Source

TARGET = 256 * 1024


class Cutter:
    """Cuts one file into pieces while it is written.

    The pieces' bytes add up to the input, and pieces, boundaries and kinds do not depend on how the input was
    split into calls of ``feed``. It never raises for any input.

    ``target`` is the largest group of rows in bytes (a single row may be larger). Held back, and so the bound
    on ``held``: the larger of one group or row (at most 4 MiB), one cell table (2**21 cells, 64 MiB), one
    transposed band (64 MiB) and 512 KiB for content-defined chunks; plus one call's data. While a cell table
    is looked at, a copy of it and its positions (8 bytes a cell) come on top.
    """

    def __init__(self, *, target: int = TARGET) -> None:
        self._source = Source(max(1, target))
        self._window = self._source.window
        self._parser: Generator[int, None, None] = parse_file(self._source)
        self._need = 0
        self._total = 0
        self._run()

    def feed(self, data: bytes) -> list[Piece]:
        """Take in the next bytes of the file; the pieces that are determined now."""
        size = len(data)
        if not size:
            return []
        self._total += size
        window = self._window
        window.add(data if type(data) is bytes else bytes(data))
        if window.have < self._need:
            return []
        return self._run()

    def finish(self) -> list[Piece]:
        """The file ends here; all that was held back."""
        self._source.eof = True
        return self._run()

    def _run(self) -> list[Piece]:
        source = self._source
        try:
            while source.window.have >= self._need or source.eof:
                self._need = next(self._parser)
        except StopIteration:
            pass
        except Exception as error:
            # A flaw in recognition must cost sharing only: what was taken was given out.
            source.stop(f"error: {error!r}")
            self._parser = source.plain()
            self._need = 0
            return self._run()
        pieces, source.out = source.out, []
        return pieces

    @property
    def held(self) -> int:
        """Bytes taken in and not yet given out."""
        return self._window.have

    def held_bytes(self) -> bytes:
        """The held bytes, in order."""
        return self._window.copy()

    @property
    def torn(self) -> bool:
        """Does the input so far end inside what a recognised module promised?

        Only for files recognised from their first byte on. Exact once ``finish`` was called; before, a file
        that ends within 2 KiB behind the header of a V or recurrent section counts as whole.
        """
        source = self._source
        if source.promised > self._total:
            return True
        expected = source.expected
        if not expected or not source.whole or not 0 < source.window.have < ROW_HEADER:
            return False
        return source.window.peek(4) == expected[: source.window.have]

    @property
    def promised(self) -> int:
        """Size of the file, in bytes, that the headers seen so far promise at least; 0 when unknown."""
        return self._source.promised

    @property
    def row_bytes(self) -> int:
        """Bytes given out in Rows and Band pieces."""
        return self._source.row_bytes

    @property
    def report(self) -> Report:
        """What was recognised so far."""
        return self._source.report
