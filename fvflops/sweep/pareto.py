"""The Pareto front of models by two of their costs or qualities."""

from __future__ import annotations

from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]], *, lower: tuple[bool, bool] = (True, True)) -> list[int]:
    """Return the indexes of the points that no other point dominates, in the order of their first coordinate.

    `lower` says of each coordinate whether less is better. A point dominates another if it is at least as good in both
    coordinates and better in one, so of equal points all are returned or none. A NaN raises ValueError.

    >>> pareto_front([(4.1, 80.4), (17.6, 81.1), (7.8, 80.0), (0.3, 67.7)], lower=(True, False))
    [3, 0, 1]
    """
    if any(value != value for point in points for value in point):
        raise ValueError("a point with NaN has no place in an order: leave it out")
    keys = [tuple(value if less else -value for value, less in zip(point, lower, strict=True)) for point in points]
    front: list[int] = []
    for index in sorted(range(len(keys)), key=keys.__getitem__):
        if not front or keys[index][1] < keys[front[-1]][1] or keys[index] == keys[front[-1]]:
            front.append(index)
    return front if lower[0] else front[::-1]
