"""What must hold for any bytes, whatever they are and however they arrive; for tests and for tools/fuzz."""

from collections.abc import Iterable, Iterator
from itertools import cycle

import xxhash

from cachefs.states import Band, Chunk, Cutter, Piece, Rows

MIB = 1 << 20
# What Cutter says it holds back at most, beside the data of one call.
HELD_MOST = 64 * MIB + 8192


class Broken(AssertionError):
    """A promise of the cutter that an input broke."""


def expect(holds: object, promise: str) -> None:
    if not holds:
        raise Broken(promise)


def cut(parts: Iterable[bytes], target: int, held_most: int = HELD_MOST) -> tuple[Cutter, list[Piece]]:
    """Feed ``parts`` and look at ``held`` after each."""
    cutter = Cutter(target=target)
    pieces: list[Piece] = []
    fed = out = 0
    for part in parts:
        new = cutter.feed(part)
        fed += len(part)
        if new:
            pieces += new
            out += sum([len(piece.data) for piece in new])
        held = cutter.held
        if held != fed - out:
            raise Broken("held is what was fed and not given out")
        if held > held_most + len(part):
            raise Broken("held stays within its bound")
    rest = cutter.finish()
    expect(sum([len(piece.data) for piece in rest]) == fed - out, "finish gives out what was held")
    expect(not cutter.held and not cutter.finish(), "nothing is left after finish")
    stopped = cutter.report.stopped
    expect(stopped is None or not stopped[1].startswith("error"), "recognition ends without an exception")
    return cutter, pieces + rest


def check(data: bytes, sizes: Iterable[int], target: int = 1024) -> Cutter:
    """Everything promised of ``data``, fed in one piece and in pieces of ``sizes`` in turn."""
    whole, pieces = cut([data], target)
    expect(b"".join([piece.data for piece in pieces]) == data, "the pieces add up to the input")
    rows = 0
    for piece in pieces:
        size = len(piece.data)
        expect(size, "no piece is empty")
        if isinstance(piece, Chunk):
            continue
        rows += size
        if isinstance(piece, Rows):
            expect(size % piece.width == 0, "a group is whole rows")
            expect(size <= max(target, piece.width), "a group is no larger than the target")
        else:
            expect(size == piece.rows * sum(piece.cells) * piece.width, "a band is a rectangle")
    expect(rows == whole.row_bytes, "row_bytes counts rows and bands")
    other, others = cut(_split(data, sizes), target)
    expect(len(pieces) == len(others), "the split makes no difference: number of pieces")
    for one, two in zip(pieces, others, strict=True):
        expect(_same(one, two), "the split makes no difference: pieces")
    expect(whole.promised == other.promised, "the split makes no difference: promised")
    expect(whole.torn == other.torn, "the split makes no difference: torn")
    expect(not whole.torn or whole.promised > len(data), "a torn file is promised to be longer")
    expect(whole.report == other.report, "the split makes no difference: report")
    whole.report.to_dict()
    return other


def _split(data: bytes, sizes: Iterable[int]) -> Iterator[bytes]:
    at = 0
    for size in cycle(sizes):
        if at >= len(data):
            return
        yield data[at : at + size]
        at += size


def _same(one: Piece, two: Piece) -> bool:
    # The bytes are those of the input in both, if the lengths are: held and finish are checked.
    if type(one) is not type(two) or len(one.data) != len(two.data):
        return False
    if isinstance(one, Rows):
        assert isinstance(two, Rows)
        return one.width == two.width and one.data == two.data
    if isinstance(one, Band):
        assert isinstance(two, Band)
        return (one.rows, one.width, one.cells) == (two.rows, two.width, two.cells) and one.data == two.data
    return one.data == two.data


def check_input(data: bytes) -> None:
    """``check`` with a split and a target that follow from the bytes, so that a file is a whole test case."""
    choice = xxhash.xxh3_64_intdigest(data)
    if choice & 63 == 0 and len(data) < 4096:
        sizes = [1]
    else:
        # About two dozen pieces, and some very small ones.
        most = 2 + len(data) // (8 << (choice >> 6 & 1))
        sizes = [1 + (choice >> shift) % most for shift in range(8, 40, 4)] + [choice >> 40 & 3]
    check(data, sizes, (64, 1024, 16384, 262144)[choice >> 42 & 3])
    if choice >> 44 & 0xFFF == 0:
        check_followed(data, choice >> 56 & 3)


def check_followed(data: bytes, filler: int) -> None:
    """The bound on ``held`` once much follows ``data``: zeros, its own bytes again, more cells, or noise."""
    times = 80
    if filler == 0:
        block = bytes(MIB)
    elif filler == 1 and data:
        # Small states without end are slow to read, so not as many of them.
        block, times = (data * (MIB // len(data) + 1))[:MIB], 2
    elif filler == 2:
        block = data[-24:] * (MIB // 24)
    else:
        block = xxhash.xxh3_128_digest(data) * (MIB // 16)
    cut([data, *[block] * times], 262144)
