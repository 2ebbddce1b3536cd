"""Plain text for a terminal, in lines of at most a given width."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from fvflops.reports.document import Chart, Column, Command, Document, Gantt, Items, Part, Scatter, Table
from fvflops.reports.escaping import printable, printable_short
from fvflops.reports.text.display_width import display_width, truncate_middle, wrap
from fvflops.reports.text.text_picture import text_picture
from fvflops.reports.text.text_table import GAP, text_table

_PROSE_WIDTH = 100  # longest line of a sentence if no width is given
# Text columns are truncated to the first width before optional columns are dropped, to the second before others are.
_OPTIONAL_WIDTH = 20
_MIN_WIDTH = 12
_TOTAL = "total"


def write(document: Document, *, width: int | None = None) -> str:
    """Return a document as text; in a table that is too wide text is truncated and columns are dropped, with a note.

    >>> from fvflops.reports.document import module_column, number_column
    >>> rows = [("", 72, 18), ("fc1", 24, 6), ("fc2", 48, 12)]
    >>> columns = module_column(), number_column("flops", "FLOPs"), number_column("bytes")
    >>> table = Table("modules", columns, rows, title="By module")
    >>> print(write(Document("plan", "Net", [table, "Counted by exact."])))
    Net
    <BLANKLINE>
    By module
    module  FLOPs  bytes
    ------  -----  -----
    model      72     18
     fc1       24      6
     fc2       48     12
    <BLANKLINE>
    Counted by exact.
    """
    blocks = [_write_lines(document.title, width)] if document.title else []
    blocks += [_write_part(part, width) for part in document.parts]
    return "\n\n".join(block for block in blocks if block)


def _write_part(part: Part, width: int | None) -> str:
    if isinstance(part, Table):
        return _write_table(part, width)
    if isinstance(part, (Chart, Gantt, Scatter)):
        title = [_write_lines(part.title, width)] if part.title else []
        drawn = text_picture(part, width=width)
        return "\n".join([*title, drawn, *(_write_lines(note, width) for note in part.notes)])
    if isinstance(part, Items):
        heading = [_write_lines(part.heading, width)] if part.heading else []
        indent = "  " if heading else ""
        return "\n".join([*heading, *(_write_lines(item, width, indent, "  ") for item in part.items)])
    if isinstance(part, Command):
        return "\n".join([_write_lines(part.heading, width), *_break_command(part.command, width or _PROSE_WIDTH)])
    return _write_lines(part, width)


def _break_command(command: str, width: int) -> list[str]:
    """Return the lines of a shell command, broken before its options.

    >>> _break_command("fvflops plan net.py:build --device 'H100 SXM' --batch 2", 38)
    ['  fvflops plan net.py:build \\\\', "    --device 'H100 SXM' --batch 2"]
    """
    parts: list[str] = []
    for word in map(shlex.quote, shlex.split(command)):
        parts[-1:] = [*parts[-1:], word] if word.startswith("--") or not parts else [f"{parts[-1]} {word}"]
    lines = [" "]
    for word in parts:
        if display_width(f"{lines[-1]} {word} \\") > width and lines[-1].strip():
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    return lines


def _write_lines(text: str, width: int | None, indent: str = "", hanging: str = "") -> str:
    """Wrap text to a width; `hanging` indents all lines of a paragraph but its first."""
    limit = (width or _PROSE_WIDTH) - len(indent) - len(hanging)
    paragraphs = [wrap(printable(paragraph), limit) for paragraph in text.split("\n")]
    return "\n".join(
        indent + (hanging if index else "") + line for lines in paragraphs for index, line in enumerate(lines)
    )


def _write_table(table: Table, width: int | None) -> str:
    rows = [[_show(cell) for cell in row] for row in table.indented()]
    indexes = list(range(len(table.columns))) if width is None else _choose_columns(table, rows, width)
    columns = [table.columns[index] for index in indexes]
    lines = [[column.heading for column in columns], *([row[index] for index in indexes] for row in rows)]
    if table.total is not None and _TOTAL in table.total and _TOTAL not in lines[-1]:
        lines[-1] = _label_total(lines[-1], columns)
    headings, *cells = lines if width is None else _shorten(lines, columns, width)
    hidden = [column.heading for index, column in enumerate(table.columns) if index not in indexes]
    return "\n".join(
        [
            *([_write_lines(table.title, width)] if table.title else []),
            text_table(headings, cells, left=[index for index, column in enumerate(columns) if column.is_text]),
            *(_write_lines(note, width) for note in (*table.notes, *hidden_columns_note(hidden, width))),
        ]
    )


def _label_total(cells: list[str], columns: Sequence[Column]) -> list[str]:
    """Return the cells of the total with its label, whose column is hidden, in the first text column."""
    first = next((index for index, column in enumerate(columns) if column.is_text), None)
    return cells if first is None else [*cells[:first], _TOTAL, *cells[first + 1 :]]


def hidden_columns_note(headings: Sequence[str], width: int | None) -> list[str]:
    """Return a sentence that names the columns hidden at a width, [] for none.

    >>> hidden_columns_note(["bytes", "share"], 40)
    ['Columns hidden at width 40: bytes, share.']
    """
    return [f"Columns hidden at width {width}: {', '.join(headings)}."] if headings else []


def _show(text: str) -> str:
    name = text.lstrip(" ")
    return text[: len(text) - len(name)] + printable_short(name)


def _choose_columns(table: Table, rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the indexes of the columns that fit with truncated text.

    Columns with a `hide_order` are dropped first, then numbers, then text, from the right. The column by which rows are
    sorted is never dropped.
    """
    indexes = list(range(len(table.columns)))
    widths = _measure_columns(table, rows, width, _OPTIONAL_WIDTH)
    optional = sorted(
        (index for index in indexes if table.columns[index].hide_order and table.columns[index].key != table.sort),
        key=lambda index: (table.columns[index].hide_order, index),
    )
    while optional and _total_width([widths[index] for index in indexes]) > width:
        indexes.remove(optional.pop())
    widths = _measure_columns(table, rows, width, _MIN_WIDTH)
    while len(indexes) > 1 and _total_width([widths[index] for index in indexes]) > width:
        removable = [index for index in indexes if table.columns[index].key != table.sort]
        numbers = [index for index in removable if not table.columns[index].is_text]
        indexes.remove(numbers[-1] if len(numbers) > 1 else removable[-1])
    return indexes


def _measure_columns(table: Table, rows: Sequence[Sequence[str]], width: int, text_limit: int) -> list[int]:
    """Return the width of each column in cells, with text truncated to `text_limit`."""
    widths = []
    for index, column in enumerate(table.columns):
        widest = max((display_width(row[index]) for row in rows), default=0)
        limit = max(text_limit, width // 3) if column.shorten_last else text_limit
        widths.append(max(min(widest, limit) if column.is_text else widest, display_width(column.heading)))
    return widths


def _total_width(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _shorten(lines: list[list[str]], columns: Sequence[Column], width: int) -> list[list[str]]:
    """Return the lines with text truncated in the middle, the widest column first, until they fit."""
    text_columns = [index for index, column in enumerate(columns) if column.is_text]
    widths = [max(map(display_width, cells)) for cells in zip(*lines, strict=True)]
    while _total_width(widths) > width and text_columns:
        first = [index for index in text_columns if not columns[index].shorten_last and widths[index] > width // 3]
        widest = max(first or text_columns, key=lambda index: widths[index])
        if widths[widest] <= 1:
            break
        widths[widest] -= 1
    return [[truncate_middle(cell, limit) for cell, limit in zip(line, widths, strict=True)] for line in lines]
