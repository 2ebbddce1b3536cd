"""A table for a terminal, fitted to its width, with colours, a bar for each share, and the coverage below."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fvflops.reports.escaping import printable
from fvflops.reports.formats.text import hidden_columns_note
from fvflops.reports.terminal import op_coverage
from fvflops.reports.terminal.collapse import collapse, collapse_note
from fvflops.reports.terminal.module_rows import Line, count_line, limit_depth, list_lines
from fvflops.reports.terminal.op_coverage import Note
from fvflops.reports.text.display_width import display_width, pad, truncate_middle, wrap
from fvflops.reports.text.text_table import GAP, text_table
from fvflops.trace import Summary
from fvflops.units import format_parameters, format_percent, format_short
from fvflops.views.made_summary import name_heading
from fvflops.views.ranking import choose_measure, truncation_note
from fvflops.views.summary_rows import (
    ITSELF,
    OperatorRow,
    check_view,
    count_itself,
    depth_of,
    list_operator_headings,
    rank_operators,
    rank_operators_by_module,
)

_MAX_BAR = 24  # cells
_MIN_BAR = 4
# Columns of numbers are hidden before names are truncated to fewer cells; the second width is tried last.
_NAME_WIDTHS = (20, 8)
_INDENT = 2
_LONG = 40  # rows of a table from which on equal layers are better collapsed
_NAMED = 3  # modules that a sentence on blank cells names
_GAP = len(GAP)
_BOLD, _DIM, _BARS = "1", "2", "36"
_TONES = {"unsupported": "31", "assumed": "33"}  # red, yellow

Paint = Callable[[str, str], str]


class Characters(NamedTuple):
    """Characters that a terminal can show; `bars` are blocks that fill a fraction of a cell, the full one last."""

    ellipsis: str
    bars: str


_UNICODE = Characters("…", "▏▎▍▌▋▊▉█")
_ASCII = Characters("..", "#")
_TO_ASCII = str.maketrans({"–": "-", "×": "x", "…": "..."})


class _Row(NamedTuple):
    """A row: a cell for each column of names, the first indented by `level`, and one for each column of numbers.

    `value` is the count that its bar shows; `is_total` rows are bold.
    """

    names: tuple[str, ...]
    level: int
    numbers: tuple[str, ...]
    value: float
    is_total: bool = False


class _Grid(NamedTuple):
    """A table before it is fitted to a width.

    `name_headings` are those of the columns of names, `headings` those of the numbers. Shares are fractions of `total`,
    the total of the heading with the index `measure`.
    """

    name_headings: tuple[str, ...]
    headings: tuple[str, ...]
    measure: int
    total: float
    rows: list[_Row]
    notes: list[str]


class _Layout(NamedTuple):
    """Widths of the columns of names and of the bar in cells, and which columns of numbers are shown.

    `numbers` are indexes of headings, `percent` is whether shares are shown; without bars `bar` is 0.
    """

    names: tuple[int, ...]
    numbers: tuple[int, ...]
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
    """Return the summary as a table of at most `width` cells (4 or more; None is no limit), with the coverage below.

    The rows are those of `fvcore_table`, without parameter shapes; names are relative to the parent
    row, and truncated in the middle where the table is too wide. Shares and bars are of the FLOPs, or of the column of
    `sort`. In a narrow terminal first bars are hidden, then columns from the right, with a note. `colour` adds ANSI
    escape sequences; characters that `encoding` lacks are written in ASCII. An unknown `by` or `sort` raises
    ValueError.
    """
    check_view(by, report="the table")
    to_printable = _printable_in(encoding)
    grid = _VIEWS[by](summary, depth, sort, top)
    grid = grid._replace(rows=[row._replace(names=tuple(map(to_printable, row.names))) for row in grid.rows])
    layout = _lay_out(grid, width)
    paint: Paint = _paint if colour else lambda text, code: text
    table_notes = [*map(Note, [*grid.notes, *hidden_columns_note(_list_hidden(grid, layout), width)])]
    blocks = [_draw(grid, layout, _UNICODE if to_printable is printable else _ASCII, paint)]
    for notes in (table_notes, op_coverage.list_notes(summary)):
        if notes:
            blocks.append("\n".join(_write(to_printable(note.text), note.tone, width, paint) for note in notes))
    return "\n\n".join(blocks)


def _printable_in(encoding: str) -> Callable[[str], str]:
    """Return a function that makes a text printable in an encoding."""
    if codecs.lookup(encoding).name.startswith("utf"):
        return printable
    return lambda text: printable(text).translate(_TO_ASCII).encode(encoding, "backslashreplace").decode(encoding)


def _paint(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if text and code else text


def _write(sentence: str, tone: str, width: int | None, paint: Paint) -> str:
    lines = [sentence] if width is None else wrap(sentence, width)
    return "\n".join(paint(line, _TONES.get(tone, "")) for line in lines)


# ---- rows


def _list_modules(summary: Summary, depth: int | None, sort: str | None, top: int | None) -> _Grid:
    headings = list(summary.columns)
    measure = choose_measure(headings, sort)
    lines = list_lines(summary, depth=depth, show_param_shapes=False, sort=sort, top=top)
    itself = count_itself(summary, dict.fromkeys(line.above for line in lines if line.level), measure)
    rows: list[_Row] = []
    for line in lines[:top]:
        numbers = tuple(_format(summary, line, heading) for heading in headings)
        count = count_line(summary, line, measure)
        rows.append(_Row((_name(summary, line) or "model",), line.level, numbers, count, line.chain[0] == ""))
        if line.name in itself:
            counts = itself[line.name]
            numbers = tuple(_format_count(counts[heading], heading) for heading in headings)
            rows.append(_Row((ITSELF,), line.level + 1, numbers, counts[measure]))
    total = summary.columns[measure].get("", 0)
    shown = [line.name for line in lines[:top]]
    notes = [*truncation_note(lines, top, "module"), *collapse_note(summary, shown), *_explain_blanks(summary, shown)]
    if len(rows) > _LONG and not summary.labels and collapse(summary).labels:
        notes.append("--collapse shows consecutive equal layers as one row.")
    return _Grid(("module",), tuple(headings), headings.index(measure), total, rows, notes)


def _explain_blanks(summary: Summary, shown: Sequence[str]) -> list[str]:
    """Return sentences on blank cells: of modules whose parameters are another's, and of modules that never ran."""
    owners = {parameter.identity: parameter.name.rpartition(".")[0] for parameter in summary.modules.parameters()}
    notes = []
    modules = [name for name in shown if name in summary.modules.by_name and "parameters" in summary.columns]
    for name in modules:
        shared = {owners[parameter.identity] for parameter in summary.modules.by_name[name].parameters} - {name}
        if shared and not summary.columns["parameters"].get(name):
            notes.append(f"{name} has the parameters of {', '.join(sorted(shared))}, counted there.")
    uncalled = frozenset().union(*summary.uncalled.values())
    never = [name for name in modules if name in uncalled and summary.columns["parameters"].get(name)]
    more = f", and {len(never) - _NAMED} more" if len(never) > _NAMED else ""
    return [*notes[:_NAMED], *([f"Not called: {', '.join(never[:_NAMED])}{more}."] if never else [])]


