"""Plain text for a terminal, in lines of at most a given width."""

from __future__ import annotations

from collections.abc import Sequence

from fvflops.reports.document import Document, Items, Part, Table
from fvflops.reports.names import printable, printable_short
from fvflops.reports.text.display_width import display_width, truncate_middle, wrap
from fvflops.reports.text.text_table import GAP, text_table
from fvflops.units import format_quantity

_PROSE = 100  # the longest line of a sentence where there is no other limit
_SHORTEST = 12  # what a column of words is cut to before columns are left out
_LONG = 20  # what it is cut to before optional columns are left out


def write(document: Document, *, width: int | None = None) -> str:
    """Return a document as text; a table too wide has its words shortened, then loses columns, and says so.

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
    if isinstance(part, Items):
        heads = [_write_lines(part.heading, width)] if part.heading else []
        return "\n".join([*heads, *(_write_lines(item, width, "  " if heads else "", "  ") for item in part.items)])
    return _write_lines(part, width)


def _write_lines(text: str, width: int | None, indent: str = "", hanging: str = "") -> str:
    """Return text in lines of at most a width; `hanging` indents all lines of a paragraph but its first."""
    limit = (width or _PROSE) - len(indent) - len(hanging)
    paragraphs = [wrap(printable(paragraph), limit) for paragraph in text.split("\n")]
    return "\n".join(
        indent + (hanging if place else "") + line for lines in paragraphs for place, line in enumerate(lines)
    )


def _write_table(table: Table, width: int | None) -> str:
    rows = [[_show(cell) for cell in row] for row in table.indented()]
    places = list(range(len(table.columns))) if width is None else _choose_columns(table, rows, width)
    lines = [[column.heading for column in table.columns], *rows]
    cells = [[line[place] for place in places] for line in lines]
    left = [index for index, place in enumerate(places) if table.columns[place].is_text]
    kept = [index for index, place in enumerate(places) if table.columns[place].shorten_last]
    heads, *cells = cells if width is None else _shorten(cells, left, width, kept=kept)
    dropped = [column.heading for place, column in enumerate(table.columns) if place not in places]
    missing = [f"No room in {format_quantity(width or 0, 'column')} for {', '.join(dropped)}."] if dropped else []
    return "\n".join(
        [
            *([_write_lines(table.title, width)] if table.title else []),
            text_table(heads, cells, left=left),
            *(_write_lines(note, width) for note in (*table.notes, *missing)),
        ]
    )


def _show(text: str) -> str:
    name = text.lstrip(" ")
    return text[: len(text) - len(name)] + printable_short(name)


def _choose_columns(table: Table, rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the places of the columns that fit with their words cut.

    Optional columns go first, then those of numbers, then others, the last of each first. That by which rows are ranked
    stays.
    """
    places = list(range(len(table.columns)))
    needs = _measure(table, rows, width, _LONG)
    optional = sorted(
        (place for place in places if table.columns[place].optional and table.columns[place].key != table.sort),
        key=lambda place: (table.columns[place].optional, place),
    )
    while optional and _add_up([needs[place] for place in places]) > width:
        places.remove(optional.pop())
    needs = _measure(table, rows, width, _SHORTEST)
    while len(places) > 1 and _add_up([needs[place] for place in places]) > width:
        spare = [place for place in places if table.columns[place].key != table.sort]
        numbers = [place for place in spare if not table.columns[place].is_text]
        places.remove(numbers[-1] if len(numbers) > 1 else spare[-1])
    return places


def _measure(table: Table, rows: Sequence[Sequence[str]], width: int, longest: int) -> list[int]:
    """Return the cells that each column needs, those of words cut to the longest."""
    needs = []
    for place, column in enumerate(table.columns):
        need = max((display_width(row[place]) for row in rows), default=0)
        limit = max(longest, width // 3) if column.shorten_last else longest
        needs.append(max(min(need, limit) if column.is_text else need, display_width(column.heading)))
    return needs


def _add_up(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _shorten(lines: list[list[str]], words: Sequence[int], width: int, *, kept: Sequence[int]) -> list[list[str]]:
    """Return the lines with the widest of the columns of words cut in their middle until they fit, `kept` ones last."""
    widths = [max(map(display_width, column)) for column in zip(*lines, strict=True)]
    while _add_up(widths) > width and words:
        first = [place for place in words if place not in kept and widths[place] > width // 3]
        widest = max(first or words, key=lambda place: widths[place])
        if widths[widest] <= 1:
            break
        widths[widest] -= 1
    return [[truncate_middle(cell, limit) for cell, limit in zip(line, widths, strict=True)] for line in lines]
