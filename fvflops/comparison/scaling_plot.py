"""Plot counts and their polynomial over each size, as SVG or PNG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fvflops.comparison.cost_functions import Axis, CostExpression, Sizes, format_sizes
from fvflops.counting.metrics import METRICS
from fvflops.reports.pictures import colours
from fvflops.reports.pictures.picture import (
    as_text,
    encode,
    escape,
    fit,
    label_logarithmic,
    make_figure,
    plain,
    style_axes,
    width_of,
)
from fvflops.units import format_short

_POINTS = 200  # of a curve
_WIDTH, _HEIGHT = 3.4, 2.6  # of a panel, a column of a paper, in inches
_MARGIN = 0.06
_TEXT, _TITLE = 7.0, 8.5
# Blue of Okabe and Ito's palette, which is dark in grey.
_LINE = "#0072b2"
_TICKS = 5
_LONGEST = 2.2  # inches of a label
_FITTED, _HELD_OUT = "counted, fitted", "counted, held out"


def draw_scaling(costs: Sequence[CostExpression], *, kind: str, title: str) -> bytes:
    """Return a picture with a panel of 3.4 inches for each size of each cost, both scales logarithmic.

    Points are counts, with the other sizes fixed: full ones were fitted, hollow ones verify the polynomial, which is
    the line. `title` is the name of the model. Without matplotlib (the extra `plot`) it raises PlotError.
    """
    panels = [(cost, axis_index) for cost in costs for axis_index in range(len(cost.axes))]
    width = _WIDTH * len(panels)
    figure = make_figure(width, _HEIGHT, layout="constrained")
    figure.patch.set_facecolor("white")
    heading = escape(fit(plain(title), width - 2 * _MARGIN, _TITLE))
    style = {"fontsize": _TITLE, "weight": "bold", "color": colours.colour("ink")}
    figure.suptitle(heading, x=_MARGIN / width, ha="left", **style)
    for number, (cost, axis_index) in enumerate(panels):
        _draw_panel(figure.add_subplot(1, len(panels), number + 1), cost, axis_index)
    return encode(figure, kind)


def _draw_panel(panel: Any, cost: CostExpression, axis_index: int) -> None:
    fixed = _choose_fixed_sizes(cost, axis_index)
    axis = cost.axes[axis_index]
    if cost.polynomial is not None:
        sizes = _spread(cost.domain[axis_index])
        values = [cost.polynomial.at((*fixed[:axis_index], size, *fixed[axis_index:])) for size in sizes]
        panel.plot(sizes, [float(value) for value in values], color=_LINE, linewidth=1, label=_write_label(cost))
    marker = {"marker": "o", "linestyle": "", "markersize": 4, "color": _LINE, "mew": 0.9}
    for name, points in _list_points(cost, axis_index, fixed).items():
        face = "white" if name == _HELD_OUT else _LINE
        panel.plot(*zip(*points, strict=True), **marker, markerfacecolor=face, label=name)
    symbol = cost.symbols[axis.name]
    panel.set(xscale="log", yscale="log")
    panel.set_xlabel(as_text(axis.name if symbol == axis.name else f"{axis.name} ({symbol})"), fontsize=_TEXT)
    panel.set_ylabel(METRICS[cost.metric].title, fontsize=_TEXT)
    for scale in (panel.xaxis, panel.yaxis):
        label_logarithmic(scale, format_short, integer=True, ticks=_TICKS)
    names = tuple(name for name in cost.names if name != axis.name)
    panel.legend(
        title=as_text(format_sizes(names, fixed)) if names else None,
        title_fontsize=_TEXT - 0.5,
        fontsize=_TEXT - 0.5,
        frameon=False,
        alignment="left",
        loc="upper left",
        handlelength=1.2,
        borderpad=0.1,
        labelcolor=colours.colour("ink"),
    )
    panel.margins(y=0.12)
    style_axes(panel, _TEXT - 0.5)


def _list_points(cost: CostExpression, axis_index: int, fixed: Sizes) -> dict[str, list[tuple[int, int]]]:
    """Return the counts on an axis by their role, without roles where there is no polynomial."""
    points: dict[str, list[tuple[int, int]]] = {}
    for sizes, count in sorted(cost.counted.items()):
        if _without(sizes, axis_index) == fixed:
            role = "counted" if cost.polynomial is None else _FITTED if sizes in cost.fitted else _HELD_OUT
            points.setdefault(role, []).append((sizes[axis_index], count))
    return points


def _write_label(cost: CostExpression) -> str:
    """Return the polynomial, or only the word where it is too long for a panel."""
    text = plain("" if cost.polynomial is None else cost.polynomial.write(cost.symbols))
    return escape(text) if width_of(text, _TEXT) < _LONGEST else "polynomial"


def _choose_fixed_sizes(cost: CostExpression, axis_index: int) -> Sizes:
    """Return the sizes of the other axes with most counts, preferably in the polynomial's domain."""
    counts = Counter(_without(sizes, axis_index) for sizes in cost.counted)
    axes = (*cost.domain[:axis_index], *cost.domain[axis_index + 1 :])
    return max(counts, key=lambda sizes: (all(map(Axis.__contains__, axes, sizes)), counts[sizes]))


def _without(sizes: Sizes, axis_index: int) -> Sizes:
    return (*sizes[:axis_index], *sizes[axis_index + 1 :])


def _spread(axis: Axis) -> list[int]:
    """Return sizes of an axis, about evenly spaced on a logarithmic scale."""
    ratio = (axis.last / axis.first) ** (1 / (_POINTS - 1))
    sizes = [axis.first * ratio**index for index in range(_POINTS)]
    return sorted({axis[min(round((size - axis.first) / axis.step), len(axis) - 1)] for size in sizes})
