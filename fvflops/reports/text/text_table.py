"""The columns: a table for the terminal, names on the left, figures at the right edge of their columns."""

from __future__ import annotations

from collections.abc import Sequence

from fvflops.reports.text.display_width import display_width, pad

GAP = "  "


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return the rows below their headers; the first `left` columns begin at their left edge.

    >>> print(text_table(("module", "time"), [("model", "12 ms"), (" fc", "3 ms")]))
    module   time
    ------  -----
    model   12 ms
     fc      3 ms
    """
    widths = [max(map(display_width, column)) for column in zip(headers, *rows, strict=True)]
    lines = [headers, ["-" * width for width in widths], *rows]
    return "\n".join(_write(line, widths, left) for line in lines)


def _write(cells: Sequence[str], widths: Sequence[int], left: int) -> str:
    padded = [
        pad(cell, width, right=index >= left) for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return GAP.join(padded).rstrip()
