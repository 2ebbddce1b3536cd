"""CSV: the exact values of a document's main table."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace

from fvflops.reports.document import Document, Value
from fvflops.reports.escaping import neutralise_formula, printable


def write(document: Document, *, width: int | None = None) -> str:
    """Return the main table as CSV without its total; an unknown value is an empty cell."""
    table = document.main_table()
    return write_rows([column.key for column in table.columns], table.rows)


def write_rows(headings: Sequence[str], rows: Iterable[Sequence[Value]]) -> str:
    """Return a header and rows as CSV text.

    Lines end with "\\n"; None is an empty cell, and a bool "yes" or "no". A name that a spreadsheet would read as a
    formula has an apostrophe in front; unprintable characters are escaped.
    """
    return "".join(write_lines(map(_to_text, row) for row in (headings, *rows)))


def write_lines(rows: Iterable[Iterable[Value]]) -> Iterator[str]:
    """Return the lines of rows as they are."""
    lines: list[str] = []
    # Before Python 3.13 a lone "\r" in a cell is quoted only if the line terminator has one, so it is removed later.
    csv.writer(SimpleNamespace(write=lines.append), lineterminator="\r\n").writerows(rows)
    return (line.removesuffix("\r\n") + "\n" for line in lines)


def _to_text(cell: Value) -> Value:
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    # CSV is also read on terminals and by line-based tools; the JSON report has unescaped names.
    return neutralise_formula(printable(cell)) if isinstance(cell, str) else cell
