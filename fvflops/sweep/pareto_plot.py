"""Plot models by two columns, with their Pareto front."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from fvflops.reports.display_width import truncate_middle
from fvflops.reports.document import Column, Table
from fvflops.reports.pictures import colours
from fvflops.reports.pictures.labels import Frame, around, circle, leader_of, place_labels
from fvflops.reports.pictures.picture import (
    as_text,
    encode,
    escape,
    label_linear,
    label_logarithmic,
    make_figure,
    plain,
    style_axes,
    width_of,
)
from fvflops.text import suggest


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


# One column of a paper, in inches; points of a font.
WIDTH, HEIGHT = 3.4, 2.75
_TEXT, _LABEL = 7.0, 6.0
_MANY = 25  # points: with more, only points of the front have labels
_LONGEST = 1.5  # inches of a label
# Blue and orange of Okabe and Ito's palette, which colour-blind people can tell apart; the others are grey.
_FRONT, _LINE = "#0072b2", "#d55e00"
# Offsets of labels from their points, in inches: near ones, and such that need a leader.
_RINGS = (
    *(
        [
            (radius * right, up * (radius + (0.0 if right else _LABEL / 144)))
            for right, up in ((1, 0), (1, -1), (1, 1), (0, -1), (0, 1), (-1, 0), (-1, 1), (-1, -1))
        ]
        for radius in (0.065, 0.1)
    ),
    *map(circle, (0.16, 0.23, 0.31, 0.4, 0.5, 0.65, 0.8)),
)
_ZEROS = re.compile(r"\.0+(?=\D|$)|(?<=\.\d)0+(?=\D|$)")


class _Point(NamedTuple):
    name: str
    label: str
    x: float
    y: float
    on_front: bool


def draw_pareto(
    table: Table, *, x: str, y: str, kind: str, higher: Collection[str] = (), titles: dict[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """Return a picture of one point a row, 3.4 inches wide, and the names of the Pareto front in the order of `x`.

    The first column of the table has the names; `x` and `y` are the keys of two others with numbers, of which less is
    better unless they are in `higher`. A row without one of the values has no point. `titles` are the axes' titles by
    key, else the headings. A scale is logarithmic if its values are positive and span more than a decade. `kind` is
    "svg" or "png". An unknown column, one of text, and a table without a point raise ValueError; without matplotlib
    (the extra `plot`) PlotError is raised.
    """
    columns = [check_axis(table, key) for key in (x, y)]
    lower = (x not in higher, y not in higher)
    points = _find_points(table, x, y, lower)
    if not points:
        raise ValueError(f"a plot needs points: no model has both {x} and {y}")
    figure = make_figure(WIDTH, HEIGHT, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.03, h_pad=0.03)
    axes = figure.add_subplot()
    _set_scales(axes, points, columns)
    for column, write in zip(columns, (axes.set_xlabel, axes.set_ylabel), strict=True):
        write(as_text((titles or {}).get(column.key, column.heading)), fontsize=_TEXT, color=colours.colour("ink"))
    _draw_points(axes, points, lower)
    style_axes(axes, _LABEL + 0.5)
    _draw_legend(figure, axes, points)
    figure.draw_without_rendering()  # the layout sets the size of the axes, which the labels need
    figure.set_layout_engine("none")
    _draw_labels(axes, points, lower)
    return encode(figure, kind), [point.name for point in _list_front(points)]


def has_points(table: Table, x: str, y: str) -> bool:
    keys = [column.key for column in table.columns]
    return any(row[keys.index(x)] is not None and row[keys.index(y)] is not None for row in table.rows)


def check_axis(table: Table, key: str) -> Column:
    """Return a column that can be an axis; an unknown one, and one of text, raise ValueError."""
    numbers = [column.key for column in table.columns if not column.is_text]
    for column in table.columns:
        if column.key == key and column.is_text:
            raise ValueError(f"{key} is text, no axis: choose one of {', '.join(numbers)}")
        if column.key == key:
            return column
    raise ValueError(f"an axis must be one of {', '.join(numbers)}; got {key!r}{suggest(key, numbers)}")


def _find_points(table: Table, x: str, y: str, lower: tuple[bool, bool]) -> list[_Point]:
    keys = [column.key for column in table.columns]
    rows: list[Any] = [(row[0], row[keys.index(x)], row[keys.index(y)]) for row in table.rows]
    rows = [row for row in rows if row[1] is not None and row[2] is not None]
    front = set(pareto_front([(first, second) for _, first, second in rows], lower=lower))
    labels = _shorten([str(name) for name, _, _ in rows])
    return [
        _Point(str(name), label, first, second, index in front)
        for index, (label, (name, first, second)) in enumerate(zip(labels, rows, strict=True))
    ]


def _list_front(points: Sequence[_Point]) -> list[_Point]:
    return sorted((point for point in points if point.on_front), key=lambda point: point.x)


def _shorten(names: Sequence[str]) -> list[str]:
    """Return names without the source that all have, such as `timm:`."""
    sources = {name.partition(":")[0] if ":" in name else "" for name in names}
    return [name.partition(":")[2] or name for name in names] if len(sources) == 1 and "" not in sources else [*names]


def _set_scales(axes: Any, points: Sequence[_Point], columns: Sequence[Column]) -> None:
    for scale, set_scale, set_limits, values, column in (
        (axes.xaxis, axes.set_xscale, axes.set_xlim, [point.x for point in points], columns[0]),
        (axes.yaxis, axes.set_yscale, axes.set_ylim, [point.y for point in points], columns[1]),
    ):
        least, most = min(values), max(values)
        form = partial(_write_tick, column)
        if least > 0 and most > 10 * least:
            set_scale("log")
            margin = (most / least) ** 0.08
            set_limits(least / margin, most * margin)
            label_logarithmic(scale, form, ticks=5)
        else:
            margin = 0.1 * (most - least) or abs(most) * 0.1 or 1
            set_limits(least - margin, most + margin)
            label_linear(scale, form)


def _write_tick(column: Column, value: float) -> str:
    """Return a value in the column's number format without zeros at the end, as in `10M`."""
    return as_text(_ZEROS.sub("", column.form(value)))


