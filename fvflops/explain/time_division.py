"""Divide the time of a GPU among its activities, so that each nanosecond belongs to one of them or is idle."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Interval = tuple[int, int]
# Classes of activities: an instant with several belongs to the first.
COMPUTE, COMMUNICATION, MEMCPY = range(3)


class Piece(NamedTuple):
    """A time that belongs to an activity, by its index."""

    start: int
    end: int
    activity: int


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals that are sorted by start.

    >>> merge([(0, 4), (2, 5), (5, 6), (8, 9)])
    [(0, 6), (8, 9)]
    """
    merged: list[Interval] = []
    for start, end in intervals:
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def subtract(pieces: Iterable[Piece], covered: Sequence[Interval]) -> Iterator[Piece]:
    """Yield disjoint sorted pieces without the disjoint sorted intervals.

    >>> list(subtract([Piece(0, 10, 7)], [(2, 3), (5, 20)]))
    [Piece(start=0, end=2, activity=7), Piece(start=3, end=5, activity=7)]
    """
    position = 0
    for start, end, index in pieces:
        while position < len(covered) and covered[position][1] <= start:
            position += 1
        cover = position
        while start < end and cover < len(covered) and covered[cover][0] < end:
            if covered[cover][0] > start:
                yield Piece(start, covered[cover][0], index)
            start = max(start, covered[cover][1])
            cover += 1
        if start < end:
            yield Piece(start, end, index)


def disjoint(starts: Sequence[int], ends: Sequence[int], indexes: Iterable[int]) -> Iterator[Piece]:
    """Yield the pieces of activities, sorted by start; an overlap belongs to the one that started first."""
    cursor = -(2**63)
    for index in indexes:
        start, end = max(starts[index], cursor), ends[index]
        if start < end:
            yield Piece(start, end, index)
            cursor = end


def split(pieces: Iterable[Piece], bounds: Sequence[int]) -> Iterator[tuple[int, Piece]]:
    """Yield (window, piece) with pieces cut at the bounds of windows; window i is from bound i to the next.

    No piece is outside the first and the last bound.

    >>> list(split([Piece(1, 7, 0)], [0, 5, 9]))
    [(0, Piece(start=1, end=5, activity=0)), (1, Piece(start=5, end=7, activity=0))]
    """
    for start, end, index in pieces:
        window = bisect_right(bounds, start) - 1
        while end > bounds[window + 1]:
            yield window, Piece(start, bounds[window + 1], index)
            start, window = bounds[window + 1], window + 1
        yield window, Piece(start, end, index)


def gaps(covered: Sequence[Interval], start: int, end: int) -> Iterator[Interval]:
    """Yield the times of a window that disjoint sorted intervals leave.

    >>> list(gaps([(1, 2), (4, 9)], 0, 8))
    [(0, 1), (2, 4)]
    """
    first = max(0, bisect_right(covered, (start, start)) - 1)
    for index in range(first, len(covered)):
        if covered[index][0] >= end:
            break
        if covered[index][0] > start:
            yield start, covered[index][0]
        start = max(start, covered[index][1])
    if start < end:
        yield start, end
