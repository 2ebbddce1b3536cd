"""A table of source lines, with the cost of the op calls that each makes."""

from __future__ import annotations

from collections.abc import Sequence

from fvflops.reports.calls.op_call_table import data_column
from fvflops.reports.document import Table, number_column, text_column
from fvflops.trace.calls import LineCount
from fvflops.units import format_percent, format_thousands
from fvflops.views.call_rows import list_line_rows

_NO_LINE = "(outside the model's code)"


def line_table(lines: Sequence[LineCount]) -> Table:
    """Return a row for each source line, in the given order.

    >>> lines = [LineCount("net.py:12", 2, 48, 24, 12, 160, 0), LineCount("net.py:9", 1, 16, 8, 4, 80, 0)]
    >>> from fvflops.reports.document import Document
    >>> from fvflops.reports.formats import write_document
    >>> print(write_document(Document("calls", parts=[line_table(lines)])))
    line       op calls  FLOPs  share  acts  bytes
    ---------  --------  -----  -----  ----  -----
    net.py:12         2     48  75.0%    12    160
    net.py:9          1     16  25.0%     4     80
    """
    total = sum(line.flops for line in lines)
    headings, rows = list_line_rows(lines)
    columns = {
        "line": text_column("line", form=lambda line: line or _NO_LINE),
        "calls": number_column("calls", "op calls", form=format_thousands),
        "flops": number_column("flops", "FLOPs", form=format_thousands),
        "share": number_column("share", form=lambda flops: format_percent(flops, total), only_for="people"),
        "activations": number_column("activations", "acts", form=format_thousands),
        "bytes": number_column("bytes"),
        "unsupported": number_column(
            "unsupported",
            "unsupported ops",
            form=str,
            only_for="" if any(line.unsupported for line in lines) else "data",
        ),
    }
    after_flops = headings.index("flops") + 1
    return Table(
        "calls",
        [
            columns.get(heading, data_column(heading))
            for heading in (*headings[:after_flops], "share", *headings[after_flops:])
        ],
        [[*row[:after_flops], line.flops, *row[after_flops:]] for row, line in zip(rows, lines, strict=True)],
        noun="line",
    )
