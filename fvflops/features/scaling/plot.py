"""Plot counts and their polynomial over each size, as SVG or PNG."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fvflops.counting.metrics import METRICS
from fvflops.features.scaling.model import Axis, CostExpression, Sizes, format_sizes
from fvflops.reports.pictures import colours
from fvflops.reports.pictures.picture import as_text, encode, escape, make_figure, plain, width_of
from fvflops.units import format_short

_POINTS = 200  # of a curve
_WIDTH, _HEIGHT = 5.2, 4.2  # of a panel, in inches
_MARGIN = 0.1
_TITLE = 9.0
_TICKS = 6  # within a power of ten, at most
_FEW_DECADES = 2  # with as many or fewer, there are ticks between the powers of ten


def draw_scaling(costs: Sequence[CostExpression], *, kind: str, title: str) -> bytes:
    """Return a picture with a panel for each size of each cost, both scales logarithmic.

    Points are counts, with the other sizes fixed, and the line is the polynomial. Without matplotlib (the extra `plot`)
    it raises PlotError.
    """
    panels = [(cost, place) for cost in costs for place in range(len(cost.axes))]
    width = _WIDTH * len(panels)
    figure = make_figure(width, _HEIGHT, layout="constrained")
    lines = _wrap(plain(title), width - 2 * _MARGIN)
    figure.suptitle(
        escape("\n".join(lines)), fontsize=_TITLE, x=_MARGIN / width, ha="left", color=colours.colour("ink")
    )
    for number, (cost, place) in enumerate(panels):
        _draw_panel(figure.add_subplot(1, len(panels), number + 1), cost, place)
    return encode(figure, kind)


def _draw_panel(panel: Any, cost: CostExpression, place: int) -> None:
    others = _choose_others(cost, place)
    points = sorted(
        (sizes[place], count)
        for sizes, count in cost.counted.items()
        if (*sizes[:place], *sizes[place + 1 :]) == others
    )
    axis = cost.axes[place]
    if cost.polynomial is not None:
        steps = _spread(cost.holds_on[place])
        values = [cost.polynomial.at(_insert(others, place, size)) for size in steps]
        panel.plot(steps, [float(value) for value in values], color="#4269d0", label="polynomial")
    panel.plot(*zip(*points, strict=True), "o", markersize=4, color="#ff725c", label="counted")
    panel.set(xscale="log", yscale="log", xlabel=as_text(axis.name), ylabel=METRICS[cost.metric].title)
    for scale in (panel.xaxis, panel.yaxis):
        _write_ticks(scale)
    names = tuple(name for name in cost.names if name != axis.name)
    panel.set_title(as_text(format_sizes(names, others)) if names else "", fontsize=8)
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


def _write_ticks(scale: Any) -> None:
    """Label a logarithmic scale in the number format of the tables, such as `2G`."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    first, last = scale.get_view_interval()
    decades = math.log10(last / first)
    between = (1,) if decades > _FEW_DECADES else (1, 2, 5)
    scale.set_major_locator(LogLocator(subs=between) if decades > 1 else MaxNLocator(_TICKS, integer=True))
    scale.set_major_formatter(FuncFormatter(_write_tick))
    scale.set_minor_formatter(NullFormatter())


def _write_tick(value: float, _: int | None) -> str:
    whole = round(value)
    return format_short(whole) if math.isclose(value, whole) else ""


def _choose_others(cost: CostExpression, place: int) -> Sizes:
    """Return the other sizes with most counts, preferably where the polynomial holds."""
    lines = Counter((*sizes[:place], *sizes[place + 1 :]) for sizes in cost.counted)
    axes = (*cost.holds_on[:place], *cost.holds_on[place + 1 :])
    return max(lines, key=lambda line: (all(map(Axis.__contains__, axes, line)), lines[line]))


def _spread(axis: Axis) -> list[int]:
    """Return sizes of an axis, about evenly spaced on a logarithmic scale."""
    ratio = (axis.last / axis.first) ** (1 / (_POINTS - 1))
    sizes = [axis.first * ratio**place for place in range(_POINTS)]
    return sorted({axis[min(round((size - axis.first) / axis.step), len(axis) - 1)] for size in sizes})


def _insert(others: Sizes, place: int, size: int) -> Sizes:
    return (*others[:place], size, *others[place:])