def _format(summary: Summary, line: Line, heading: str) -> str:
    if not line.cells.get(heading):
        return ""
    return _format_count(count_line(summary, line, heading), heading)


def _format_count(count: int, heading: str) -> str:
    return format_parameters(count) if heading == "parameters" else format_short(count)


def _name(summary: Summary, line: Line) -> str:
    """Return a row's name relative to its parent row; below repeated layers, relative to the parent of the layers."""
    parent = line.above.rpartition(".")[0] if line.above in summary.labels else line.above
    return summary.label(line.name).removeprefix(f"{parent}." if parent else "")


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
    previous: str | None = None
    for row in ranked[:top]:
        module = "" if row.module == previous and not flat else summary.label(row.module) or "model"
        rows.append(((module, row.operator), 0 if flat else depth_of(row.module), row))
        previous = row.module
    notes = [*truncation_note(ranked, top, "row"), *collapse_note(summary, (row.module for row in ranked[:top]))]
    return _list_operator_rows(summary, ("module", "operator"), rows, sort)._replace(notes=notes)


def _list_operator_rows(
    summary: Summary,
    name_headings: tuple[str, ...],
    rows: Sequence[tuple[tuple[str, ...], int, OperatorRow]],
    sort: str | None,
) -> _Grid:
    headings = list_operator_headings(summary)
    measure = headings.index(choose_measure(headings, sort))
    total = sum(summary.operators[headings[measure]].values())
    formatted = [
        _Row(names, level, tuple(map(format_short, row.counts)), row.counts[measure]) for names, level, row in rows
    ]
    return _Grid(name_headings, tuple(headings), measure, total, formatted, [])


_VIEWS = {"module": _list_modules, "operator": _list_operators, "both": _list_both}


# ---- layout


