"""Rows that threads append to one list, known by their indices."""

from __future__ import annotations

from threading import RLock
from typing import Any

from fvflops.capture.restore.forks import at_fork

_LOCK = RLock()  # a finalizer may append while its thread does


def append_row(rows: list[Any], row: Any) -> int:
    """Append a row and return its index, which no other thread gets.

    >>> append_row(["first"], "second")
    1
    """
    with _LOCK:
        rows.append(row)
        return len(rows) - 1


def _renew_lock() -> None:
    global _LOCK
    _LOCK = RLock()


at_fork(_renew_lock)
