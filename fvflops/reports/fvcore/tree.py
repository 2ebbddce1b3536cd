"""The text of `print(model)` with the counts of each module inside, as fvcore's `flop_count_str` writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fvflops.reports.names import printable, printable_short
from fvflops.reports.terminal import op_coverage
from fvflops.trace import ModuleInfo, ModuleTree, Summary
from fvflops.views.summary_rows import (
    check_view,
    check_whole,
    drop_zeros,
    fill_missing,
    format_cells,
    group_by_name,
    mark_uncalled,
)

_LABELS = {"parameters": "#params", "activations": "#acts"}
# fvcore's words, which are part of its format.
_NOTICE = (
    "N/A indicates a possibly missing statistic due to how the module was called. "
    "Missing values are still included in the parent's total."
)


def render(summary: Summary, *, by: str = "module", depth: int | None = None) -> str:
    """Return the summary as a tree of modules, byte for byte that of fvcore's `flop_count_str`, but for names
    that cannot be printed as they are.

    `depth` is how many levels below the root are shown, all if None. A module in which no op was seen has N/A for its
    count. A shared module is shown under each of its names, its counts only under the first. A child that is None is
    shown as None, and a module inside itself as "..."; fvcore fails on both. A view other than by module raises
    ValueError.
    """
    check_view(by, views=("module",), report="the tree")
    check_whole(summary, "the tree")
    cells = _prepare(summary)
    lines = [_NOTICE] if any(summary.uncalled.get(heading) for heading in summary.columns) else []
    return "\n".join([*lines, *draw_tree(summary.modules, lambda place: _list_details(place, cells), depth=depth)])


def render_covered(summary: Summary, **options: Any) -> str:
    """Return what `render` does, and below it which op calls are counted."""
    return f"{render(summary, **options)}\n\n{op_coverage.render(summary)}"


def draw_tree(
    modules: ModuleTree, describe: Callable[[ModuleInfo], list[str]], *, depth: int | None = None
) -> list[str]:
    """Return the lines of a model as `print` shows it, with the lines that `describe` returns for each module inside.

    >>> print("\\n".join(draw_tree(ModuleTree({"": ModuleInfo("", "", "Net")}), lambda place: ["one", "two"])))
    Net(
      one
      two
    )
    """
    lines: list[str] = []
    # Pending output, last first: finished text, or a module with its level and the text in front of it.
    waiting: list[str | tuple[ModuleInfo, int, str]] = [(modules.root, 0, "")]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            lines.append(item)
            continue
        place, level, opening = item
        blanks = "  " * level
        details = [printable(detail) for detail in describe(place)]
        opening += printable_short(place.class_name) + "("
        children = place.children if depth is None or level < depth else ()
        if not children and len(details) <= 1:
            lines.append(opening + "".join(details) + ")")
            continue
        lines.append(opening)
        lines += [f"{blanks}  {detail}" for detail in details]
        waiting.append(blanks + ")")
        for attribute, path in reversed(children):
            key = f"{blanks}  ({printable_short(attribute)}): "
            child = modules.by_name.get(path) if path is not None else None
            if child is not None:
                waiting.append((child, level + 1, key))
            else:
                waiting.append(key + ("None" if path is None else "..."))
    return lines


def _prepare(summary: Summary) -> dict[str, dict[str, str]]:
    names = [place.name for place in summary.modules.modules()]
    uncalled = {heading: summary.uncalled[heading] for heading in summary.columns if heading in summary.uncalled}
    counts = drop_zeros(group_by_name(fill_missing(summary.columns, names)), keep=frozenset().union(*uncalled.values()))
    cells = format_cells(counts, digits=2)
    for heading, modules in uncalled.items():
        cells = mark_uncalled(cells, heading, modules, "N/A")
    return cells


def _list_details(place: ModuleInfo, cells: Mapping[str, Mapping[str, str]]) -> list[str]:
    details = place.extra_repr.split("\n") if place.extra_repr else []
    row = cells.get(place.name)
    if row:
        details.append(", ".join(f"{_LABELS.get(heading, f'#{heading}')}: {text}" for heading, text in row.items()))
    return details