def _lay_out(grid: _Grid, width: int | None) -> _Layout:
    full_widths = [
        max(
            display_width(heading),
            *(_INDENT * row.level * (not index) + display_width(row.names[index]) for row in grid.rows),
            1,
        )
        for index, heading in enumerate(grid.name_headings)
    ]
    indexes = tuple(range(len(grid.headings)))
    if width is None:
        return _Layout(tuple(full_widths), indexes, True, _MAX_BAR)
    others = [index for index in indexes if index != grid.measure]
    choices = [(tuple(sorted([*others[:count], grid.measure])), True) for count in range(len(others), -1, -1)]
    for name_width in _NAME_WIDTHS:
        for numbers, percent in [*choices, ((grid.measure,), False)]:
            available = width - sum(map(_GAP.__add__, _measure_numbers(grid, numbers, percent)))
            needed = _total_width([min(cells, name_width) for cells in full_widths])
            if needed <= available:
                remaining = available - needed - _GAP
                spare = available - _total_width(full_widths)  # beside whole names, which come before bars
                bar = min(_MAX_BAR, spare - _GAP if spare >= 0 else min(remaining, 2 * _MIN_BAR))
                bar = bar if percent and bar >= _MIN_BAR else 0
                names = _narrow(full_widths, available - (bar + _GAP if bar else 0))
                return _Layout(names, numbers, percent, bar)
    return _Layout(_narrow(full_widths, max(width, len(full_widths))), (), False, 0)


def _total_width(columns: Sequence[int]) -> int:
    return sum(columns) + _GAP * (len(columns) - 1)


def _narrow(full_widths: Sequence[int], available: int) -> tuple[int, ...]:
    """Return the widths of the columns of names, the widest narrowed until all fit."""
    widths = [min(cells, available) for cells in full_widths]
    while _total_width(widths) > available and max(widths) > 1:
        widths[widths.index(max(widths))] -= 1
    return tuple(widths)


def _measure_numbers(grid: _Grid, numbers: Sequence[int], percent: bool) -> list[int]:
    """Return the widths of the columns of numbers and, with `percent`, of the shares."""
    widths = [
        max(len(name_heading(grid.headings[index])), *(len(row.numbers[index]) for row in grid.rows), 0)
        for index in numbers
    ]
    return [*widths, len(_share_heading(grid))] if percent else widths


def _share_heading(grid: _Grid) -> str:
    return f"% {name_heading(grid.headings[grid.measure])}"


def _list_hidden(grid: _Grid, layout: _Layout) -> list[str]:
    hidden = [name_heading(heading) for index, heading in enumerate(grid.headings) if index not in layout.numbers]
    hidden += [] if layout.percent else [_share_heading(grid)]
    return hidden if layout.bar else [*hidden, "bars"]


def _draw(grid: _Grid, layout: _Layout, characters: Characters, paint: Paint) -> str:
    headings = [
        truncate_middle(heading, cells, ellipsis=characters.ellipsis)
        for heading, cells in zip(grid.name_headings, layout.names, strict=True)
    ]
    headings += [name_heading(grid.headings[index]) for index in layout.numbers]
    headings += [_share_heading(grid)] * layout.percent + [""] * bool(layout.bar)
    bars = [_draw_bar(row.value, grid.total, layout.bar, characters) for row in grid.rows]
    cells = []
    for row, bar in zip(grid.rows, bars, strict=True):
        texts = [*_truncate_names(row, layout.names, characters), *(row.numbers[index] for index in layout.numbers)]
        texts += [format_percent(row.value, grid.total)] * layout.percent
        cells.append(texts + [pad(bar, layout.bar)] * bool(layout.bar))
    header, rule, *lines = text_table(headings, cells, left=range(len(layout.names))).split("\n")
    painted = [paint(header, _BOLD), paint(rule, _DIM)]
    for row, bar, line in zip(grid.rows, bars, lines, strict=True):
        text = line.removesuffix(bar)
        painted.append((paint(text, _BOLD) if row.is_total else text) + paint(bar, _BARS))
    return "\n".join(painted)


def _truncate_names(row: _Row, widths: Sequence[int], characters: Characters) -> list[str]:
    # At least half of the first column is for the name, however deep its level.
    indent = min(_INDENT * row.level, max(widths[0] // 2, widths[0] - display_width(row.names[0])))
    first, *others = (
        truncate_middle(name, cells, ellipsis=characters.ellipsis)
        for name, cells in zip(row.names, [widths[0] - indent, *widths[1:]], strict=True)
    )
    return [" " * indent + first, *others]


def _draw_bar(value: float, total: float, width: int, characters: Characters) -> str:
    """Return a bar for a share, in fractions of a cell; a share above zero has at least one fraction."""
    if not width or total <= 0 or value <= 0:
        return ""
    per_cell = len(characters.bars)
    filled = min(max(round(value * width * per_cell / total), 1), width * per_cell)
    full, rest = divmod(filled, per_cell)
    return characters.bars[-1] * full + (characters.bars[rest - 1] if rest else "")
