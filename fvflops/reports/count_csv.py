"""CSV: exact numbers for spreadsheets and data frames."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from types import SimpleNamespace

from fvflops.reports.document import Value
from fvflops.reports.escaping import neutralise_formula, printable
from fvflops.trace import Summary
from fvflops.views.frame import list_rows


def render(
    summary: Summary, *, by: str = "module", depth: int | None = None, sort: str | None = None, top: int | None = None
) -> str:
    """Return the summary as CSV text with a header line; the root module is named "".

    By module: module, class, a column for each metric of the summary, and "yes" or "no" for whether it was called. By
    operator: operator and the metrics; with by="both": module, operator and the metrics. Counts of a module include its
    submodules. `depth` is the number of levels listed below the root, None for all; by operator it is ignored. With
    `sort` or `top` the rows are sorted, by a metric in descending order or by "name" in natural order, and the first
    `top` are listed. Lines end with "\\n". A name that a spreadsheet would read as a formula has an apostrophe in
    front; unprintable characters are escaped. An unknown `by` or `sort` raises ValueError.
    """
    return write_rows(*list_rows(summary, by=by, depth=depth, sort=sort, top=top, report="the CSV report"))


def write_rows(headings: Sequence[str], rows: Iterable[Sequence[Value]]) -> str:
    """Return a header and rows as CSV text, escaped as in `render`; None is an empty cell.

    >>> write_rows(["op", "flops"], [["aten::mm", 24], ["mylib::scan", None]])
    'op,flops\\naten::mm,24\\nmylib::scan,\\n'
    """
    lines: list[str] = []
    # Before Python 3.13 a lone "\r" in a cell is quoted only if the line terminator has one, so it is removed later.
    writer = csv.writer(SimpleNamespace(write=lines.append), lineterminator="\r\n")
    for row in (headings, *rows):
        writer.writerow(_to_text(cell) for cell in row)
    return "".join(line.removesuffix("\r\n") + "\n" for line in lines)


def _to_text(cell: Value) -> Value:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    # CSV is also read on terminals and by line-based tools; the JSON report has unescaped names.
    return neutralise_formula(printable(cell)) if isinstance(cell, str) else cell
