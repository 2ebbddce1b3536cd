"""Label the scales of plots in the number formats of the tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fvflops.reports.pictures import colours
from fvflops.units import digits_apart, digits_shown

_TICKS = 6  # within a power of ten, at most
_FEW_DECADES = 2  # with as many or fewer, there are ticks between the powers of ten


def label_logarithmic(
    scale: Any, form: Callable[[float], str], *, integer: bool = False, ticks: int | None = None
) -> None:
    """Label a logarithmic scale, such as `axes.xaxis`, with `form` of each value; with `integer`, of integers alone.

    `ticks` is the largest number of powers of ten that are labelled.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    first, last = scale.get_view_interval()
    decades = math.log10(last / first)
    between = (1,) if decades > _FEW_DECADES else (1, 2, 5)
    powers = LogLocator(subs=between, numticks=ticks if len(between) == 1 else None)
    scale.set_major_locator(powers if decades > 1 else MaxNLocator(_TICKS, integer=integer))
    scale.set_major_formatter(FuncFormatter(lambda value, _: _write(value, form, integer)))
    scale.set_minor_formatter(NullFormatter())


def label_linear(scale: Any, form: Callable[[float], str]) -> None:
    """Label a linear scale with `form` of each value."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    class Distinct(FuncFormatter):
        """Writes ticks with as many digits as tell them apart."""

        def format_ticks(self, values: Sequence[float]) -> list[str]:
            with digits_shown(digits_apart(form, map(_clean, values))):
                return [form(_clean(value)) for value in values]

    scale.set_major_locator(MaxNLocator(_TICKS + 1, steps=[1, 2, 5, 10]))
    scale.set_major_formatter(Distinct(lambda value, _: form(_clean(value))))


def _write(value: float, form: Callable[[float], str], integer: bool) -> str:
    rounded = round(value)
    if math.isclose(value, rounded):
        return form(rounded)
    return "" if integer else form(_clean(value))


def _clean(value: float) -> float:
    """Return a tick without the rounding error of its locator."""
    return float(f"{value:.10g}")


def style_axes(axes: Any, size: float) -> None:
    """Draw thin grey axes on the left and below, with labels of a size in points, and a grid."""
    axes.tick_params(labelsize=size, colors=colours.colour("quiet"), which="both", width=0.6, length=2.5)
    axes.tick_params(which="minor", length=1.5)
    axes.grid(visible=True, which="major", color=colours.colour("line"), linewidth=0.4)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_linewidth(0.6)
        spine.set_color(colours.colour("quiet"))
