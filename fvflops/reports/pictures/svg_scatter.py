"""A scatter plot as SVG for a page, without matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from fvflops.reports.document import Point, Scatter
from fvflops.reports.escaping import printable_short
from fvflops.reports.pictures import colours
from fvflops.reports.pictures.svg_chart import WIDTH

_HEIGHT = 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 16, 14, 66
_TICKS = 5
_MARGIN = 0.06  # of the span, on each side


def svg_scatter(plot: Scatter, *, width: int = WIDTH) -> str:
    """Return a plot as an SVG element, whose colours follow the page's theme; each point's label is its tooltip.

    >>> picture = svg_scatter(Scatter("layouts", [Point(2, 8, "tp=2", True), Point(3, 9)], "time", "memory"))
    >>> picture.count("<circle"), "<title>tp=2: 2 time, 8 memory</title>" in picture, picture.count("<path")
    (3, True, 1)
    """
    ink, quiet, line = (colours.adaptive(name) for name in ("ink", "quiet", "line"))
    axes = _Axes(plot, width)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_HEIGHT}" role="img" '
        f'aria-label="{_escape(plot.title)}" style="max-width:{width}px;fill:{ink};'
        'font:11px system-ui,sans-serif;font-variant-numeric:tabular-nums">'
    ]
    parts += [*axes.draw(line, quiet), *_draw_limit(plot, axes, quiet), *_draw_front(plot, axes, ink)]
    for point in sorted(plot.points, key=lambda point: point.marked):
        fill, size, opacity = (ink, 5, 1) if point.marked else (quiet, 3.5, 0.5)
        what = f"{point.label}: " if point.label else ""
        text = f"{what}{plot.x_form(point.x)} {plot.x}, {plot.y_form(point.y)} {plot.y}"
        parts.append(
            f'<circle cx="{axes.x(point.x)}" cy="{axes.y(point.y)}" r="{size}" style="fill:{fill}" '
            f'fill-opacity="{opacity}"><title>{_escape(text)}</title></circle>'
        )
    if any(point.marked for point in plot.points):
        parts.append(f'<circle cx="{_LEFT + 5}" cy="{_HEIGHT - 12}" r="5"/>')
        parts.append(f'<text x="{_LEFT + 15}" y="{_HEIGHT - 8}">{_escape(plot.marks)}</text>')
    return "\n".join([*parts, "</svg>"])


class _Axes:
    def __init__(self, plot: Scatter, width: int) -> None:
        self._plot = plot
        self.width = width
        self._x, self._y = (_widen(*span) for span in plot.spans())

    def x(self, value: float) -> float:
        low, high = self._x
        return round(_LEFT + (self.width - _LEFT - _RIGHT) * (value - low) / (high - low), 1)

    def y(self, value: float) -> float:
        low, high = self._y
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (value - low) / (high - low), 1)

    def draw(self, line: str, quiet: str) -> Iterator[str]:
        plot, bottom = self._plot, _HEIGHT - _BOTTOM
        for value in choose_ticks(*self._y):
            y = self.y(value)
            yield f'<line x1="{_LEFT}" x2="{self.width - _RIGHT}" y1="{y}" y2="{y}" style="stroke:{line}"/>'
            position = f'x="{_LEFT - 6}" y="{round(y + 3.5, 1)}" text-anchor="end"'
            yield f'<text {position} style="fill:{quiet}">{_escape(plot.y_form(value))}</text>'
        for value in choose_ticks(*self._x):
            position = f'x="{self.x(value)}" y="{bottom + 16}" text-anchor="middle"'
            yield f'<text {position} style="fill:{quiet}">{_escape(plot.x_form(value))}</text>'
        yield f'<text x="{(_LEFT + self.width) // 2}" y="{bottom + 34}" text-anchor="middle">{_escape(plot.x)}</text>'
        middle = (_TOP + bottom) // 2
        yield f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{_escape(plot.y)}</text>'


def _widen(low: float, high: float) -> tuple[float, float]:
    margin = _MARGIN * ((high - low) or abs(high) or 1.0)
    return low - margin, high + margin


def choose_ticks(low: float, high: float) -> list[float]:
    """Return a few round values from `low` to `high`.

    >>> choose_ticks(9.4, 16.2), choose_ticks(0.11, 0.18)
    ([10.0, 12.0, 14.0, 16.0], [0.12, 0.14, 0.16, 0.18])
    """
    least = (high - low) / _TICKS
    power = 10 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{number * step:.10g}") for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _draw_limit(plot: Scatter, axes: _Axes, colour: str) -> Iterator[str]:
    if plot.limit is not None:
        y = axes.y(plot.limit[0])
        style = f'style="stroke:{colour}" stroke-dasharray="5 4"'
        yield f'<line x1="{_LEFT}" x2="{axes.width - _RIGHT}" y1="{y}" y2="{y}" {style}/>'
        yield f'<text x="{axes.width - _RIGHT}" y="{y - 5}" text-anchor="end">{_escape(plot.limit[1])}</text>'


def _draw_front(plot: Scatter, axes: _Axes, colour: str) -> Iterator[str]:
    """Yield the line that no point of the front is beyond, with a step at each of its points."""
    marked: list[Point] = sorted(point for point in plot.points if point.marked)
    if marked:
        corners = f"M{axes.x(marked[0].x)} {axes.y(marked[0].y)}"
        corners += "".join(f"H{axes.x(point.x)}V{axes.y(point.y)}" for point in marked[1:])
        yield f'<path d="{corners}" style="fill:none;stroke:{colour}" stroke-opacity="0.6"/>'


def _escape(text: str) -> str:
    return escape(printable_short(text))
