"""Small tables for `print` and `_repr_html_`, with escaped names and without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from textwrap import fill

from fvflops.text import printable, truncate

# Longer text is truncated to the second length, so that truncation hides a substantial part.
_MAX_LENGTH = 160
_TRUNCATED_LENGTH = 80
_WIDTH = 80  # of plain text
_MAX_CELL = 40  # characters in a column of plain text


def write_text_table(
    caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]], note: str = "", text_columns: int = 1
) -> str:
    """Return the table of `write_notebook_table` as text of 80 columns if there are few columns.

    >>> print(write_text_table("Net", ["Op", "calls"], [["aten::mm", "12"]], note="12 calls"))
    Net
    <BLANKLINE>
    Op        calls
    --------  -----
    aten::mm     12
    <BLANKLINE>
    12 calls
    """
    shown = [[truncate(printable(cell), _MAX_CELL - 1) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *shown, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index < text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (headings, ["-" * width for width in widths], *shown)
    ]
    return "\n\n".join(filter(None, [_fill(caption), "\n".join(lines), _fill(note)]))


def _fill(text: str) -> str:
    return fill(printable(text), _WIDTH, break_on_hyphens=False)


def write_notebook_table(
    caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]], note: str = "", text_columns: int = 1
) -> str:
    """Return an HTML table whose first columns are text, and the others right-aligned numbers."""
    sides = ["left" if index < text_columns else "right" for index in range(len(headings))]
    head = "".join(
        f'<th style="text-align:{side}">{escape(text)}</th>' for side, text in zip(sides, headings, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f'<td style="text-align:{side}">{_isolate(text)}</td>' for side, text in zip(sides, row, strict=True))
        + "</tr>"
        for row in rows
    )
    table = (
        f'<table><caption style="text-align:left;caption-side:top">{_isolate(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )
    return f"<div>{table}<small>{_isolate(note)}</small></div>" if note else table


def _isolate(text: str) -> str:
    """Return escaped text, truncated, isolated so that its writing direction does not affect the text around it."""
    shown = printable(text)
    if len(shown) <= _MAX_LENGTH:
        return f"<bdi>{escape(shown)}</bdi>"
    return f'<bdi title="{escape(shown)}">{escape(shown[:_TRUNCATED_LENGTH])}…</bdi>'
