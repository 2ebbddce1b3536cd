"""A Gantt chart for a page: an SVG element for each lane, as wide as the page, so that its text keeps its size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from fvflops.reports.document import Gantt, Slice
from fvflops.reports.escaping import printable_short
from fvflops.reports.pictures import colours

_LANE = 22  # height in pixels
_LABELLED = (0.018, 0.04)  # least share of the width for a label on a wide and on a narrow page
_NARROW = 760  # pixels
_TOOLTIPS = 4000  # slices, above which they have no tooltips and labels: the page stays small
_SHADES = (1, 0.62, 0.4, 0.28)
_TICKS = 4

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
@media (max-width: NARROWpx) { .gantt .wide-only { display: none; } .gantt { gap: 3px 6px; } }
</style>""".replace("NARROW", str(_NARROW))


def svg_gantt(gantt: Gantt) -> str:
    """Return a chart as HTML with an SVG element for each lane; its colours follow the page's theme.

    >>> lanes = {"pp 0": [Slice("forward", 0, 1, "1")], "pp 1": [Slice("forward", 1, 4)]}
    >>> page = svg_gantt(Gantt("pipeline", lanes, {"forward": "forward"}))
    >>> page.count("<svg"), 'x="25%" width="75%"' in page, page.count("<title>")
    (3, True, 2)
    """
    end = gantt.end()
    paints = colours.group(gantt.kinds)
    fills = {kind: colours.adaptive(paints.of(kind)) for kind in gantt.kinds}
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
    for tick in range(_TICKS + 1):
        anchor = "start" if tick == 0 else "end" if tick == _TICKS else "middle"
        hidden = ' class="wide-only"' if tick % 2 else ""
        text = "0" if tick == 0 else gantt.form(end * tick / _TICKS)
        yield f'<text x="{_percent(tick / _TICKS)}" y="12" text-anchor="{anchor}"{hidden}>{_escape(text)}</text>'


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


def _escape(text: str) -> str:
    return escape(printable_short(text))
