"""Rows of the table by module: modules and parameters with their levels and cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fvflops.trace import Summary
from fvflops.units import format_shape
from fvflops.views.ranking import rank
from fvflops.views.summary_rows import drop_zeros, format_cells, group_by_name, index_children, mark_uncalled

_DEFAULT_DEPTH = 3  # the max_depth that fvcore's flop_count_table has by default

Cells = Mapping[str, Mapping[str, str]]


class Line(NamedTuple):
    """A row for a module or parameter, with heading → text in `cells`.

    A chain of single children with equal cells shares one row: `chain` has the names of all, `name` is the last of
    them. `above` is the name of the parent row, "" for the first row, whose level is 0.
    """

    level: int
    name: str
    above: str
    cells: Mapping[str, str]
    chain: tuple[str, ...]


def list_lines(
    summary: Summary,
    *,
    depth: int | None = None,
    show_param_shapes: bool = True,
    sort: str | None = None,
    top: int | None = None,
) -> list[Line]:
    """Return the rows of a summary in the order of the model, `depth` levels below the first, 3 if None.

    Modules without any count are dropped. `show_param_shapes` adds a row with the shape of each parameter. With `sort`
    or `top`, which are passed to `rank`, modules of all levels, or of `depth` levels, are one list on level 0.
    """
    if sort is None and top is None:
        return _list_lines(summary, _prepare(summary, show_param_shapes), limit_depth(depth))
    lines = _list_lines(summary, _prepare(summary, False), depth)
    return rank(
        [line._replace(level=0, above="") for line in lines if line.name in summary.modules.by_name],
        list(summary.columns),
        count=lambda line, heading: count_line(summary, line, heading),
        name=lambda line: line.name,
        sort=sort,
        top=top,
    )


def limit_depth(depth: int | None) -> int:
    """Return the number of levels shown below the root, 3 if None."""
    return _DEFAULT_DEPTH if depth is None else depth


def count_line(summary: Summary, line: Line, heading: str) -> int:
    """Return the exact count of a row: the largest in its chain, as uncalled modules have none."""
    column = summary.columns[heading]
    return max(column.get(name, 0) for name in line.chain)


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


def _list_lines(summary: Summary, cells: Cells, depth: int | None) -> list[Line]:
    children = index_children(cells)
    chain, row = _skip_single_children("", cells, children, summary.labels)
    root = chain[-1]
    lines = [Line(0, root, "", row, chain)]
    pending = [(child, 1, root) for child in reversed(children.get(root, ()))]
    while pending:
        name, level, above = pending.pop()
        if depth is not None and level > depth:
            continue
        chain, row = _skip_single_children(name, cells, children, summary.labels)
        name = chain[-1]
        lines.append(Line(level, name, above, row, chain))
        pending += [(child, level + 1, name) for child in reversed(children.get(name, ()))]
    return lines


def _skip_single_children(
    name: str, cells: Cells, children: Mapping[str, Sequence[str]], labels: Mapping[str, str]
) -> tuple[tuple[str, ...], Mapping[str, str]]:
    # A module with one child whose cells are equal shares its row, under the child's name, and so on downward; but a
    # row of repeated layers does not share the rows of its first layer.
    chain, row = [name], cells[name]
    while name not in labels and len(only := children.get(name, ())) == 1:
        combined = _combine(row, cells[only[0]])
        if combined is None:
            break
        name, row = only[0], combined
        chain.append(name)
    return tuple(chain), row


def _combine(upper: Mapping[str, str], lower: Mapping[str, str]) -> dict[str, str] | None:
    if upper.keys() != lower.keys():
        return None
    if any(text and lower[heading] and text != lower[heading] for heading, text in upper.items()):
        return None
    return {heading: text or lower[heading] for heading, text in upper.items()}
