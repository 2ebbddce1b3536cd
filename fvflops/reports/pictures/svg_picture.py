"""Charts, Gantt charts and scatter plots as SVG, without matplotlib, so that HTML pages have them too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate

from fvflops.reports.document import Chart, Gantt, Point, Scatter, Slice
from fvflops.reports.escaping import printable_short
from fvflops.reports.pictures import colours

WIDTH, NARROW = 900, 420  # of a picture, and of one on a phone
_HEIGHT = 330
_MARGINS = _LEFT, _, _, _BOTTOM = 58, 12, 40, 66  # left, right, top, bottom
_POINTS = 420  # along the run, each with the largest total of its part
_TICKS = 5  # at most
_LETTER = 6.3  # width of a letter of the legend


class _Plane:
    """Where values are in a picture of a width, with margins in pixels: left, right, top and bottom."""

    def __init__(
        self, width: int, margins: tuple[int, int, int, int], xs: tuple[float, float], ys: tuple[float, float]
    ) -> None:
        self.width, self.xs, self.ys = width, xs, ys
        left, right, self.top, bottom = margins
        self.left, self.right, self.bottom = left, width - right, _HEIGHT - bottom

    def x(self, value: float) -> float:
        low, high = self.xs
        return round(self.left + (self.right - self.left) * (value - low) / (high - low), 1)

    def y(self, value: float) -> float:
        low, high = self.ys
        if high == low:
            return self.bottom
        return round(self.bottom - (self.bottom - self.top) * (value - low) / (high - low), 1)

    def draw_line(self, y: float, text: str, line: str, quiet: str) -> Iterator[str]:
        """Yield a horizontal line of the grid, with a text on the left."""
        yield f'<line x1="{self.left}" x2="{self.right}" y1="{y}" y2="{y}" style="stroke:{line}"/>'
        position = f'x="{self.left - 6}" y="{round(y + 3.5, 1)}" text-anchor="end"'
        yield f'<text {position} style="fill:{quiet}">{_escape(text)}</text>'


def svg_chart(chart: Chart, *, standalone: bool = True, width: int = WIDTH) -> str:
    """Return a chart as an SVG element of stacked areas, with the largest total marked; layers of zeros are omitted.

    A `standalone` picture has a white background; one in a page has the page's colours, light or dark. `width` is in
    pixels.
    """
    sampled = chart.sample(min(_POINTS, len(chart.totals())))
    ink, quiet, line = map(colours.colour if standalone else colours.adaptive, ("ink", "quiet", "line"))
    legend, height = _draw_legend(sampled, standalone, width)
    # In a page the title is a heading.
    size = f'width="{width}" height="{height}"' if standalone else f'viewBox="0 20 {width} {height - 20}"'
    parts = [f'<rect width="{width}" height="{height}" style="fill:#fff"/>'] if standalone else []
    if standalone and chart.title:
        parts.append(f'<text x="{_LEFT}" y="18" style="font-size:13px;font-weight:600">{_escape(chart.title)}</text>')
    peak = max(sampled.totals())
    plane = _Plane(width, _MARGINS, (0, len(sampled.totals())), (0, peak))
    for value in map(int, choose_ticks(0, peak, least=1)):
        parts += plane.draw_line(plane.y(value), chart.form(value), line, quiet)
    parts += _draw_layers(sampled, standalone, plane)
    parts += [*_mark_peak(chart, sampled, plane), *_draw_sections(sampled, line, quiet, plane), *legend]
    return _wrap(parts, size, chart.title, width, ink)


def _wrap(parts: Sequence[str], size: str, title: str, width: int, ink: str) -> str:
    header = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
        f'aria-label="{_escape(title)}" style="max-width:{width}px;fill:{ink};'
        'font:11px system-ui,sans-serif;font-variant-numeric:tabular-nums">'
    )
    return "\n".join([header, *parts, "</svg>"])


def _choose_colours(chart: Chart, standalone: bool) -> dict[str, str]:
    palette = colours.group(chart.layers)
    return {name: palette.of(name) if standalone else colours.adaptive(palette.of(name)) for name in chart.layers}


def _escape(text: str) -> str:
    return escape(printable_short(text))


def _draw_layers(chart: Chart, standalone: bool, plane: _Plane) -> Iterator[str]:
    palette = _choose_colours(chart, standalone)
    lower = [0] * len(chart.totals())
    for name, values in chart.layers.items():
        if not any(values):
            continue
        upper = [bottom + value for bottom, value in zip(lower, values, strict=True)]
        outline = " ".join([*_draw_steps(upper, plane), *_draw_steps(lower, plane, back=True)])
        largest = _escape(f"{name}: at most {chart.form(max(values))}")
        yield f'<path d="M{outline}Z" style="fill:{palette[name]}"><title>{largest}</title></path>'
        lower = upper


def _draw_steps(values: Sequence[int], plane: _Plane, *, back: bool = False) -> list[str]:
    """Return the corners of a line with a step for each change of value, from right to left if `back`."""
    changes = [index for index in range(len(values)) if index == 0 or values[index] != values[index - 1]]
    corners = []
    for start, end in zip(changes, [*changes[1:], len(values)], strict=True):
        y = plane.y(values[start])
        corners += [f"{plane.x(start)},{y}", f"{plane.x(end)},{y}"]
    return corners[::-1] if back else corners


def _mark_peak(chart: Chart, sampled: Chart, plane: _Plane) -> Iterator[str]:
    totals = sampled.totals()
    peak = max(totals)
    x, y = plane.x(totals.index(peak) + 0.5), plane.y(peak)
    anchor = "start" if x < plane.width / 3 else "end" if x > plane.width * 2 / 3 else "middle"
    yield f'<circle cx="{x}" cy="{y}" r="3"/>'
    yield f'<text x="{x}" y="{y - 7}" text-anchor="{anchor}">{_escape(f"peak {chart.form(peak)}")}</text>'


def _draw_sections(chart: Chart, line: str, quiet: str, plane: _Plane) -> Iterator[str]:
    ends = list(accumulate(length for _, length in chart.sections))
    for (name, length), end in zip(chart.sections, ends, strict=True):
        left, right = plane.x(end - length), plane.x(end)
        if end < plane.xs[1]:
            yield f'<line x1="{right}" x2="{right}" y1="{plane.top}" y2="{plane.bottom + 18}" style="stroke:{line}"/>'
        if right - left > len(name) * _LETTER:
            position = f'x="{(left + right) / 2:.1f}" y="{plane.bottom + 15}" text-anchor="middle"'
            yield f'<text {position} style="fill:{quiet}">{_escape(name)}</text>'


def _draw_legend(chart: Chart, standalone: bool, width: int) -> tuple[list[str], int]:
    """Return the names of the layers with their colours, in rows, and the height of the picture above and with them."""
    palette = _choose_colours(chart, standalone)
    parts: list[str] = []
    x, y = float(_LEFT), _HEIGHT - _BOTTOM + 38
    for name, values in chart.layers.items():
        if not any(values):
            continue
        length = 26 + len(printable_short(name)) * _LETTER
        if x + length > width:
            x, y = float(_LEFT), y + 17
        parts.append(f'<rect x="{x:.0f}" y="{y - 9}" width="10" height="10" style="fill:{palette[name]}"/>')
        parts.append(f'<text x="{x + 14:.0f}" y="{y}">{_escape(name)}</text>')
        x += length
    return parts, max(_HEIGHT, y + 11)


_PLOT_MARGINS = 70, 16, 14, 66
_MARGIN = 0.06  # of the span, on each side


def svg_scatter(plot: Scatter, *, width: int = WIDTH) -> str:
    """Return a plot as an SVG element, whose colours follow the page's theme; each point's label is its tooltip."""
    ink, quiet, line = (colours.adaptive(name) for name in ("ink", "quiet", "line"))
    xs, ys = (_widen(*span) for span in plot.spans())
    plane = _Plane(width, _PLOT_MARGINS, xs, ys)
    parts = [*_draw_axes(plot, plane, line, quiet), *_draw_limit(plot, plane, quiet), *_draw_front(plot, plane, ink)]
    for point in sorted(plot.points, key=lambda point: point.marked):
        fill, size, opacity = (ink, 5, 1) if point.marked else (quiet, 3.5, 0.5)
        what = f"{point.label}: " if point.label else ""
        text = f"{what}{plot.x_form(point.x)} {plot.x}, {plot.y_form(point.y)} {plot.y}"
        parts.append(
            f'<circle cx="{plane.x(point.x)}" cy="{plane.y(point.y)}" r="{size}" style="fill:{fill}" '
            f'fill-opacity="{opacity}"><title>{_escape(text)}</title></circle>'
        )
    if any(point.marked for point in plot.points):
        parts.append(f'<circle cx="{plane.left + 5}" cy="{_HEIGHT - 12}" r="5"/>')
        parts.append(f'<text x="{plane.left + 15}" y="{_HEIGHT - 8}">{_escape(plot.marks)}</text>')
    return _wrap(parts, f'viewBox="0 0 {width} {_HEIGHT}"', plot.title, width, ink)


def _draw_axes(plot: Scatter, plane: _Plane, line: str, quiet: str) -> Iterator[str]:
    for value in choose_ticks(*plane.ys):
        yield from plane.draw_line(plane.y(value), plot.y_form(value), line, quiet)
    for value in choose_ticks(*plane.xs):
        position = f'x="{plane.x(value)}" y="{plane.bottom + 16}" text-anchor="middle"'
        yield f'<text {position} style="fill:{quiet}">{_escape(plot.x_form(value))}</text>'
    middle = (plane.top + plane.bottom) // 2
    below = f'x="{(plane.left + plane.width) // 2}" y="{plane.bottom + 34}"'
    yield f'<text {below} text-anchor="middle">{_escape(plot.x)}</text>'
    yield f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{_escape(plot.y)}</text>'


def _widen(low: float, high: float) -> tuple[float, float]:
    margin = _MARGIN * ((high - low) or abs(high) or 1.0)
    return low - margin, high + margin


def choose_ticks(low: float, high: float, least: float = 0.0) -> list[float]:
    """Return a few round values from `low` to `high`, `least` apart or more.

    >>> choose_ticks(9.4, 16.2), choose_ticks(0.11, 0.18)
    ([10.0, 12.0, 14.0, 16.0], [0.12, 0.14, 0.16, 0.18])
    >>> choose_ticks(0, 4481556052)[:3], choose_ticks(0, 3, least=1), choose_ticks(0, 0, least=1)
    ([0.0, 1000000000.0, 2000000000.0], [0.0, 1.0, 2.0, 3.0], [0.0])
    """
    least = max((high - low) / _TICKS, least)
    power = 10 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{number * step:.10g}") for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _draw_limit(plot: Scatter, plane: _Plane, colour: str) -> Iterator[str]:
    if plot.limit is not None:
        y = plane.y(plot.limit[0])
        style = f'style="stroke:{colour}" stroke-dasharray="5 4"'
        yield f'<line x1="{plane.left}" x2="{plane.right}" y1="{y}" y2="{y}" {style}/>'
        yield f'<text x="{plane.right}" y="{y - 5}" text-anchor="end">{_escape(plot.limit[1])}</text>'


def _draw_front(plot: Scatter, plane: _Plane, colour: str) -> Iterator[str]:
    """Yield the line that no point of the front is beyond, with a step at each of its points."""
    marked: list[Point] = sorted(point for point in plot.points if point.marked)
    if marked:
        corners = f"M{plane.x(marked[0].x)} {plane.y(marked[0].y)}"
        corners += "".join(f"H{plane.x(point.x)}V{plane.y(point.y)}" for point in marked[1:])
        yield f'<path d="{corners}" style="fill:none;stroke:{colour}" stroke-opacity="0.6"/>'


_LANE = 22  # height in pixels
_LABELLED = (0.018, 0.04)  # least share of the width for a label on a wide and on a narrow page
_TOOLTIPS = 4000  # slices, above which they have no tooltips and labels: the page stays small
_SHADES = (1, 0.62, 0.4, 0.28)
_GANTT_TICKS = 4

_STYLE = """<style>
.gantt { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 3px 10px; align-items: center;
  margin: 10px 0; font: 11px system-ui, sans-serif; font-variant-numeric: tabular-nums; }
