"""A table for a terminal, fitted to its width, with colours and a bar for each share, and the coverage below."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fvflops.reports.names import printable
from fvflops.reports.terminal import op_coverage
from fvflops.reports.terminal.collapse import collapse_note
from fvflops.reports.terminal.module_rows import Line, count_line, limit_depth, list_lines
from fvflops.reports.terminal.op_coverage import Note
from fvflops.reports.text.display_width import display_width, pad, truncate_middle, wrap
from fvflops.reports.text.text_table import GAP, text_table
from fvflops.trace import Summary
from fvflops.units import format_parameters, format_percent, format_quantity, format_short
from fvflops.views.ranking import choose_measure, truncation_note
from fvflops.views.summary import name_heading
from fvflops.views.summary_rows import (
    OperatorRow,
    check_view,
    depth_of,
    list_operator_headings,
    rank_operators,
    rank_operators_by_module,
)

_BAR = 24  # cells of a bar for the whole, where there is room
_SHORTEST_BAR = 4
_NAMES = (20, 8)  # cells that names need before figures are given up for them; then, where that is not enough
_INDENT = 2
_GAP = len(GAP)
_BOLD, _DIM, _BARS = "1", "2", "36"
_TONES = {"gap": "31", "doubt": "33"}  # red, yellow

Paint = Callable[[str, str], str]


class Marks(NamedTuple):
    """Characters that a terminal can show: `bars` are the fractions of a cell, the whole one last."""

    ellipsis: str
    bars: str


_MARKS = Marks("…", "▏▎▍▌▋▊▉█")
_ASCII = Marks("..", "#")
_PLAIN = str.maketrans({"–": "-", "×": "x", "…": "..."})


class _Row(NamedTuple):
    """A row: its names, how deep the first is indented, a text for each figure, and the amount that its bar shows."""

    names: tuple[str, ...]
    level: int
    figures: tuple[str, ...]
    amount: float
    whole: bool = False


class _Grid(NamedTuple):
    """A table before it is fitted: `measure` is the place of the heading that shares are of, `total` its whole."""

    heads: tuple[str, ...]
    headings: tuple[str, ...]
    measure: int
    total: float
    rows: list[_Row]
    notes: list[str]


class _Layout(NamedTuple):
    """Cells for each column of names, places of the figures shown, whether percentages are shown, cells of a bar."""

    names: tuple[int, ...]
    figures: tuple[int, ...]
    percent: bool
    bar: int


def render(
    summary: Summary,
    *,
    by: str = "module",
    depth: int | None = None,
    sort: str | None = None,
    top: int | None = None,
    width: int | None = None,
    colour: bool = False,
    encoding: str = "utf-8",
) -> str:
    """Return the summary as a table of at most `width` cells a line (4 or more; None is any), and the coverage below.

    The rows are those of `fvflops.reports.fvcore.table`, without parameters' shapes; names are relative to the row
    above them, and cut in the middle where there is no room. Shares and bars are of the FLOPs, or of the column of
    `sort`. A terminal too narrow for all loses bars first, then columns from the right, and a note names them. `colour`
    adds the escape sequences of a terminal; what `encoding` lacks is written in ASCII. An unknown view or order raises
    ValueError.
    """
    check_view(by, report="the table")
    fit = _find_fit(encoding)
    grid = _VIEWS[by](summary, depth, sort, top)
    grid = grid._replace(rows=[row._replace(names=tuple(map(fit, row.names))) for row in grid.rows])
    layout = _lay_out(grid, width)
    paint: Paint = _paint if colour else lambda text, code: text
    sentences = [*map(Note, [*grid.notes, *_note_dropped(grid, layout, width)])]
    blocks = [_draw(grid, layout, _MARKS if fit is printable else _ASCII, paint)]
    for group in (sentences, op_coverage.list_notes(summary)):
        if group:
            blocks.append("\n".join(_write(fit(sentence.text), sentence.tone, width, paint) for sentence in group))
    return "\n\n".join(blocks)


def _find_fit(encoding: str) -> Callable[[str], str]:
    """Return a function that makes a text printable in an encoding."""
    if codecs.lookup(encoding).name.startswith("utf"):
        return printable
    return lambda text: printable(text).translate(_PLAIN).encode(encoding, "backslashreplace").decode(encoding)


def _paint(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if text and code else text


def _write(sentence: str, tone: str, width: int | None, paint: Paint) -> str:
    lines = [sentence] if width is None else wrap(sentence, width)
    return "\n".join(paint(line, _TONES.get(tone, "")) for line in lines)


# ---- rows


def _list_modules(summary: Summary, depth: int | None, sort: str | None, top: int | None) -> _Grid:
    headings = list(summary.columns)
    chosen = choose_measure(headings, sort)
    lines = list_lines(summary, depth=depth, show_param_shapes=False, sort=sort, top=top)
    rows = [
        _Row(
            (_name(summary, line) or "model",),
            line.level,
            tuple(_format(summary, line, heading) for heading in headings),
            count_line(summary, line, chosen),
            line.chain[0] == "",
        )
        for line in lines[:top]
    ]
    total = summary.columns[chosen].get("", 0)
    notes = [*truncation_note(lines, top, "module"), *collapse_note(summary, (line.name for line in lines[:top]))]
    return _Grid(("module",), tuple(headings), headings.index(chosen), total, rows, notes)


def _format(summary: Summary, line: Line, heading: str) -> str:
    if not line.cells.get(heading):
        return ""
    count = count_line(summary, line, heading)
    return format_parameters(count) if heading == "parameters" else format_short(count)


def _name(summary: Summary, line: Line) -> str:
    """Return a line's name relative to the line above; below a row of equal modules it begins with the first."""
    above = line.above.rpartition(".")[0] if line.above in summary.labels else line.above
    return summary.label(line.name).removeprefix(f"{above}." if above else "")


