"""A pipe table with a row for each module, for each operator, or for each operator of each module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fvflops.reports.escaping import printable_short
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
    """Return the summary as a pipe table; by module it equals that of fvcore's `flop_count_table` byte for byte,
    except that unprintable names are escaped.

    `depth` is the number of levels shown below the root, 3 if None; by operator it is ignored. By module,
    `show_param_shapes` adds a row with the shape of each parameter. With `sort` or `top` the rows of all levels are one
    list, by a metric in descending order or by "name" in natural order, without shapes; the first `top` are shown, and
    a note has the number of the others. An unknown `by` or `sort` raises ValueError.
    """
    check_view(by, report="the table")
    ranked = sort is not None or top is not None
    if by == "operator":
        operators = rank_operators(summary, by, sort=sort, top=top)
        table, notes = _draw_operators(summary, operators[:top]), truncation_note(operators, top, "operator")
    elif by == "both":
        rows = rank_operators(summary, by, depth=depth if ranked else limit_depth(depth), sort=sort, top=top)
        table, notes = _draw_both(summary, rows[:top], ranked), truncation_note(rows, top, "row")
        notes += collapse_note(summary, (row.module for row in rows[:top]))
    else:
        lines = list_lines(summary, depth=depth, show_param_shapes=show_param_shapes, sort=sort, top=top)
        table = _draw_modules(summary, lines[:top], show_param_shapes and not ranked)
        notes = [*truncation_note(lines, top, "module"), *collapse_note(summary, (line.name for line in lines[:top]))]
    return "\n\n".join([table, "\n".join(notes)] if notes else [table])


def render_covered(summary: Summary, **options: Any) -> str:
    """Return the table of `render` with the coverage of the count below."""
    return f"{render(summary, **options)}\n\n{op_coverage.render(summary)}"


def _label(heading: str, show_param_shapes: bool = False) -> str:
    return f"#{heading} or shape" if heading == "parameters" and show_param_shapes else f"#{heading}"


def _draw_modules(summary: Summary, lines: Sequence[Line], show_param_shapes: bool) -> str:
    headings = list(summary.columns)
    # In a tree, the prefix common to all names is dropped.
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
    return pipe_table(["module", *(_label(heading, show_param_shapes) for heading in headings)], rows)


def _indent(level: int, name: str, row: Mapping[str, str], headings: Sequence[str]) -> tuple[str, ...]:
    blanks = " " * level
    return (blanks + name, *(blanks + row[heading] if heading in row else "" for heading in headings))


def _draw_operators(summary: Summary, ranked: Sequence[OperatorRow]) -> str:
    headings = list_operator_headings(summary)
    totals = [sum(summary.operators[heading].values()) for heading in headings]
    rows = [(printable_short(row.operator), *_format_with_share(row.counts, totals)) for row in ranked]
    rows.append(("total", *_format_with_share(totals, totals)))
    return pipe_table(["operator", *_labels_with_share(headings)], rows)


def _draw_both(summary: Summary, ranked: Sequence[OperatorRow], flat: bool) -> str:
    headings = list_operator_headings(summary)
    totals = [sum(summary.operators[heading].values()) for heading in headings]
    rows: list[tuple[str, ...]] = []
    previous: str | None = None
    for row in ranked:
        # In a tree only the first row of a module has its name.
        name = printable_short(summary.label(row.module)) or "model"
        module = name if flat else "" if row.module == previous else " " * depth_of(row.module) + name
        rows.append((module, printable_short(row.operator), *_format_with_share(row.counts, totals)))
        previous = row.module
    return pipe_table(["module", "operator", *_labels_with_share(headings)], rows)


def _labels_with_share(headings: Sequence[str]) -> list[str]:
    first, *others = (_label(heading) for heading in headings)
    return [first, "share", *others]


def _format_with_share(counts: Sequence[int], totals: Sequence[int]) -> list[str]:
    first, *others = (format_size(count) for count in counts)
    return [first, format_percent(counts[0], totals[0]), *others]
