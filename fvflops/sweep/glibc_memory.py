"""Let the C library keep freed memory for the next allocation, where it is glibc.

By default glibc returns each large block to the system when it is freed, and the system clears every page of the next
one: real execution of a large model spends more time in that than in the model.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache

_TRIM_THRESHOLD = -1  # parameters of mallopt, of malloc.h
_MMAP_THRESHOLD = -3
_MOST_KEPT = 1 << 30  # bytes that are free at the end of the heap
_LARGEST = (1 << 31) - 1  # bytes of a block; larger ones are returned when they are freed


def keep_freed_memory() -> bool:
    """Keep up to a GiB of freed memory in this process, from now on; return whether the C library can."""
    library = _glibc()
    if library is None:
        return False
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST) and library.mallopt(_TRIM_THRESHOLD, _MOST_KEPT))


def return_freed_memory() -> None:
    """Return all memory that is free now to the system."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