def _list_operators(summary: Summary, depth: int | None, sort: str | None, top: int | None) -> _Grid:
    ranked = rank_operators(summary, sort=sort, top=top)
    grid = _list_operator_rows(summary, ("operator",), [((row.operator,), 0, row) for row in ranked[:top]], sort)
    totals = [sum(summary.operators[heading].values()) for heading in grid.headings]
    total = _Row(("total",), 0, tuple(map(format_short, totals)), grid.total, True)
    return grid._replace(rows=[*grid.rows, total], notes=truncation_note(ranked, top, "operator"))


def _list_both(summary: Summary, depth: int | None, sort: str | None, top: int | None) -> _Grid:
    flat = sort is not None or top is not None
    ranked = rank_operators_by_module(summary, depth=depth if flat else limit_depth(depth), sort=sort, top=top)
    rows: list[tuple[tuple[str, ...], int, OperatorRow]] = []
    above: str | None = None
    for row in ranked[:top]:
        module = "" if row.module == above and not flat else summary.label(row.module) or "model"
        rows.append(((module, row.operator), 0 if flat else depth_of(row.module), row))
        above = row.module
    notes = [*truncation_note(ranked, top, "row"), *collapse_note(summary, (row.module for row in ranked[:top]))]
    return _list_operator_rows(summary, ("module", "operator"), rows, sort)._replace(notes=notes)


def _list_operator_rows(
    summary: Summary, heads: tuple[str, ...], rows: Sequence[tuple[tuple[str, ...], int, OperatorRow]], sort: str | None
) -> _Grid:
    headings = list_operator_headings(summary)
    place = headings.index(choose_measure(headings, sort))
    total = sum(summary.operators[headings[place]].values())
    found = [_Row(names, level, tuple(map(format_short, row.counts)), row.counts[place]) for names, level, row in rows]
    return _Grid(heads, tuple(headings), place, total, found, [])


_VIEWS = {"module": _list_modules, "operator": _list_operators, "both": _list_both}


# ---- layout


