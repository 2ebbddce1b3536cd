"""Copy the event rows of one iteration of a loop, with storages of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_Row = tuple[Any, ...]


def copy_rows(rows: Sequence[_Row], storages: list[_Row], times: int) -> list[_Row]:
    """Return an iteration's event rows repeated, and append to `storages` those that each repetition creates.

    A storage that the iteration frees is created by it; the others, such as weights, are shared by all repetitions.

    >>> storages = [(4, "cpu", "op")]
    >>> copy_rows([("op", 7, 1, "forward", 0, (), (0,)), ("free", 0, 1)], storages, 2)[2:]
    [('op', 7, 1, 'forward', 0, (), (2,)), ('free', 2, 1)]
    >>> len(storages)
    3
    """
    freed = sorted({row[1] for row in rows if row[0] == "free"})  # as they were created
    copies: list[_Row] = []
    for _ in range(times):
        indices: dict[int, int] = {}
        for index in freed:
            indices[index] = len(storages)
            storages.append(storages[index])
        for row in rows:
            if row[0] == "op":
                reads, writes = row[5], row[6]
                mapped = (
                    tuple([indices.get(index, index) for index in reads]),
                    tuple([indices.get(index, index) for index in writes]),
                )
                copies.append((*row[:5], *mapped, *row[7:]))
            elif row[0] == "free":
                copies.append(("free", indices[row[1]], *row[2:]))
            else:
                copies.append(row)
    return copies
