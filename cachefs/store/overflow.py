"""Whether LMDB may free a value that lies in pages of its own.

It frees as many pages, from the number on, as the header in front of the value
says. With a flipped bit there it would free pages of other values, or pages
beyond the file, and hand them out to be written over.
"""

import ctypes

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
    head = np.frombuffer(ctypes.string_at(at, _HEADER.itemsize), _HEADER)[0]
    pages = (_HEADER.itemsize - 1 + len(value)) // PAGE + 1
    whole = head["flags"] == _OVERFLOW and head["pages"] == pages
    return bool(whole and head["number"] == (at - start) // PAGE)
