"""The table: a pipe table with a row for each module, for each operator, or for each operator of each module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fvflops.reports.lines import DEPTH, list_lines
from fvflops.reports.pipe import draw
from fvflops.reports.statistics import (
    check_view,
    depth_of,
    list_operator_headings,
    rank_operators,
    rank_operators_by_module,
)
from fvflops.trace import Summary
from fvflops.units import format_percent, format_size


def render(summary: Summary, *, by: str = "module", depth: int | None = None, show_param_shapes: bool = True) -> str:
    """Return the summary as a pipe table; by module it is, byte for byte, that of fvcore's `flop_count_table`,
    but for names that cannot be printed as they are.

    `depth` is how many levels below the root are shown, 3 if None; by operator it has no meaning and is ignored.
    `show_param_shapes` adds a row with the shape of each parameter and has a meaning only by module. An unknown view
    raises ValueError.
    """
    check_view(by, report="the table")
    if by == "operator":
        return _draw_operators(summary)
    if by == "both":
        return _draw_both(summary, DEPTH if depth is None else depth)
    return _draw_modules(summary, depth, show_param_shapes)


def _head(heading: str, show_param_shapes: bool = False) -> str:
    return f"#{heading} or shape" if heading == "parameters" and show_param_shapes else f"#{heading}"


def _draw_modules(summary: Summary, depth: int | None, show_param_shapes: bool) -> str:
    headings = list(summary.columns)
    first, *lines = list_lines(summary, depth=depth, show_param_shapes=show_param_shapes)
    # What all names share says nothing, so it is left off.
    prefix = f"{first.name}." if first.name else ""
    rows = [_indent(0, first.name or "model", first.cells, headings)]
    rows += [_indent(line.level, line.name.removeprefix(prefix), line.cells, headings) for line in lines]
    return draw(["module", *(_head(heading, show_param_shapes) for heading in headings)], rows)


def _indent(level: int, name: str, row: Mapping[str, str], headings: Sequence[str]) -> tuple[str, ...]:
    blanks = " " * level
    return (blanks + show_short(name), *(blanks + row[heading] if heading in row else "" for heading in headings))


def _draw_operators(summary: Summary) -> str:
    headings = list_operator_headings(summary)
    totals = [sum(summary.operators[heading].values()) for heading in headings]
    rows = [(show_short(row.operator), *_format_with_share(row.counts, totals)) for row in rank_operators(summary)]
    rows.append(("total", *_format_with_share(totals, totals)))
    return draw(["operator", *_head_with_share(headings)], rows)


def _draw_both(summary: Summary, depth: int) -> str:
    headings = list_operator_headings(summary)
    totals = [sum(summary.operators[heading].values()) for heading in headings]
    rows: list[tuple[str, ...]] = []
    above: str | None = None
    for row in rank_operators_by_module(summary, depth=depth):
        # A module is named on the first of its rows.
        module = "" if row.module == above else " " * depth_of(row.module) + (show_short(row.module) or "model")
        rows.append((module, show_short(row.operator), *_format_with_share(row.counts, totals)))
        above = row.module
    return draw(["module", "operator", *_head_with_share(headings)], rows)


def _head_with_share(headings: Sequence[str]) -> list[str]:
    first, *others = (_head(heading) for heading in headings)
    return [first, "share", *others]


def _format_with_share(counts: Sequence[int], totals: Sequence[int]) -> list[str]:
    first, *others = (format_size(count) for count in counts)
    return [first, format_percent(counts[0], totals[0]), *others]
