"""Tables of exact numbers, for CSV, a dict of columns and a pandas data frame."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from fvflops.trace import ModuleInfo, Summary
from fvflops.views.summary_rows import (
    check_view,
    list_operator_headings,
    rank_modules,
    rank_operators,
    rank_operators_by_module,
)

if TYPE_CHECKING:
    import pandas

# None is an unknown number.
Cell = str | int | bool | None


class Table(NamedTuple):
    """Headings, and rows with a cell for each heading; the root module is named ""."""

    headings: list[str]
    rows: list[list[Cell]]


def list_rows(
    summary: Summary,
    *,
    by: str = "module",
    depth: int | None = None,
    sort: str | None = None,
    top: int | None = None,
    report: str = "a list",
) -> Table:
    """Return the exact numbers of a summary, by module, by operator or by="both".

    By module: module, class, a count for each metric of the summary, and whether it was called; by operator: operator
    and its counts; with by="both": module, operator and its counts. Counts of a module include its submodules. `depth`
    is the number of levels listed below the root, None for all; by operator it is ignored. With `sort` or `top` the
    rows are sorted, by a metric in descending order or by "name" in natural order, and the first `top` are listed. An
    unknown `by` or `sort` raises ValueError; `report` is the subject of the message on `by`.

    >>> from fvflops.trace import ModuleInfo, ModuleTree
    >>> list_rows(Summary(ModuleTree({"": ModuleInfo("", "", "Net")}), {"flops": {"": 12}}))
    Table(headings=['module', 'class', 'flops', 'called'], rows=[['', 'Net', 12, True]])
    """
    check_view(by, report=report)
    if by == "module":
        modules = rank_modules(summary, depth=depth, sort=sort, top=top)[:top]
        return Table(["module", "class", *summary.columns, "called"], _list_modules(summary, modules))
    headings = list_operator_headings(summary)
    if by == "operator":
        ranked = rank_operators(summary, sort=sort, top=top)[:top]
        return Table(["operator", *headings], [[row.operator, *row.counts] for row in ranked])
    ranked = rank_operators_by_module(summary, depth=depth, sort=sort, top=top)[:top]
    return Table(
        ["module", "operator", *headings], [[summary.label(row.module), row.operator, *row.counts] for row in ranked]
    )


def make_columns(table: Table) -> dict[str, list[Cell]]:
    """Return heading → the cells of its column.

    >>> make_columns(Table(["op", "flops"], [["mm", 24], ["relu", 8]]))
    {'op': ['mm', 'relu'], 'flops': [24, 8]}
    """
    return {heading: [row[index] for row in table.rows] for index, heading in enumerate(table.headings)}


def make_frame(table: Table, about: Mapping[str, str]) -> pandas.DataFrame:
    """Return a data frame with `about` in its `attrs`; without pandas it raises ImportError."""
    pandas = import_pandas()
    # Without dtype=object pandas would convert a column with unknown numbers to floats.
    columns = {
        heading: pandas.Series(cells, dtype="object" if None in cells else None)
        for heading, cells in make_columns(table).items()
    }
    frame: Any = pandas.DataFrame(columns)
    frame.attrs.update(about)
    return frame


def import_pandas() -> ModuleType:
    """Return the module pandas; if it is not installed, raise ImportError with the remedy."""
    try:
        return importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise  # pandas is installed, but one of its dependencies is missing
        raise ImportError("pandas is not installed: pip install 'fvflops[pandas]', or use to_dict()") from None


def _list_modules(summary: Summary, modules: Sequence[ModuleInfo]) -> list[list[Cell]]:
    uncalled = frozenset().union(*summary.uncalled.values())
    rows: list[list[Cell]] = []
    for module in modules:
        counts = [column.get(module.name, 0) for column in summary.columns.values()]
        rows.append([summary.label(module.name), module.class_name, *counts, module.name not in uncalled])
    return rows
