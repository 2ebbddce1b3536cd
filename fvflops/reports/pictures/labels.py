"""Place the labels of points so that they overlap neither each other nor points, with thin lines to their points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

PADDING = (0.03, 0.025)  # inches around a label, horizontal and vertical
RADIUS = 0.032  # inches around a point in which there is no label
_SQUARE = 0.06  # inches between places of a line on which no label may be

Point = tuple[float, float]
Line = tuple[Point, Point]


class Frame(NamedTuple):
    """A rectangle on the page, in inches."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Frame) -> bool:
        horizontal = self.left <= other.right and other.left <= self.right
        return horizontal and self.bottom <= other.top and other.bottom <= self.top

    def is_within(self, page: Frame) -> bool:
        """Return whether a rectangle is inside another, without touching its edges."""
        horizontal = page.left < self.left and self.right < page.right
        return horizontal and page.bottom < self.bottom and self.top < page.top


def around(point: Point, radius: float = RADIUS) -> Frame:
    x, y = point
    return Frame(x - radius, y - radius, x + radius, y + radius)


def circle(radius: float) -> list[Point]:
    """Return offsets in all directions, the first to the right."""
    return [(radius * math.cos(step * math.pi / 8), radius * math.sin(step * math.pi / 8)) for step in range(16)]


def _along(line: Line) -> list[Frame]:
    """Return small squares along a line, so that no label is on it."""
    (x, y), (end_x, end_y) = line
    count = max(round(math.dist(*line) / _SQUARE), 1)
    shares = [index / count for index in range(count + 1)]
    return [around((x + share * (end_x - x), y + share * (end_y - y)), _SQUARE / 4) for share in shares]


def leader_of(point: Point, label: Frame) -> Line | None:
    """Return the line from a point to its label, None where they are at most 0.12 inches apart."""
    end = _nearest(label, point)
    return (point, end) if math.dist(end, point) > 0.12 else None


def _nearest(label: Frame, point: Point) -> Point:
    x, y = point
    return min(max(x, label.left), label.right), min(max(y, label.bottom), label.top)


def place_labels(
    points: Sequence[Point],
    sizes: Sequence[tuple[float, float]],
    *,
    page: Frame,
    occupied: Sequence[Frame],
    lines: Sequence[Line],
    rings: Sequence[Sequence[tuple[float, float]]],
) -> list[Frame | None]:
    """Return a free rectangle within `page` for the label of each point, None where there is none.

    All lengths are in inches. `sizes` are the (width, height) of the labels. A ring is a list of offsets (right, up)
    from a point to the nearest end of its label, or to the middle if `right` is 0, and to the middle of its height. All
    points try a ring, the first points first, before those without a label try the next one: of the free places the
    first that is not close to another point is taken. A label beyond the left or right end of the page is moved into
    it. Neither a label nor its leader is on an occupied place or another label. Leaders may cross `lines`, and so
    may labels that have no other place.
    """
    taken = list(occupied)
    on_lines = [square for line in lines for square in _along(line)]
    placed: list[Frame | None] = [None] * len(points)
    for blocked, ring in product((on_lines, ()), rings):
        for index, (point, size) in enumerate(zip(points, sizes, strict=True)):
            if placed[index] is not None:
                continue
            labels = [_frame_at(point, size, offset, page) for offset in ring]
            if free := [label for label in labels if _is_free(label, point, page, taken, blocked)]:
                others = [other for other in points if other is not point]
                placed[index] = label = max(free, key=lambda label: _room(label, others))
                taken += _frames_of(label, point)
    return placed


def _frames_of(label: Frame, point: Point) -> list[Frame]:
    """Return the area of a label with padding and its leader, without the marker of its point."""
    horizontal, vertical = PADDING
    left, bottom, right, top = label
    padded = Frame(left - horizontal, bottom - vertical, right + horizontal, top + vertical)
    leader = leader_of(point, label)
    marker = around(point, 2 * RADIUS)
    return [padded, *(square for square in _along(leader) if not square.overlaps(marker))] if leader else [padded]


def _is_free(label: Frame, point: Point, page: Frame, taken: Sequence[Frame], blocked: Sequence[Frame]) -> bool:
    padded, *leader = _frames_of(label, point)
    if not padded.is_within(page) or any(map(padded.overlaps, blocked)):
        return False
    return not any(frame.overlaps(other) for frame in (padded, *leader) for other in taken)


def _room(label: Frame, others: Sequence[Point]) -> float:
    """Return how far the nearest other point is, up to 0.08 inches, from which none seems to have the label."""
    return min([0.08, *(math.dist(other, _nearest(label, other)) for other in others)])


def _frame_at(point: Point, size: tuple[float, float], offset: tuple[float, float], page: Frame) -> Frame:
    (x, y), (width, height), (right, up) = point, size, offset
    side = (right > 0) - (right < 0)
    left, bottom = x + right - width * (1 - side) / 2, y + up - height / 2
    first, last = page.left + 1.1 * PADDING[0], page.right - 1.1 * PADDING[0] - width
    left = min(max(left, first), max(last, first))
    return Frame(left, bottom, left + width, bottom + height)
