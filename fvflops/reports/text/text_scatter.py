"""Scatter plots of plain text."""

from __future__ import annotations

from fvflops.reports.document import Scatter
from fvflops.reports.escaping import printable
from fvflops.reports.text.display_width import display_width

_WIDTH, _HEIGHT = 80, 12
_POINT, _MARKED, _LIMIT = "·", "●", "-"


def text_scatter(plot: Scatter, *, width: int | None = None) -> str:
    """Return a plot in lines of at most `width` cells, 80 if None; marked points are ●.

    >>> from fvflops.reports.document import Point
    >>> print(text_scatter(Scatter("", [Point(1, 1, "", True), Point(2, 12)], "seconds", "GB"), width=24))
    GB
    12 |                   ·
       |
       |
       |
       |
       |
       |
       |
       |
       |
       |
     1 |●
        1                 2
        seconds
    ● Pareto front
    """
    (left, right), (low, high) = plot.spans()
    names = [plot.y_form(high), plot.y_form(low)]
    margin = max(map(display_width, names)) + 2
    columns = max((width or _WIDTH) - margin - 1, 8)
    rows = [[" "] * columns for _ in range(_HEIGHT)]
    if plot.limit is not None:
        rows[_place(plot.limit[0], low, high, _HEIGHT)] = list(_LIMIT * columns)
    for point in sorted(plot.points, key=lambda item: item.marked):
        row, column = _place(point.y, low, high, _HEIGHT), _place(point.x, left, right, columns)
        rows[row][column] = _MARKED if point.marked else _POINT
    labels = {_HEIGHT - 1: names[0], 0: names[1]}
    lines = [printable(plot.y)]
    for index in reversed(range(_HEIGHT)):
        label = labels.get(index, "")
        lines.append(f"{' ' * (margin - 2 - display_width(label))}{label} |{''.join(rows[index])}".rstrip())
    first, last = plot.x_form(left), plot.x_form(right)
    gap = max(columns - display_width(first) - display_width(last), 1)
    lines += [f"{' ' * margin}{first}{' ' * gap}{last}", f"{' ' * margin}{printable(plot.x)}"]
    if any(point.marked for point in plot.points):
        lines.append(f"{_MARKED} {printable(plot.marks)}")
    if plot.limit is not None:
        lines.append(f"{_LIMIT * 2} {printable(plot.limit[1])}")
    return "\n".join(lines)


def _place(value: float, low: float, high: float, count: int) -> int:
    """Return the cell of a value among `count` cells from `low` to `high`."""
    return 0 if high == low else round((value - low) / (high - low) * (count - 1))
