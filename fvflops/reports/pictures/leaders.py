"""Leaders, the thin lines from labels to their points, and the places of labels that keep clear of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from fvflops.reports.pictures.labels import Frame, Label, Point

LEADER = 0.12  # inches from which a leader leads from a label to its point
RADIUS = 0.032  # inches around a point in which there is no label
_CLOSE = 0.08  # inches between a label and a point to which it seems to belong
# What is as bad as so many inches between a label and its point.
_NEIGHBOUR, _CROSSED, _PASSED = 0.05, 0.25, 0.5

Line = tuple[Point, Point]


def leader_of(label: Label) -> Line | None:
    """Return the line from a point to its label, None where they are close.

    >>> leader_of(Label((1.0, 1.0), Frame(1.5, 0.9, 2.0, 1.1))), leader_of(Label((1.0, 1.0), Frame(1.1, 0.9, 1.6, 1.1)))
    (((1.0, 1.0), (1.5, 1.0)), None)
    """
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
