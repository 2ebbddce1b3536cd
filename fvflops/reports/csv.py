"""The CSV report: exact numbers for spreadsheets and data frames."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from types import SimpleNamespace

from fvflops.reports.names import neutralise_formula
from fvflops.reports.statistics import (
    check_view,
    depth_of,
    list_operator_headings,
    rank_operators,
    rank_operators_by_module,
)
from fvflops.trace import Summary


def render(summary: Summary, *, by: str = "module", depth: int | None = None) -> str:
    """Return the summary as CSV text, a line of headings first; the whole model is the module named "".

    By module: module, class, a column for each heading, and "yes" or "no" for whether it was called. By operator:
    operator and the headings; by both: module, operator and the headings, what is below the module included. `depth`
    is how many modules below the root are listed, all if None; by operator it is ignored. Lines end with "\\n". A name
    that a spreadsheet would take for a formula has an apostrophe in front. An unknown view raises ValueError.
    """
    check_view(by, report="the CSV report")
    if by == "module":
        return _write([["module", "class", *summary.columns, "called"], *_list_modules(summary, depth)])
    headings = list_operator_headings(summary)
    rows: list[list[str | int]]
    if by == "operator":
        rows = [[row.operator, *row.counts] for row in rank_operators(summary)]
        return _write([["operator", *headings], *rows])
    rows = [[row.module, row.operator, *row.counts] for row in rank_operators_by_module(summary, depth=depth)]
    return _write([["module", "operator", *headings], *rows])


def _list_modules(summary: Summary, depth: int | None) -> Iterable[list[str | int]]:
    uncalled = frozenset().union(*summary.uncalled.values())
    for place in summary.modules.modules():
        if depth is None or depth_of(place.name) <= depth:
            counts = [column.get(place.name, 0) for column in summary.columns.values()]
            yield [place.name, place.class_name, *counts, "no" if place.name in uncalled else "yes"]


def _write(rows: Iterable[Sequence[str | int]]) -> str:
    lines: list[str] = []
    # Before Python 3.13 a lone "\r" in a cell is quoted only if the line ends with one, so lines are cut afterwards.
    writer = csv.writer(SimpleNamespace(write=lines.append), lineterminator="\r\n")
    for row in rows:
        writer.writerow(_clean(cell) if isinstance(cell, str) else cell for cell in row)
    return "".join(line.removesuffix("\r\n") + "\n" for line in lines)


def _clean(name: str) -> str:
    # A NUL cannot stand in CSV: before Python 3.11 neither the writer nor the reader takes one.
    return neutralise_formula(name).replace("\0", "\\x00")
