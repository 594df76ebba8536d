"""Settings of the C library's allocator, for a daemon that handles megabytes at a time."""

import ctypes

# malloc.h
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8

_TRIM = 64 << 20
_MMAP = 32 << 20


def keep_memory() -> None:
    """Keep up to 64 MiB of freed memory instead of giving it back to the kernel at once.

    LMDB takes and frees a buffer for every payload it writes, the kernel's requests
    and the pieces of a save come and go the same way, and by default each of them
    is mapped, faulted in page by page, and unmapped again: a third of the
    processor time of a save of new content. Without glibc nothing is changed.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP)
    mallopt(_M_TRIM_THRESHOLD, _TRIM)
    mallopt(_M_ARENA_MAX, 1)
