"""The table: a pipe table with a row for each module, for each operator, or for each operator of each module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fvflops.reports.names import show_short
from fvflops.reports.pipe import draw
from fvflops.reports.statistics import (
    check_view,
    depth_of,
    drop_zeros,
    format_cells,
    group_by_name,
    index_children,
    list_operator_headings,
    mark_uncalled,
    rank_operators,
    rank_operators_by_module,
)
from fvflops.trace import Summary
from fvflops.units import format_percent, format_shape, format_size

DEPTH = 3  # the max_depth that fvcore's flop_count_table has by default

Cells = Mapping[str, Mapping[str, str]]


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
    levels = DEPTH if depth is None else depth
    if by == "both":
        return _draw_both(summary, levels)
    headers = {heading: _head(heading, show_param_shapes) for heading in summary.columns}
    cells = _prepare(summary, show_param_shapes)
    rows = _list_rows(cells, list(headers), levels)
    return draw(["module", *headers.values()], rows)


def _head(heading: str, show_param_shapes: bool = False) -> str:
    return f"#{heading} or shape" if heading == "parameters" and show_param_shapes else f"#{heading}"


def _prepare(summary: Summary, show_param_shapes: bool) -> dict[str, dict[str, str]]:
    counts = drop_zeros(group_by_name(summary.columns), keep_parents=True)
    cells = format_cells(counts, digits=3)
    for heading, names in summary.uncalled.items():
        if heading in summary.columns:
            cells = mark_uncalled(cells, heading, names & cells.keys(), "")
    for parameter in summary.modules.parameters():
        if parameter.name in cells and "parameters" in summary.columns:
            if show_param_shapes:
                cells[parameter.name]["parameters"] = format_shape(parameter.spec.shape)
            else:
                del cells[parameter.name]
    return cells


def _list_rows(cells: Cells, headings: Sequence[str], depth: int) -> list[tuple[str, ...]]:
    children = index_children(cells)
    root, row = _skip_single_children("", cells, children)
    rows = [_indent(0, root or "model", row, headings)]
    # What all names share says nothing, so it is left off.
    prefix = f"{root}." if root else ""
    waiting = [(child, 1) for child in reversed(children.get(root, ()))]
    while waiting:
        name, level = waiting.pop()
        if level > depth:
            continue
        name, row = _skip_single_children(name, cells, children)
        rows.append(_indent(level, name.removeprefix(prefix), row, headings))
        waiting += [(child, level + 1) for child in reversed(children.get(name, ()))]
    return rows


def _skip_single_children(
    name: str, cells: Cells, children: Mapping[str, Sequence[str]]
) -> tuple[str, Mapping[str, str]]:
    # A module with one child that says the same shares its row, under the child's name; and so on downward.
    row = cells[name]
    while len(below := children.get(name, ())) == 1:
        combined = _combine(row, cells[below[0]])
        if combined is None:
            break
        name, row = below[0], combined
    return name, row


def _combine(upper: Mapping[str, str], lower: Mapping[str, str]) -> dict[str, str] | None:
    if upper.keys() != lower.keys():
        return None
    if any(text and lower[heading] and text != lower[heading] for heading, text in upper.items()):
        return None
    return {heading: text or lower[heading] for heading, text in upper.items()}


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