.gantt svg { display: block; max-width: none; width: 100%; border-radius: 3px; background: var(--line); }
.gantt .axis { background: none; }
.gantt text { fill: var(--ink); pointer-events: none; }
.gantt .axis text { fill: var(--quiet); }
.gantt .keys { grid-column: 1 / -1; display: flex; flex-wrap: wrap; gap: 4px 14px; margin-top: 4px; }
.gantt .keys i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
.gantt { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
@media (max-width: 760px) { .gantt .wide-only { display: none; } .gantt { gap: 3px 6px; } }
</style>"""


def svg_gantt(gantt: Gantt) -> str:
    """Return a chart as HTML with an SVG element for each lane; its colours follow the page's theme."""
    end = gantt.end()
    palette = colours.group(gantt.kinds)
    fills = {kind: colours.adaptive(palette.of(kind)) for kind in gantt.kinds}
    detailed = sum(map(len, gantt.lanes.values())) <= _TOOLTIPS
    parts = [_STYLE, f'<div class="gantt" role="img" aria-label="{_escape(gantt.title)}">']
    for lane, slices in gantt.lanes.items():
        drawn = "".join(_draw_slices(gantt, slices, end, fills) if detailed else _draw_paths(slices, end, fills))
        parts.append(f'<span>{_escape(lane)}</span><svg height="{_LANE}">{drawn}</svg>')
    parts.append(f'<span></span><svg class="axis" height="16">{"".join(_draw_axis(gantt, end))}</svg>')
    parts.append(f'<div class="keys">{"".join(_list_keys(gantt, fills))}</div></div>')
    return "\n".join(parts)


def _draw_slices(gantt: Gantt, slices: Sequence[Slice], end: float, fills: dict[str, str]) -> Iterator[str]:
    for piece in slices:
        if piece.end <= piece.start:
            continue
        x, width = piece.start / end, (piece.end - piece.start) / end
        name = gantt.kinds.get(piece.kind, piece.kind)
        times = f"{gantt.form(piece.end - piece.start)}, from {gantt.form(piece.start)}"
        yield (
            f'<rect x="{_percent(x)}" width="{_percent(width)}" height="{_LANE}" style="fill:{fills[piece.kind]}" '
            f'opacity="{_opacity(piece)}"><title>{_escape(piece.note or name)}: {_escape(times)}</title></rect>'
        )
        wide, narrow = _LABELLED
        if piece.label and width >= wide:
            hidden = ' class="wide-only"' if width < narrow else ""
            position = f'x="{_percent(x + width / 2)}" y="{_LANE - 7}" text-anchor="middle"'
            yield f"<text {position}{hidden}>{_escape(piece.label)}</text>"


def _draw_paths(slices: Sequence[Slice], end: float, fills: dict[str, str]) -> Iterator[str]:
    """Yield one path for all slices of a kind and shade, in a coordinate system that is as wide as the page."""
    paths: dict[tuple[str, float], list[str]] = {}
    for piece in slices:
        x, right = round(1e5 * piece.start / end), round(1e5 * piece.end / end)
        paths.setdefault((piece.kind, _opacity(piece)), []).append(f"M{x} 0H{right}V1H{x}Z")
    yield '<svg viewBox="0 0 100000 1" preserveAspectRatio="none" width="100%" height="100%">'
    for (kind, opacity), corners in paths.items():
        yield f'<path d="{"".join(corners)}" style="fill:{fills[kind]}" opacity="{opacity}"/>'
    yield "</svg>"


def _draw_axis(gantt: Gantt, end: float) -> Iterator[str]:
    for tick in range(_GANTT_TICKS + 1):
        anchor = "start" if tick == 0 else "end" if tick == _GANTT_TICKS else "middle"
        hidden = ' class="wide-only"' if tick % 2 else ""
        text = "0" if tick == 0 else gantt.form(end * tick / _GANTT_TICKS)
        yield f'<text x="{_percent(tick / _GANTT_TICKS)}" y="12" text-anchor="{anchor}"{hidden}>{_escape(text)}</text>'


def _list_keys(gantt: Gantt, fills: dict[str, str]) -> Iterator[str]:
    used = {piece.kind for slices in gantt.lanes.values() for piece in slices}
    for kind, name in gantt.kinds.items():
        if kind in used:
            yield f'<span><i style="background:{fills[kind]}"></i>{_escape(name)}</span>'
    yield f'<span><i style="background:var(--line)"></i>{_escape(gantt.idle)}</span>'


def _opacity(piece: Slice) -> float:
    return _SHADES[min(piece.shade, len(_SHADES) - 1)]


def _percent(share: float) -> str:
    return f"{100 * share:.6g}%"
