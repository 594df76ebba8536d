"""Whether LMDB may free a value that lies in pages of its own.

It frees as many pages, from the number on, as the header in front of the value
says. With a flipped bit there it would free pages of other values, or pages
beyond the file, and hand them out to be written over.
"""

import ctypes
import os

import numpy as np

from cachefs.states.pieces import Buffer
from cachefs.store.layout import PAGE

_HEADER = np.dtype([("number", "<u8"), ("pad", "<u2"), ("flags", "<u2"), ("pages", "<u4")])
_OVERFLOW = 4


def may_free(value: Buffer, start: int) -> bool:
    """``value`` as a transaction with buffers gave it; ``start``: the address its file is mapped at."""
    if not start or not len(value):
        return True
    at = int(np.frombuffer(value, np.uint8).ctypes.data) - _HEADER.itemsize
    if at % PAGE or at < start:
        return True  # it shares a leaf page
    return _is_sound(ctypes.string_at(at, _HEADER.itemsize), at - start, len(value))


def may_free_at(file: int, start: int, size: int) -> bool:
    """The same for a value of ``size`` bytes from ``start`` of an open file, which is not read for that.

    Raises OSError where the disk cannot read the header.
    """
    at = start - _HEADER.itemsize
    head = os.pread(file, _HEADER.itemsize, at) if at >= 0 and at % PAGE == 0 else b""
    return len(head) == _HEADER.itemsize and _is_sound(head, at, size)


def _is_sound(header: bytes, at: int, size: int) -> bool:
    """Whether ``header``, at ``at`` of its file, is that of a value of ``size`` bytes in its own pages."""
    head = np.frombuffer(header, _HEADER)[0]
    pages = (_HEADER.itemsize - 1 + size) // PAGE + 1
    whole = head["flags"] == _OVERFLOW and head["pages"] == pages
    return bool(whole and head["number"] == at // PAGE)
