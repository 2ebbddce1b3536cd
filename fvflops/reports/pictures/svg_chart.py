"""A chart as SVG, without matplotlib, so that an HTML page has it too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate

from fvflops.reports.document import Chart
from fvflops.reports.escaping import printable_short
from fvflops.reports.pictures import colours

WIDTH, NARROW = 900, 420  # of a picture, and of one on a phone
_HEIGHT = 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 40, 66
_POINTS = 420  # along the run, each with the largest total of its part
_TICKS = 5  # at most
_LETTER = 6.3  # width of a letter of the legend


def svg_chart(chart: Chart, *, standalone: bool = True, width: int = WIDTH) -> str:
    """Return a chart as an SVG element of stacked areas, with the largest total marked; layers of zeros are omitted.

    A `standalone` picture has a white background; one in a page has the page's colours, light or dark. `width` is in
    pixels.

    >>> picture = svg_chart(Chart("memory", {"parameter": [6, 6], "activation": [0, 3]}, [("forward", 2)], "Memory"))
    >>> picture.startswith("<svg "), picture.count("<path ")
    (True, 2)
    """
    sampled = chart.sample(min(_POINTS, len(chart.totals())))
    ink, quiet, line = (_colour(name, standalone) for name in ("ink", "quiet", "line"))
    legend, height = _draw_legend(sampled, standalone, width)
    # In a page the title is a heading.
    size = f'width="{width}" height="{height}"' if standalone else f'viewBox="0 20 {width} {height - 20}"'
    header = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
        f'aria-label="{_escape(chart.title)}" style="max-width:{width}px;fill:{ink};'
        'font:11px system-ui,sans-serif;font-variant-numeric:tabular-nums">'
    )
    parts = [f'<rect width="{width}" height="{height}" style="fill:#fff"/>'] if standalone else []
    if standalone and chart.title:
        parts.append(f'<text x="{_LEFT}" y="18" style="font-size:13px;font-weight:600">{_escape(chart.title)}</text>')
    parts += [*_draw_scale(chart, sampled, line, quiet, width), *_draw_layers(sampled, standalone, width)]
    parts += [*_mark_peak(chart, sampled, width), *_draw_sections(sampled, line, quiet, width), *legend]
    return "\n".join([header, *parts, "</svg>"])


def _colour(name: str, standalone: bool) -> str:
    return colours.colour(name) if standalone else colours.adaptive(name)


def _choose_colours(chart: Chart, standalone: bool) -> dict[str, str]:
    paints = colours.group(chart.layers)
    return {name: paints.of(name) if standalone else colours.adaptive(paints.of(name)) for name in chart.layers}


def _escape(text: str) -> str:
    return escape(printable_short(text))


def _x(position: float, count: int, width: int) -> float:
    return round(_LEFT + (width - _LEFT - _RIGHT) * position / count, 1)


def _y(value: float, peak: int) -> float:
    return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / peak, 1) if peak else _HEIGHT - _BOTTOM


def _draw_scale(chart: Chart, sampled: Chart, line: str, quiet: str, width: int) -> Iterator[str]:
    peak = max(sampled.totals())
    for value in _choose_ticks(peak):
        y = _y(value, peak)
        yield f'<line x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y}" y2="{y}" style="stroke:{line}"/>'
        yield (
            f'<text x="{_LEFT - 6}" y="{round(y + 3.5, 1)}" text-anchor="end" style="fill:{quiet}">'
            f"{_escape(chart.form(value))}</text>"
        )


def _choose_ticks(peak: int) -> list[int]:
    """Return round values from 0 up to the peak.

    >>> _choose_ticks(4481556052)[:3], _choose_ticks(3), _choose_ticks(0)
    ([0, 1000000000, 2000000000], [0, 1, 2, 3], [0])
    """
    least = max(peak / _TICKS, 1)
    power = 10 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    return list(range(0, peak + 1, step))


def _draw_layers(chart: Chart, standalone: bool, width: int) -> Iterator[str]:
    peak = max(chart.totals())
    paints = _choose_colours(chart, standalone)
    lower = [0] * len(chart.totals())
    for name, values in chart.layers.items():
        if not any(values):
            continue
        upper = [bottom + value for bottom, value in zip(lower, values, strict=True)]
        outline = " ".join([*_draw_steps(upper, peak, width), *_draw_steps(lower, peak, width, back=True)])
        largest = _escape(f"{name}: at most {chart.form(max(values))}")
        yield f'<path d="M{outline}Z" style="fill:{paints[name]}"><title>{largest}</title></path>'
        lower = upper


def _draw_steps(values: Sequence[int], peak: int, width: int, *, back: bool = False) -> list[str]:
    """Return the corners of a line with a step for each change of value, from right to left if `back`."""
    changes = [index for index in range(len(values)) if index == 0 or values[index] != values[index - 1]]
    corners = []
    for start, end in zip(changes, [*changes[1:], len(values)], strict=True):
        y = _y(values[start], peak)
        corners += [f"{_x(start, len(values), width)},{y}", f"{_x(end, len(values), width)},{y}"]
    return corners[::-1] if back else corners


def _mark_peak(chart: Chart, sampled: Chart, width: int) -> Iterator[str]:
    totals = sampled.totals()
    peak = max(totals)
    x = _x(totals.index(peak) + 0.5, len(totals), width)
    anchor = "start" if x < width / 3 else "end" if x > width * 2 / 3 else "middle"
    yield f'<circle cx="{x}" cy="{_y(peak, peak)}" r="3"/>'
    yield f'<text x="{x}" y="{_y(peak, peak) - 7}" text-anchor="{anchor}">{_escape(f"peak {chart.form(peak)}")}</text>'


def _draw_sections(chart: Chart, line: str, quiet: str, width: int) -> Iterator[str]:
    bottom, count = _HEIGHT - _BOTTOM, len(chart.totals())
    ends = list(accumulate(length for _, length in chart.sections))
    for (name, length), end in zip(chart.sections, ends, strict=True):
        left, right = _x(end - length, count, width), _x(end, count, width)
        if end < count:
            yield f'<line x1="{right}" x2="{right}" y1="{_TOP}" y2="{bottom + 18}" style="stroke:{line}"/>'
        if right - left > len(name) * _LETTER:
            position = f'x="{(left + right) / 2:.1f}" y="{bottom + 15}" text-anchor="middle"'
            yield f'<text {position} style="fill:{quiet}">{_escape(name)}</text>'


def _draw_legend(chart: Chart, standalone: bool, width: int) -> tuple[list[str], int]:
    """Return the names of the layers with their colours, in rows, and the height of the picture above and with them."""
    paints = _choose_colours(chart, standalone)
    parts: list[str] = []
    x, y = float(_LEFT), _HEIGHT - _BOTTOM + 38
    for name, values in chart.layers.items():
        if not any(values):
            continue
        length = 26 + len(printable_short(name)) * _LETTER
        if x + length > width:
            x, y = float(_LEFT), y + 17
        parts.append(f'<rect x="{x:.0f}" y="{y - 9}" width="10" height="10" style="fill:{paints[name]}"/>')
        parts.append(f'<text x="{x + 14:.0f}" y="{y}">{_escape(name)}</text>')
        x += length
    return parts, max(_HEIGHT, y + 11)
