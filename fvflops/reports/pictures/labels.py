"""Place the labels of points so that they overlap neither each other nor points, with thin lines to their points."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

PADDING = (0.03, 0.025)  # inches around a label, horizontal and vertical
_ROUNDS = 4  # in which labels move
_ORDERS, _MANY = 8, 80  # other orders that are tried, and the most labels that all of them place
_MISSING = 2.0  # cost of a missing label

Point = tuple[float, float]


class Frame(NamedTuple):
    """A rectangle on the page, in inches."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Frame) -> bool:
        """Return whether two rectangles have a point in common."""
        horizontal = self.left <= other.right and other.left <= self.right
        return horizontal and self.bottom <= other.top and other.bottom <= self.top

    def is_within(self, page: Frame) -> bool:
        """Return whether a rectangle is inside another, without touching its edges."""
        horizontal = page.left < self.left and self.right < page.right
        return horizontal and page.bottom < self.bottom and self.top < page.top


class Label(NamedTuple):
    """The rectangle of a label and its point."""

    point: Point
    frame: Frame


Cost = Callable[[Label, Sequence[Label]], float]


def around(point: Point, radius: float) -> Frame:
    """Return the square around a point."""
    x, y = point
    return Frame(x - radius, y - radius, x + radius, y + radius)


def place_labels(
    points: Sequence[Point],
    sizes: Sequence[tuple[float, float]],
    *,
    page: Frame,
    occupied: Sequence[Frame],
    offsets: Sequence[tuple[float, float]],
    near: Sequence[tuple[float, float]],
    cost: Cost,
) -> list[Frame | None]:
    """Return a free rectangle for the label of each point, None where there is none; the first points choose first.

    All lengths are in inches. `sizes` are the (width, height) of the labels. An offset (right, up) is from the point to
    the nearest end of the label, or to its middle if `right` is 0, and to the middle of its height. Of the free
    rectangles within `page` the one with the least `cost`, given the other labels, is chosen; of equal ones the first.
    Offsets in `near` are tried for all points before `offsets` for those that remain. Labels beyond the left or right
    end of the page are moved into it, and all move while that lowers the cost; an infinite one forbids a place. Of a
    few orders in which points choose, the one with the least total cost is taken.
    """
    placement = _Placement(points, sizes, page, occupied, cost)
    chance = random.Random(0)
    first = list(range(len(points)))
    others = [chance.sample(first, len(points)) for _ in range(min(_ORDERS, _MANY // max(len(points), 1)))]
    best = min((placement.arrange(order, offsets, near) for order in (first, *others)), key=placement.judge)
    return [best[index].frame if index in best else None for index in first]


class _Placement(NamedTuple):
    """The points, the sizes of their labels, and what is in their way."""

    points: Sequence[Point]
    sizes: Sequence[tuple[float, float]]
    page: Frame
    occupied: Sequence[Frame]
    cost: Cost

    def arrange(
        self, order: Sequence[int], offsets: Sequence[tuple[float, float]], near: Sequence[tuple[float, float]]
    ) -> dict[int, Label]:
        """Return labels by the index of their points, which choose in an order."""
        placed: dict[int, Label] = {}
        for tried in (near, offsets):
            for index in order:
                if index not in placed and (label := self.choose(index, tried, list(placed.values()))):
                    placed[index] = label
        for _ in range(_ROUNDS):
            before = dict(placed)
            for index in order:
                others = [label for other, label in placed.items() if other != index]
                if label := self.choose(index, offsets, others):
                    placed[index] = label
            if placed == before:
                break
        return placed

    def choose(self, index: int, offsets: Sequence[tuple[float, float]], others: Sequence[Label]) -> Label | None:
        """Return the best label of a point that is free, None if none is."""
        taken = [*(_pad(label.frame) for label in others), *self.occupied]
        (x, y), (width, height) = self.points[index], self.sizes[index]
        first, last = self.page.left + 1.1 * PADDING[0], self.page.right - 1.1 * PADDING[0] - width
        best, least = None, math.inf
        for right, up in offsets:
            side = (right > 0) - (right < 0)
            left, bottom = x + right - width * (1 - side) / 2, y + up - height / 2
            if first <= last:  # else it is wider than the page
                left = min(max(left, first), last)
            label = Label((x, y), Frame(left, bottom, left + width, bottom + height))
            padded = _pad(label.frame)
            if padded.is_within(self.page) and not any(map(padded.overlaps, taken)):
                value = self.cost(label, others)
                if value < least:
                    best, least = label, value
        return best

    def judge(self, placed: Mapping[int, Label]) -> float:
        """Return the cost of an arrangement, with that of labels that are missing."""
        return _MISSING * (len(self.points) - len(placed)) + sum(
            self.cost(label, [other for key, other in placed.items() if key != index])
            for index, label in placed.items()
        )


def _pad(frame: Frame) -> Frame:
    horizontal, vertical = PADDING
    return Frame(frame.left - horizontal, frame.bottom - vertical, frame.right + horizontal, frame.top + vertical)


LEADER = 0.12  # inches from which a leader leads from a label to its point
RADIUS = 0.032  # inches around a point in which there is no label
_CLOSE = 0.08  # inches between a label and a point to which it seems to belong
# What is as bad as so many inches between a label and its point.
_NEIGHBOUR, _CROSSED, _PASSED = 0.05, 0.25, 0.5

Line = tuple[Point, Point]


def leader_of(label: Label) -> Line | None:
    """Return the line from a point to its label, None where they are close."""
    end = _nearest(label.frame, label.point)
    return (label.point, end) if math.dist(end, label.point) > LEADER else None


class LabelCost:
    """The cost of a place of a label, for `place_labels`: how far it is from its point, and what is in between.

    `points` are all points of a plot and `lines` what is drawn between them, in inches. With `clear` no leader may
    pass a label, another leader or a point that is not its own: among many points it would not be seen.
    """

    def __init__(self, points: Sequence[Point], lines: Sequence[Line], *, clear: bool = False) -> None:
        import numpy as np

        self._points = np.array(points, dtype=float).reshape(-1, 2)
        self._lines = lines
        self._clear = clear

    def __call__(self, label: Label, others: Sequence[Label]) -> float:
        """Return the cost of a label beside others, in inches; infinity forbids it."""
        leader = leader_of(label)
        leaders = [line for line in map(leader_of, others) if line is not None]
        neighbours = self._points[(self._points != label.point).any(axis=1)]
        passed = sum(_crosses(line, label.frame) for line in leaders)
        if leader is not None:
            passed += int((_distances_to_line(neighbours, leader) < RADIUS).sum())
            passed += sum(_crosses(leader, other.frame) for other in others)
            passed += sum(_intersect(leader, line) for line in leaders)
        if passed and self._clear:
            return math.inf
        crossed = sum(_crosses(line, label.frame) for line in self._lines)
        close = int((_distances(neighbours, label.frame) < _CLOSE).sum())
        distance = math.dist(_nearest(label.frame, label.point), label.point)
        return distance + _NEIGHBOUR * close + _CROSSED * crossed + _PASSED * passed


def _crosses(line: Line, frame: Frame) -> bool:
    """Return whether a line passes through a rectangle or begins in it."""
    left, bottom, right, top = frame
    (x1, y1), (x2, y2) = line
    if max(x1, x2) < left or min(x1, x2) > right or max(y1, y2) < bottom or min(y1, y2) > top:
        return False
    if left < x1 < right and bottom < y1 < top:
        return True
    corners = [(left, bottom), (right, bottom), (right, top), (left, top), (left, bottom)]
    return any(_intersect(line, side) for side in pairwise(corners))


def _intersect(first: Line, second: Line) -> bool:
    """Return whether two lines cross."""

    def side(line: Line, point: Point) -> bool:
        (x1, y1), (x2, y2) = line
        return (x2 - x1) * (point[1] - y1) > (y2 - y1) * (point[0] - x1)

    return side(first, second[0]) != side(first, second[1]) and side(second, first[0]) != side(second, first[1])


def _nearest(frame: Frame, point: Point) -> Point:
    """Return the point of a rectangle that is nearest to another."""
    x, y = point
    return min(max(x, frame.left), frame.right), min(max(y, frame.bottom), frame.top)


def _distances(points: Any, frame: Frame) -> Any:
    """Return the distances of points, an array of (x, y), from a rectangle."""
    import numpy as np

    return np.hypot(*(points - np.clip(points, frame[:2], frame[2:])).T)


def _distances_to_line(points: Any, line: Line) -> Any:
    """Return the distances of points, an array of (x, y), from a line between two others."""
    import numpy as np

    start, along = np.array(line[0]), np.subtract(line[1], line[0])
    shares = np.clip((points - start) @ along / (along @ along), 0.0, 1.0)
    return np.hypot(*(points - start - shares[:, None] * along).T)