def _lay_out(grid: _Grid, width: int | None) -> _Layout:
    natural = [
        max(
            display_width(head),
            *(_INDENT * row.level * (not place) + display_width(row.names[place]) for row in grid.rows),
            1,
        )
        for place, head in enumerate(grid.heads)
    ]
    everything = tuple(range(len(grid.headings)))
    if width is None:
        return _Layout(tuple(natural), everything, True, _BAR)
    others = [place for place in everything if place != grid.measure]
    kept = [tuple(sorted([*others[:count], grid.measure])) for count in range(len(others), -1, -1)]
    for need in _NAMES:
        for figures, percent in [*((places, True) for places in kept), ((grid.measure,), False)]:
            room = width - sum(map(_GAP.__add__, _measure_figures(grid, figures, percent)))
            if _add_up([min(cells, need) for cells in natural]) <= room:
                spare = room - _add_up([min(cells, need) for cells in natural]) - _GAP
                bar = min(_BAR, max(room - _add_up(natural) - _GAP, min(spare, 2 * _SHORTEST_BAR)))
                bar = bar if percent and bar >= _SHORTEST_BAR else 0
                return _Layout(_share_out(natural, room - (bar + _GAP if bar else 0)), figures, percent, bar)
    return _Layout(_share_out(natural, max(width, len(natural))), (), False, 0)


def _add_up(columns: Sequence[int]) -> int:
    return sum(columns) + _GAP * (len(columns) - 1)


def _share_out(natural: Sequence[int], room: int) -> tuple[int, ...]:
    """Return the cells for each column of names; the widest are narrowed first."""
    widths = [min(cells, room) for cells in natural]
    while _add_up(widths) > room and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    return tuple(widths)


def _measure_figures(grid: _Grid, figures: Sequence[int], percent: bool) -> list[int]:
    widths = [
        max(len(name_heading(grid.headings[place])), *(len(row.figures[place]) for row in grid.rows), 0)
        for place in figures
    ]
    return [*widths, len(_head_of_shares(grid))] if percent else widths


def _head_of_shares(grid: _Grid) -> str:
    return f"% {name_heading(grid.headings[grid.measure])}"


def _note_dropped(grid: _Grid, layout: _Layout, width: int | None) -> list[str]:
    missing = [name_heading(heading) for place, heading in enumerate(grid.headings) if place not in layout.figures]
    missing += [] if layout.percent else [_head_of_shares(grid)]
    missing += [] if layout.bar else ["bars"]
    return [f"No room in {format_quantity(width or 0, 'column')} for {', '.join(missing)}."] if missing else []


def _draw(grid: _Grid, layout: _Layout, marks: Marks, paint: Paint) -> str:
    heads = [
        truncate_middle(head, cells, ellipsis=marks.ellipsis)
        for head, cells in zip(grid.heads, layout.names, strict=True)
    ]
    heads += [name_heading(grid.headings[place]) for place in layout.figures]
    heads += [_head_of_shares(grid)] * layout.percent + [""] * bool(layout.bar)
    bars = [_draw_bar(row.amount, grid.total, layout.bar, marks) for row in grid.rows]
    cells = []
    for row, bar in zip(grid.rows, bars, strict=True):
        texts = [*_cut_names(row, layout.names, marks), *(row.figures[place] for place in layout.figures)]
        texts += [_say_share(row.amount, grid.total)] * layout.percent
        cells.append(texts + [pad(bar, layout.bar)] * bool(layout.bar))
    header, rule, *lines = text_table(heads, cells, left=range(len(layout.names))).split("\n")
    painted = [paint(header, _BOLD), paint(rule, _DIM)]
    for row, bar, line in zip(grid.rows, bars, lines, strict=True):
        text = line.removesuffix(bar)
        painted.append((paint(text, _BOLD) if row.whole else text) + paint(bar, _BARS))
    return "\n".join(painted)


def _cut_names(row: _Row, widths: Sequence[int], marks: Marks) -> list[str]:
    # Where the column is cut, half of it is for the name, however deep its level.
    indent = min(_INDENT * row.level, max(widths[0] // 2, widths[0] - display_width(row.names[0])))
    room = [widths[0] - indent, *widths[1:]]
    first, *others = (
        truncate_middle(name, cells, ellipsis=marks.ellipsis) for name, cells in zip(row.names, room, strict=True)
    )
    return [" " * indent + first, *others]


def _say_share(count: float, total: float) -> str:
    return format_percent(count, total)


def _draw_bar(count: float, total: float, width: int, marks: Marks) -> str:
    """Return a bar as long as the share, in fractions of a cell; a share above zero has at least one."""
    if not width or total <= 0 or count <= 0:
        return ""
    parts = len(marks.bars)
    filled = min(max(round(count * width * parts / total), 1), width * parts)
    whole, rest = divmod(filled, parts)
    return marks.bars[-1] * whole + (marks.bars[rest - 1] if rest else "")
