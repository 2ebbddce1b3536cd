"""The table: a pipe table with a row for each module, for each operator, or for each operator of each module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fvflops.reports.names import printable_short
from fvflops.reports.terminal import op_coverage
from fvflops.reports.terminal.collapse import collapse_note
from fvflops.reports.terminal.module_rows import Line, limit_depth, list_lines
from fvflops.reports.text.pipe_table import pipe_table
from fvflops.trace import Summary
from fvflops.units import format_percent, format_size
from fvflops.views.ranking import truncation_note
from fvflops.views.summary_rows import (
    OperatorRow,
    check_view,
    depth_of,
    list_operator_headings,
    rank_operators,
    rank_operators_by_module,
)


def render(
    summary: Summary,
    *,
    by: str = "module",
    depth: int | None = None,
    show_param_shapes: bool = True,
    sort: str | None = None,
    top: int | None = None,
) -> str:
    """Return the summary as a pipe table; by module it is, byte for byte, that of fvcore's `flop_count_table`,
    but for names that cannot be printed as they are.

    `depth` is how many levels below the root are shown, 3 if None; by operator it has no meaning and is ignored.
    `show_param_shapes` adds a row with the shape of each parameter and has a meaning only by module. With `sort`, a
    heading or "name", or `top` the rows stand in one list of all levels, those with most first and without shapes,
    and `top` of them are shown; a line below says how many more there are. An unknown view or order raises ValueError.
    """
    check_view(by, report="the table")
    ranked = sort is not None or top is not None
    if by == "operator":
        operators = rank_operators(summary, sort=sort, top=top)
        table, more = _draw_operators(summary, operators[:top]), truncation_note(operators, top, "operator")
    elif by == "both":
        rows = rank_operators_by_module(summary, depth=depth if ranked else limit_depth(depth), sort=sort, top=top)
        table, more = _draw_both(summary, rows[:top], ranked), truncation_note(rows, top, "row")
        more += collapse_note(summary, (row.module for row in rows[:top]))
    else:
        lines = list_lines(summary, depth=depth, show_param_shapes=show_param_shapes, sort=sort, top=top)
        table = _draw_modules(summary, lines[:top], show_param_shapes and not ranked)
        more = [*truncation_note(lines, top, "module"), *collapse_note(summary, (line.name for line in lines[:top]))]
    return "\n\n".join([table, "\n".join(more)] if more else [table])


def render_covered(summary: Summary, **options: Any) -> str:
    """Return what `render` does, and below it which op calls are counted."""
    return f"{render(summary, **options)}\n\n{op_coverage.render(summary)}"


def _head(heading: str, show_param_shapes: bool = False) -> str:
    return f"#{heading} or shape" if heading == "parameters" and show_param_shapes else f"#{heading}"


def _draw_modules(summary: Summary, lines: Sequence[Line], show_param_shapes: bool) -> str:
    headings = list(summary.columns)
    # What all names share says nothing, so it is left off where the lines are a tree.
    prefix = f"{lines[0].name}."
    rows = [
        _indent(
            line.level,
            printable_short(summary.label(line.name).removeprefix(prefix if line.level else "")) or "model",
            line.cells,
            headings,
        )
        for line in lines
    ]
    return pipe_table(["module", *(_head(heading, show_param_shapes) for heading in headings)], rows)


def _indent(level: int, name: str, row: Mapping[str, str], headings: Sequence[str]) -> tuple[str, ...]:
    blanks = " " * level
    return (blanks + name, *(blanks + row[heading] if heading in row else "" for heading in headings))


def _draw_operators(summary: Summary, ranked: Sequence[OperatorRow]) -> str:
    headings = list_operator_headings(summary)
    totals = [sum(summary.operators[heading].values()) for heading in headings]
    rows = [(printable_short(row.operator), *_format_with_share(row.counts, totals)) for row in ranked]
    rows.append(("total", *_format_with_share(totals, totals)))
    return pipe_table(["operator", *_head_with_share(headings)], rows)


def _draw_both(summary: Summary, ranked: Sequence[OperatorRow], flat: bool) -> str:
    headings = list_operator_headings(summary)
    totals = [sum(summary.operators[heading].values()) for heading in headings]
    rows: list[tuple[str, ...]] = []
    above: str | None = None
    for row in ranked:
        # In a tree a module is named on the first of its rows.
        name = printable_short(summary.label(row.module)) or "model"
        module = name if flat else "" if row.module == above else " " * depth_of(row.module) + name
        rows.append((module, printable_short(row.operator), *_format_with_share(row.counts, totals)))
        above = row.module
    return pipe_table(["module", "operator", *_head_with_share(headings)], rows)


def _head_with_share(headings: Sequence[str]) -> list[str]:
    first, *others = (_head(heading) for heading in headings)
    return [first, "share", *others]


def _format_with_share(counts: Sequence[int], totals: Sequence[int]) -> list[str]:
    first, *others = (format_size(count) for count in counts)
    return [first, format_percent(counts[0], totals[0]), *others]