def _draw_points(axes: Any, points: Sequence[_Point], lower: tuple[bool, bool]) -> None:
    front = _list_front(points)
    axes.plot(*_steps(front, lower), color=_LINE, linewidth=0.9, zorder=2, solid_joinstyle="miter")
    for on_front, colour, edge, order in ((False, "white", "#7a7a7a", 3), (True, _FRONT, "white", 4)):
        shown = [point for point in points if point.on_front is on_front]
        size = 4.2 if on_front else 3.6 if len(points) <= 10 * _MANY else 2.2
        style: dict[str, Any] = {"markerfacecolor": colour, "markeredgecolor": edge, "markersize": size}
        style |= {"markeredgewidth": 0.5 if on_front else 0.8, "label": "Pareto front" if on_front else "others"}
        axes.plot([point.x for point in shown], [point.y for point in shown], "o", linestyle="", zorder=order, **style)


def _steps(front: Sequence[_Point], lower: tuple[bool, bool]) -> tuple[list[float], list[float]]:
    """Return the corners of the boundary of the dominated area."""
    xs, ys = [front[0].x], [front[0].y]
    for before, after in pairwise(front):
        # Between two points the staircase of attained values follows the better first coordinate.
        xs += [after.x, after.x] if lower[0] else [before.x, after.x]
        ys += [before.y, after.y] if lower[0] else [after.y, after.y]
    return xs, ys


def _draw_legend(figure: Any, axes: Any, points: Sequence[_Point]) -> None:
    handles, names = axes.get_legend_handles_labels()
    shown = [(handle, name) for handle, name in zip(handles, names, strict=True) if len(handle.get_xdata())]
    style: dict[str, Any] = {"fontsize": _LABEL + 0.5, "labelcolor": colours.colour("quiet"), "frameon": False}
    style |= {"loc": "outside upper left", "ncols": 2, "handletextpad": 0.0, "columnspacing": 1.0, "borderpad": 0.1}
    figure.legend(*zip(*reversed(shown), strict=True), **style)


def _draw_labels(axes: Any, points: Sequence[_Point], lower: tuple[bool, bool]) -> None:
    """Label the front, and the other points unless there are many, where there is room."""
    dpi = axes.figure.dpi
    extent = axes.get_window_extent()
    page = Frame(extent.x0 / dpi, extent.y0 / dpi, axes.figure.bbox.x1 / dpi - 0.04, extent.y1 / dpi + 0.05)
    labelled = sorted(
        (point for point in points if point.on_front or len(points) <= _MANY), key=lambda point: not point.on_front
    )
    texts = [_fit(plain(point.label)) for point in labelled]
    at = {point: _locate(axes, point.x, point.y) for point in points}
    front = _list_front(points)
    corners = [_locate(axes, *corner) for corner in zip(*_steps(front, lower), strict=True)]
    positions = [at[point] for point in labelled]
    frames = place_labels(
        positions,
        [(width_of(text, _LABEL), _LABEL / 72) for text in texts],
        page=page,
        occupied=list(map(around, at.values())),
        lines=list(pairwise(corners)),
        rings=_RINGS,
    )
    for point, text, position, frame in zip(labelled, texts, positions, frames, strict=True):
        if frame is not None:
            _draw_label(axes, point, text, position, frame)


def _draw_label(axes: Any, point: _Point, text: str, position: tuple[float, float], frame: Frame) -> None:
    """Write a label into its frame, with a line to its point where they are apart."""
    x, y = position
    # The nearest end is exact: a renderer draws text a little wider or narrower than measured.
    side, end = ("left", frame.left) if frame.left > x else ("right", frame.right)
    if frame.left <= x <= frame.right:
        side, end = "center", (frame.left + frame.right) / 2
    offset = (end - x) * 72, (frame.bottom - y) * 72 + 0.8
    colour = colours.colour("ink" if point.on_front else "quiet")
    style: dict[str, Any] = {"annotation_clip": False, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.4}}
    annotate = partial(axes.annotate, xy=(point.x, point.y), textcoords="offset points")
    annotate(escape(text), xytext=offset, ha=side, fontsize=_LABEL, color=colour, zorder=2.8, **style)
    if leader := leader_of(position, frame):
        offset = (leader[1][0] - x) * 72, (leader[1][1] - y) * 72
        arrow = {"arrowstyle": "-", "linewidth": 0.4, "color": colours.colour("quiet"), "shrinkB": 2}
        annotate("", xytext=offset, arrowprops=arrow, zorder=2.5)


def _fit(text: str) -> str:
    """Return a text truncated in the middle, as names of variants differ at their ends."""
    length = len(text)
    while width_of(text, _LABEL) > _LONGEST:
        length -= 1
        text = truncate_middle(text, length)
    return text


def _locate(axes: Any, x: float, y: float) -> tuple[float, float]:
    """Return where a point is on the page, in inches."""
    right, up = axes.transData.transform((x, y)) / axes.figure.dpi
    return float(right), float(up)
