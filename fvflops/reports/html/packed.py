"""Columns of numbers in which equal layers repeat a pattern, written once for all repetitions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

# A column is packed if that leaves at most this share of its values.
_WORTH = 0.5


def pack(values: Sequence[Any]) -> list[Any] | dict[str, Any]:
    """Return a column as runs, if shorter: [repetitions, values] or [repetitions, values, steps].

    The steps are added to the values at each repetition.
    """
    runs: list[list[Any]] = []
    plain = 0  # the first value that is not in a run
    length = len(values)
    differences = [_difference(first, second) for first, second in pairwise(values)]
    # Equal at corresponding values of two repetitions.
    keys = list(zip(differences, differences[1:], differences[2:], strict=False))
    last: dict[tuple[Any, ...], int] = {}
    for position, key in enumerate(keys):
        start = last.get(key, -1)
        last[key] = position
        period = position - start
        if start < plain or position + period >= len(keys) or keys[position + period] != key:
            continue
        steps = list(map(_difference, values[start:position], values[position : position + period]))
        if None in steps:
            continue
        end = position + period
        while end < length and _difference(values[end - period], values[end]) == steps[(end - start) % period]:
            end += 1
        times = (end - start) // period
        if times < 3:
            continue
        if start > plain:
            runs.append([1, list(values[plain:start])])
        runs.append([times, list(values[start:position]), *([steps] if any(steps) else [])])
        plain = start + times * period
    if plain < length:
        runs.append([1, list(values[plain:])])
    size = sum(sum(map(len, run[1:])) for run in runs)
    return {"runs": runs} if size <= _WORTH * length else list(values)


def unpack(column: Sequence[Any] | dict[str, Any]) -> list[Any]:
    """Return the values of a column."""
    if not isinstance(column, dict):
        return list(column)
    values: list[Any] = []
    for times, pattern, *steps in column["runs"]:
        for repetition in range(times):
            for index, value in enumerate(pattern):
                values.append(value + repetition * steps[0][index] if steps and steps[0][index] else value)
    return values


def _difference(first: Any, second: Any) -> int | None:
    """Return the difference between two integers, 0 between equal values of any type, else None."""
    if first == second:
        return 0
    return second - first if type(first) is int and type(second) is int else None
