"""The text of `print(model)` with the counts of each module, in the format of fvcore's `flop_count_str`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fvflops.reports.escaping import printable, printable_short
from fvflops.reports.terminal import op_coverage
from fvflops.trace import ModuleInfo, ModuleTree, Summary
from fvflops.views.summary_rows import (
    check_not_collapsed,
    check_view,
    drop_zeros,
    group_by_name,
    write_cells,
)

_LABELS = {"parameters": "#params", "activations": "#acts"}
# fvcore's text, which is part of its format.
_NOTICE = (
    "N/A indicates a possibly missing statistic due to how the module was called. "
    "Missing values are still included in the parent's total."
)


def write_tree(summary: Summary, *, by: str = "module", depth: int | None = None) -> str:
    """Return the summary as a tree of modules; it equals that of fvcore's `flop_count_str` byte for byte, except that
    unprintable names are escaped.

    `depth` is the number of levels shown below the root, None for all. A module in which no op ran has the count N/A. A
    shared module is shown under each of its names, with counts only under the first. A child that is None is shown as
    None, and a module inside itself as "..."; fvcore fails on both. A `by` other than "module" raises ValueError.
    """
    check_view(by, views=("module",), report="the tree")
    check_not_collapsed(summary, "the tree")
    cells = _prepare(summary)
    lines = [_NOTICE] if any(summary.uncalled.get(heading) for heading in summary.columns) else []
    return "\n".join([*lines, *draw_tree(summary.modules, lambda module: _list_details(module, cells), depth=depth)])


def write_covered_tree(summary: Summary, **options: Any) -> str:
    """Return the tree of `write_tree` with the coverage of the count below."""
    return f"{write_tree(summary, **options)}\n\n{op_coverage.render(summary)}"


def draw_tree(
    modules: ModuleTree, describe: Callable[[ModuleInfo], list[str]], *, depth: int | None = None
) -> list[str]:
    """Return the lines of `print(model)`, with the lines that `describe` returns for each module."""
    lines: list[str] = []
    # Stack of pending output, next last: a finished line, or a module with its level and the text in front of it.
    pending: list[str | tuple[ModuleInfo, int, str]] = [(modules.root, 0, "")]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            lines.append(item)
            continue
        module, level, opening = item
        blanks = "  " * level
        details = [printable(detail) for detail in describe(module)]
        opening += printable_short(module.class_name) + "("
        children = module.children if depth is None or level < depth else ()
        if not children and len(details) <= 1:
            lines.append(opening + "".join(details) + ")")
            continue
        lines.append(opening)
        lines += [f"{blanks}  {detail}" for detail in details]
        pending.append(blanks + ")")
        for attribute, path in reversed(children):
            key = f"{blanks}  ({printable_short(attribute)}): "
            child = modules.by_name.get(path) if path is not None else None
            if child is not None:
                pending.append((child, level + 1, key))
            else:
                pending.append(key + ("None" if path is None else "..."))
    return lines


def _prepare(summary: Summary) -> dict[str, dict[str, str]]:
    zeros = dict.fromkeys((module.name for module in summary.modules.modules()), 0)
    columns = {heading: {**zeros, **column} for heading, column in summary.columns.items()}
    uncalled = frozenset().union(*(summary.uncalled.get(heading, ()) for heading in summary.columns))
    return write_cells(summary, drop_zeros(group_by_name(columns), except_for=uncalled), digits=2, mark="N/A")


def _list_details(module: ModuleInfo, cells: Mapping[str, Mapping[str, str]]) -> list[str]:
    details = module.extra_repr.split("\n") if module.extra_repr else []
    row = cells.get(module.name)
    if row:
        details.append(", ".join(f"{_LABELS.get(heading, f'#{heading}')}: {text}" for heading, text in row.items()))
    return details
