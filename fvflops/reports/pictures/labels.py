"""Place the labels of points so that they overlap neither each other nor points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

PADDING = (0.03, 0.025)  # inches around a label, horizontal and vertical


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


def around(x: float, y: float, radius: float) -> Frame:
    """Return the square around a point."""
    return Frame(x - radius, y - radius, x + radius, y + radius)


def place_labels(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    *,
    page: Frame,
    occupied: Sequence[Frame],
    offsets: Sequence[tuple[float, float]],
    cost: Callable[[tuple[float, float], Frame], float] | None = None,
) -> list[Frame | None]:
    """Return a free rectangle for the label of each point, None where there is none; the first points choose first.

    All lengths are in inches. `sizes` are the (width, height) of the labels. An offset (right, up) is from the point to
    the nearest end of the label, or to its middle if `right` is 0, and to the middle of its height. Of the free
    rectangles within `page` the one with the least `cost`, given the point, is chosen; of equal ones the first.

    >>> page, offsets = Frame(0, 0, 4, 3), ((0.1, 0), (-0.1, 0))
    >>> [frame and round(frame.left, 2) for frame in place_labels(
    ...     [(1, 1), (1.2, 1), (1.1, 1)], [(0.5, 0.1)] * 3, page=page, occupied=(), offsets=offsets)]
    [1.1, 0.6, None]
    """
    taken = list(occupied)
    placed: list[Frame | None] = []
    for (x, y), (width, height) in zip(points, sizes, strict=True):
        best: tuple[float, Frame, Frame] | None = None
        for right, up in offsets:
            side = (right > 0) - (right < 0)
            left, bottom = x + right - width * (1 - side) / 2, y + up - height / 2
            frame = Frame(left, bottom, left + width, bottom + height)
            padded = Frame(left - PADDING[0], bottom - PADDING[1], frame.right + PADDING[0], frame.top + PADDING[1])
            if not padded.is_within(page) or any(map(padded.overlaps, taken)):
                continue
            value = 0.0 if cost is None else cost((x, y), frame)
            if best is None or value < best[0]:
                best = value, frame, padded
        placed.append(None if best is None else best[1])
        if best is not None:
            taken.append(best[2])
    return placed
