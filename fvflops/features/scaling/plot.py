"""Plot counts and their polynomial over each size, as SVG or PNG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fvflops.counting.metrics import METRICS
from fvflops.features.scaling.model import Axis, CostExpression, Sizes, format_sizes
from fvflops.reports.pictures import colours
from fvflops.reports.pictures.picture import as_text, encode, escape, make_figure, plain, width_of
from fvflops.reports.pictures.scales import label_logarithmic
from fvflops.units import format_short

_POINTS = 200  # of a curve
_WIDTH, _HEIGHT = 5.2, 4.2  # of a panel, in inches
_MARGIN = 0.1
_TITLE = 9.0


def draw_scaling(costs: Sequence[CostExpression], *, kind: str, title: str) -> bytes:
    """Return a picture with a panel for each size of each cost, both scales logarithmic.

    Points are counts, with the other sizes fixed, and the line is the polynomial. Without matplotlib (the extra `plot`)
    it raises PlotError.
    """
    panels = [(cost, axis_index) for cost in costs for axis_index in range(len(cost.axes))]
    width = _WIDTH * len(panels)
    figure = make_figure(width, _HEIGHT, layout="constrained")
    lines = _wrap(plain(title), width - 2 * _MARGIN)
    figure.suptitle(
        escape("\n".join(lines)), fontsize=_TITLE, x=_MARGIN / width, ha="left", color=colours.colour("ink")
    )
    for number, (cost, axis_index) in enumerate(panels):
        _draw_panel(figure.add_subplot(1, len(panels), number + 1), cost, axis_index)
    return encode(figure, kind)


def _draw_panel(panel: Any, cost: CostExpression, axis_index: int) -> None:
    fixed = _choose_fixed_sizes(cost, axis_index)
    points = sorted(
        (sizes[axis_index], count) for sizes, count in cost.counted.items() if _without(sizes, axis_index) == fixed
    )
    axis = cost.axes[axis_index]
    if cost.polynomial is not None:
        sizes = _spread(cost.domain[axis_index])
        values = [cost.polynomial.at((*fixed[:axis_index], size, *fixed[axis_index:])) for size in sizes]
        panel.plot(sizes, [float(value) for value in values], color="#4269d0", label="polynomial")
    panel.plot(*zip(*points, strict=True), "o", markersize=4, color="#ff725c", label="counted")
    panel.set(xscale="log", yscale="log", xlabel=as_text(axis.name), ylabel=METRICS[cost.metric].title)
    for scale in (panel.xaxis, panel.yaxis):
        label_logarithmic(scale, format_short, integer=True)
    names = tuple(name for name in cost.names if name != axis.name)
    panel.set_title(as_text(format_sizes(names, fixed)) if names else "", fontsize=8)
    panel.legend(fontsize=8)
    panel.grid(visible=True, alpha=0.3)


def _wrap(text: str, inches: float) -> list[str]:
    """Wrap text at spaces to lines of a width."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}".lstrip()
        if lines[-1] and width_of(longer, _TITLE) > inches:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


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
