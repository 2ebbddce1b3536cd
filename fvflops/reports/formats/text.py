"""Plain text for a terminal, in lines of at most a given width."""

from __future__ import annotations

import codecs
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from fvflops.reports.display_width import GAP, display_width, pad, text_table, truncate_middle, wrap
from fvflops.reports.document import Chart, Column, Command, Document, Gantt, Items, Part, Scatter, Table
from fvflops.reports.escaping import printable, printable_short
from fvflops.reports.text_picture import text_picture

_PROSE_WIDTH = 100  # longest line of a sentence if no width is given
# Text columns are truncated to the first width before optional columns are dropped, to the second before others are.
_OPTIONAL_WIDTH = 20
_MIN_WIDTH = 12
_NARROW_WIDTH = 8  # beside bars, before the shares that they show are dropped
_MAX_BAR, _NARROW_BAR, _MIN_BAR = 24, 8, 4  # cells of a bar; beside truncated names it is a narrow one
_BOLD, _DIM, _BARS = "1", "2", "36"
_TONES = {"unsupported": "31", "assumed": "33"}  # red, yellow
_TO_ASCII = str.maketrans({"–": "-", "×": "x", "…": "..."})


class Terminal(NamedTuple):
    """Abilities of an output: lines of a width (None: no limit), colours, and the characters of an encoding."""

    width: int | None
    colour: bool
    encoding: str

    @property
    def is_unicode(self) -> bool:
        return codecs.lookup(self.encoding).name.startswith("utf")

    def printable(self, text: str) -> str:
        if self.is_unicode:
            return printable(text)
        return printable(text).translate(_TO_ASCII).encode(self.encoding, "backslashreplace").decode(self.encoding)

    def paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.colour and text and code else text


