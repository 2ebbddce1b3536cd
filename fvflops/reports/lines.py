"""The lines: which modules and parameters the table shows, at which level, and what it says of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fvflops.reports.statistics import drop_zeros, format_cells, group_by_name, index_children, mark_uncalled
from fvflops.trace import Summary
from fvflops.units import format_shape

DEPTH = 3  # the max_depth that fvcore's flop_count_table has by default

Cells = Mapping[str, Mapping[str, str]]


class Line(NamedTuple):
    """A module or parameter of the table, with a text for each heading that says something of it.

    `name` is its dotted name, that of the last where a chain of single children shares the line; `above` is the name
    of the line that it stands below, "" for the first line, whose level is 0.
    """

    level: int
    name: str
    above: str
    cells: Mapping[str, str]


def list_lines(summary: Summary, *, depth: int | None = None, show_param_shapes: bool = True) -> list[Line]:
    """Return the lines of a summary in the order of the model, `depth` levels below the first, 3 if None.

    Modules that count nothing are left out. `show_param_shapes` adds a line with the shape of each parameter.
    """
    return _list_lines(_prepare(summary, show_param_shapes), DEPTH if depth is None else depth)


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


def _list_lines(cells: Cells, depth: int) -> list[Line]:
    children = index_children(cells)
    root, row = _skip_single_children("", cells, children)
    lines = [Line(0, root, "", row)]
    waiting = [(child, 1, root) for child in reversed(children.get(root, ()))]
    while waiting:
        name, level, above = waiting.pop()
        if level > depth:
            continue
        name, row = _skip_single_children(name, cells, children)
        lines.append(Line(level, name, above, row))
        waiting += [(child, level + 1, name) for child in reversed(children.get(name, ()))]
    return lines


def _skip_single_children(
    name: str, cells: Cells, children: Mapping[str, Sequence[str]]
) -> tuple[str, Mapping[str, str]]:
    # A module with one child that says the same shares its line, under the child's name; and so on downward.
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
