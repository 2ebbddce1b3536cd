"""Lines of the table by module: modules and parameters with their levels and cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fvflops.trace import Summary
from fvflops.units import format_shape
from fvflops.views.ranking import rank
from fvflops.views.summary_rows import drop_zeros, format_cells, group_by_name, index_children, mark_uncalled

_DEPTH = 3  # the max_depth that fvcore's flop_count_table has by default

Cells = Mapping[str, Mapping[str, str]]


class Line(NamedTuple):
    """A module or parameter of the table, with a text for each heading that it has a value for.

    `name` is its dotted name, that of the last where a chain of single children shares the line, `chain` the names of
    all of these; `above` is the name of its parent line, "" for the first line, whose level is 0.
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
    """Return the lines of a summary in the order of the model, `depth` levels below the first, 3 if None.

    Modules without any count are dropped. `show_param_shapes` adds a line with the shape of each parameter. With
    `sort` or `top`, which `rank` takes, modules of all levels, or of `depth` levels, are one list on level 0.
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
    """Return how many levels below the root a tree has, 3 if None."""
    return _DEPTH if depth is None else depth


def count_line(summary: Summary, line: Line, heading: str) -> int:
    """Return the exact number of a line: that of whichever module of its chain has one."""
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
    waiting = [(child, 1, root) for child in reversed(children.get(root, ()))]
    while waiting:
        name, level, above = waiting.pop()
        if depth is not None and level > depth:
            continue
        chain, row = _skip_single_children(name, cells, children, summary.labels)
        name = chain[-1]
        lines.append(Line(level, name, above, row, chain))
        waiting += [(child, level + 1, name) for child in reversed(children.get(name, ()))]
    return lines


def _skip_single_children(
    name: str, cells: Cells, children: Mapping[str, Sequence[str]], labels: Mapping[str, str]
) -> tuple[tuple[str, ...], Mapping[str, str]]:
    # A module with one child that says the same shares its line, under the child's name; and so on downward, but not
    # into what a row of several equal modules shows of the first.
    chain, row = [name], cells[name]
    while name not in labels and len(below := children.get(name, ())) == 1:
        combined = _combine(row, cells[below[0]])
        if combined is None:
            break
        name, row = below[0], combined
        chain.append(name)
    return tuple(chain), row


def _combine(upper: Mapping[str, str], lower: Mapping[str, str]) -> dict[str, str] | None:
    if upper.keys() != lower.keys():
        return None
    if any(text and lower[heading] and text != lower[heading] for heading, text in upper.items()):
        return None
    return {heading: text or lower[heading] for heading, text in upper.items()}