def write(document: Document, *, width: int | None = None, colour: bool = False, encoding: str = "utf-8") -> str:
    """Return a document as text; in a table that is too wide text is truncated and columns are dropped, with a note.

    `colour` adds ANSI escape sequences; characters that `encoding` lacks are written in ASCII in tables with bars.

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
    terminal = Terminal(width, colour, encoding)
    blocks = [_write_lines(document.title, width)] if document.title else []
    blocks += [_write_part(part, terminal) for part in document.parts]
    return "\n\n".join(block for block in blocks if block)


def _write_part(part: Part, terminal: Terminal) -> str:
    width = terminal.width
    if isinstance(part, Table):
        return _write_table(part, terminal)
    if isinstance(part, (Chart, Gantt, Scatter)):
        title = [_write_lines(part.title, width)] if part.title else []
        drawn = text_picture(part, width=width)
        return "\n".join([*title, drawn, *(_write_lines(note, width) for note in part.notes)])
    if isinstance(part, Items) and part.tones:
        return _write_sentences(part.items, [_TONES.get(tone, "") for tone in part.tones], terminal)
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
    lines = [line if index == 0 else hanging + line for lines in paragraphs for index, line in enumerate(lines)]
    return "\n".join(indent + line for line in lines)


def _write_sentences(sentences: Sequence[str], tones: Sequence[str], terminal: Terminal) -> str:
    """Return sentences in the colours of their tones, without indentation."""
    painted = []
    for sentence, tone in zip(map(terminal.printable, sentences), tones, strict=True):
        lines = [sentence] if terminal.width is None else wrap(sentence, terminal.width)
        painted += [terminal.paint(line, tone) for line in lines]
    return "\n".join(painted)


def _write_table(table: Table, terminal: Terminal) -> str:
    width = terminal.width
    bar = next((index for index, column in enumerate(table.columns) if column.bar_total is not None), None)
    show = show_indented if bar is None else terminal.printable
    rows = [[show(cell) for cell in row] for row in table.indented()]
    indexes, text_limit = [index for index in range(len(table.columns)) if index != bar], 0
    if width is not None:
        indexes, text_limit = _choose_columns(table, rows, indexes, width)
    columns = [table.columns[index] for index in indexes]
    lines = [[column.heading for column in columns], *([row[index] for index in indexes] for row in rows)]
    texts = [position for position, column in enumerate(columns) if column.is_text]
    if table.total is not None and "total" in table.total and "total" not in lines[-1] and texts:
        lines[-1][texts[0]] = "total"  # its own column is hidden
    cells = 0 if bar is None or bar - 1 not in indexes else _fit_bar(lines, columns, width, text_limit)
    if width is not None:
        ellipsis = "…" if terminal.is_unicode else ".."
        truncate = partial(truncate_middle if bar is None else _truncate_name, ellipsis=ellipsis)
        lines = _shorten(lines, columns, width - (cells + len(GAP) if cells else 0), truncate)
    bars = [""] * len(rows)
    if bar is not None and cells:
        total = table.columns[bar].bar_total or 0
        values = [row[bar] for row in (*table.rows, *([] if table.total is None else [table.total]))]
        blocks = "▏▎▍▌▋▊▉█" if terminal.is_unicode else "#"  # fractions of a cell, the full one last
        bars = [_draw_bar(value, total, cells, blocks) for value in values]
        lines = [[*line, pad(text, cells if bars else 0)] for line, text in zip(lines, ["", *bars], strict=True)]
        indexes.append(bar)
    left = [position for position, index in enumerate(indexes) if table.columns[index].is_text or index == bar]
    drawn = _paint(text_table(lines[0], lines[1:], left=left).split("\n"), bars, table, terminal)
    hidden = [column.heading for index, column in enumerate(table.columns) if index not in indexes]
    notes = [*table.notes, *hidden_columns_note(hidden, width)]
    if bar is None:
        title = [_write_lines(table.title, width)] if table.title else []
        return "\n".join([*title, *drawn, *(_write_lines(note, width) for note in notes)])
    below = _write_sentences(notes, [""] * len(notes), terminal)
    return "\n".join(drawn) + (f"\n\n{below}" if below else "")


def _fit_bar(lines: Sequence[Sequence[str]], columns: Sequence[Column], width: int | None, text_limit: int) -> int:
    """Return the cells for bars: beside whole names the rest of the line, else a narrow bar if there is room."""
    if width is None:
        return _MAX_BAR
    widths = [max(map(display_width, cells)) for cells in zip(*lines, strict=True)]
    spare = width - _total_width(widths) - len(GAP)
    if spare < -len(GAP):
        least = [
            min(cells, max(text_limit, display_width(column.heading))) if column.is_text else cells
            for column, cells in zip(columns, widths, strict=True)
        ]
        spare = min(width - _total_width(least) - len(GAP), _NARROW_BAR)
    return min(_MAX_BAR, spare) if spare >= _MIN_BAR else 0


def _draw_bar(value: Any, total: float, width: int, blocks: str) -> str:
    """Return a bar for a share, in fractions of a cell; a share above zero has at least one fraction."""
    if total <= 0 or value <= 0:
        return ""
    filled = min(max(round(value * width * len(blocks) / total), 1), width * len(blocks))
    full, rest = divmod(int(filled), len(blocks))
    return blocks[-1] * full + (blocks[rest - 1] if rest else "")


def _paint(lines: Sequence[str], bars: Sequence[str], table: Table, terminal: Terminal) -> list[str]:
    header, rule, *rows = lines
    painted = [terminal.paint(header, _BOLD), terminal.paint(rule, _DIM)]
    for index, (line, bar) in enumerate(zip(rows, bars, strict=True)):
        is_strong = index in table.strong or index >= len(table.rows)
        painted.append(terminal.paint(line.removesuffix(bar), _BOLD * is_strong) + terminal.paint(bar, _BARS))
    return painted


def hidden_columns_note(headings: Sequence[str], width: int | None) -> list[str]:
    """Return a sentence that names the columns hidden at a width, [] for none.

    >>> hidden_columns_note(["bytes", "share"], 40)
    ['Columns hidden at width 40: bytes, share.']
    """
    return [f"Columns hidden at width {width}: {', '.join(headings)}."] if headings else []


def show_indented(text: str) -> str:
    """Return a text printable and short, with its indentation."""
    name = text.lstrip(" ")
    return text[: len(text) - len(name)] + printable_short(name)


def _choose_columns(
    table: Table, rows: Sequence[Sequence[str]], indexes: Sequence[int], width: int
) -> tuple[list[int], int]:
    """Return the indexes of the columns that fit with truncated text, and the width to which it is truncated.

    Columns with a `hide_order` are dropped first, then numbers, then text, from the right. The column by which rows are
    sorted is never dropped.
    """
    has_bar = len(indexes) < len(table.columns)
    for limit in (_OPTIONAL_WIDTH, _NARROW_WIDTH) if has_bar else (_OPTIONAL_WIDTH,):
        chosen = list(indexes)
        widths = _measure_columns(table, rows, width, limit)
        optional = sorted(
            (index for index in indexes if table.columns[index].hide_order and table.columns[index].key != table.sort),
            key=lambda index: (table.columns[index].hide_order, index),
        )
        while optional and _total_width([widths[index] for index in chosen]) > width:
            chosen.remove(optional.pop())
        if _total_width([widths[index] for index in chosen]) <= width:
            return chosen, limit
    if has_bar:
        return [index for index in indexes if table.columns[index].is_text], _NARROW_WIDTH
    widths = _measure_columns(table, rows, width, _MIN_WIDTH)
    while len(chosen) > 1 and _total_width([widths[index] for index in chosen]) > width:
        removable = [index for index in chosen if table.columns[index].key != table.sort]
        numbers = [index for index in removable if not table.columns[index].is_text]
        chosen.remove(numbers[-1] if len(numbers) > 1 else removable[-1])
    return chosen, _MIN_WIDTH


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


def _shorten(
    lines: list[list[str]], columns: Sequence[Column], width: int, truncate: Callable[[str, int], str]
) -> list[list[str]]:
    """Return the lines with truncated text, the widest column first, until they fit."""
    text_columns = [index for index, column in enumerate(columns) if column.is_text]
    widths = [max(map(display_width, cells)) for cells in zip(*lines, strict=True)]
    while _total_width(widths) > width and text_columns:
        first = [index for index in text_columns if not columns[index].shorten_last and widths[index] > width // 3]
        widest = max(first or text_columns, key=lambda index: widths[index])
        if widths[widest] <= 1:
            break
        widths[widest] -= 1
    return [[truncate(cell, limit) for cell, limit in zip(line, widths, strict=True)] for line in lines]


def _truncate_name(cell: str, limit: int, *, ellipsis: str) -> str:
    """Return a cell truncated in the middle of its name: at least half is for the name, however deep its level."""
    name = cell.lstrip(" ")
    indent = min(len(cell) - len(name), max(limit // 2, limit - display_width(name)))
    return " " * indent + truncate_middle(name, limit - indent, ellipsis=ellipsis)
