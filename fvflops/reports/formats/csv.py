"""CSV: the exact values of a document's main table."""

from __future__ import annotations

from fvflops.reports.count_csv import write_rows
from fvflops.reports.document import Document


def write(document: Document, *, width: int | None = None) -> str:
    """Return the main table as CSV without its total; an unknown value is an empty cell.

    >>> from fvflops.reports.document import Table, module_column, number_column
    >>> table = Table("modules", (module_column(), number_column("flops", "FLOPs")), [("", 72)])
    >>> print(write(Document("plan", "Net", [table])))
    module,flops
    ,72
    <BLANKLINE>
    """
    table = document.main_table()
    return write_rows([column.key for column in table.columns], table.rows)
