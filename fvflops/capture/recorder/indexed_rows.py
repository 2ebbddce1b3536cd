"""Rows that threads append to one list, known by their indices."""

from __future__ import annotations

from operator import iadd
from typing import Any


def append_row(rows: list[Any], row: Any) -> int:
    """Append a row and return its index, which no other thread gets.

    It holds no lock, which a signal could leave held: in one call of C, no other thread and no signal comes between.

    >>> append_row(["first"], "second")
    1
    """
    return next(map(len, map(iadd, (rows,), ((row,),)))) - 1
