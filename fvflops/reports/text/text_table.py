"""Tables of plain text, with left- and right-aligned columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fvflops.reports.text.display_width import display_width, pad

GAP = "  "


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """Return a table in which the columns with the indexes `left` are left-aligned, the others right-aligned.

    >>> print(text_table(("module", "time"), [("model", "12 ms"), (" fc", "3 ms")]))
    module   time
    ------  -----
    model   12 ms
     fc      3 ms
    """
    widths = [max(map(display_width, column)) for column in zip(headers, *rows, strict=True)]
    lines = [headers, ["-" * width for width in widths], *rows]
    return "\n".join(_write(line, widths, left) for line in lines)


def _write(cells: Sequence[str], widths: Sequence[int], left: Collection[int]) -> str:
    padded = [
        pad(cell, width, right=index not in left) for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return GAP.join(padded).rstrip()
