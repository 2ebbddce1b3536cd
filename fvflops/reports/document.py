"""A report as data: paragraphs, lists, tables and charts, for every format in `fvflops.reports.formats`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from fvflops.units import format_seconds, format_short, format_signed
from fvflops.views.ranking import check_sort, check_top, natural_key, truncation_note

# Value of a cell; None where it is unknown or does not apply to the row.
Value = str | int | float | bool | Fraction | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its key in CSV and JSON, its heading in the other formats, and how its values are shown.

    `form` formats a value; `missing` is shown for None. `is_text` columns are left-aligned and in natural order when
    sorted; the others are numbers, which are sorted by magnitude if `signed`. In a `tree` column the values are dotted
    module names, parents before their children, "" being the model. Where a line is too long, columns with the largest
    `hide_order` are dropped first, then text is truncated, last in `shorten_last` columns. `only_for` is "people" for a
    column that CSV and JSON lack, "data" for one that only they have. A column with `bar_total` is a bar in plain text,
    for the share that its values have of it.
    """

    key: str
    heading: str = ""
    form: Callable[[Any], str] = str
    is_text: bool = False
    missing: str = ""
    tree: bool = False
    signed: bool = False
    shorten_last: bool = False
    hide_order: int = 0
    only_for: str = ""
    bar_total: float | None = None

    def show(self, value: Value) -> str:
        """Return the text of a value, not yet escaped for any format."""
        return self.missing if value is None else self.form(value) or ("model" if self.tree else "")


def text_column(key: str, heading: str = "", *, form: Callable[[Any], str] = str, shorten_last: bool = False) -> Column:
    return Column(key, heading or key, form, is_text=True, shorten_last=shorten_last)


def module_column() -> Column:
    """Return a column of module names; text shows them as a tree."""
    return Column("module", "module", is_text=True, tree=True)


def number_column(
    key: str, heading: str = "", *, form: Callable[[Any], str] = format_short, missing: str = "", only_for: str = ""
) -> Column:
    """Return a column of numbers, by default in thousands, millions and so on."""
    return Column(key, heading or key, form, missing=missing, only_for=only_for)


def difference_column(key: str, heading: str = "", *, form: Callable[[Any], str] = format_signed) -> Column:
    """Return a column of differences, which have a sign and are sorted by magnitude."""
    return Column(key, heading or key, form, signed=True)


def data_only(columns: Iterable[Column], keys: Collection[str]) -> list[Column]:
    """Return the columns; the ones named in `keys` are only in CSV and JSON."""
    return [replace(column, only_for="data") if column.key in keys else column for column in columns]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of exact values, one per column.

    `name` is the table's key in JSON, `title` its heading, and `total` an optional last row. `noun` is what a row is,
    for the note on rows that are not shown ("3 more modules"); the note has their sum in the column with the key
    `summed`, if any. `sort` is the key of the column by which the rows are sorted. `strong` are the indexes of bold
    rows.

    >>> table = Table("modules", (module_column(), number_column("flops")), [("fc1", 24), ("fc2", 48)], noun="module")
    >>> top = table.ranked(sort="flops", top=1)
    >>> top.rows, top.notes
    ([('fc2', 48)], ('1 more module.',))
    """

    name: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Value]]
    title: str = ""
    total: Sequence[Value] | None = None
    notes: Sequence[str] = ()
    noun: str = "row"
    summed: str = ""
    sort: str = ""
    strong: Collection[int] = ()

    def ranked(self, *, sort: str | None = None, top: int | None = None) -> Table:
        """Return the table sorted by a column, numbers in descending order, limited to the first `top` rows.

        `sort` is the key of a column, or "name" for the first text column; None retains the order. An unknown key and a
        `top` below 1 raise ValueError.
        """
        check_top(top)
        columns, rows = self.columns, list(self.rows)
        keys = [column.key for column in columns]
        if sort is not None:
            check_sort(sort, keys if "name" in keys else [*keys, "name"])
            texts = [index for index, column in enumerate(columns) if column.is_text]
            index = keys.index(sort) if sort in keys else texts[0] if texts else 0
            if columns[index].is_text:
                rows.sort(key=lambda row: natural_key(str(row[index] or "")))
            else:
                rows.sort(key=lambda row: _descending(row[index], signed=columns[index].signed))
            columns = [
                replace(column, tree=False, form=lambda name: name or "model") if column.tree else column
                for column in columns
            ]
        note = truncation_note(rows, top, self.noun)
        if note and self.summed:
            index = keys.index(self.summed)
            hidden: Any = sum(row[index] or 0 for row in rows[top:])
            note = [f"{note[0].rstrip('.')}: {columns[index].heading} {columns[index].show(hidden)}."]
        return replace(
            self, columns=columns, rows=rows[:top], notes=(*self.notes, *note), sort=self.sort if sort is None else sort
        )

    def has(self, key: str) -> bool:
        return key == "name" or any(column.key == key for column in self.columns)

    def readable_by(self, reader: str) -> Table:
        """Return the table with its columns for "people", without empty ones, or for "data" formats."""
        selected = [index for index, column in enumerate(self.columns) if column.only_for in ("", reader)]
        if reader == "people":
            texts = self.texts()
            selected = [index for index in selected if not texts or any(row[index] for row in texts)]
        if len(selected) == len(self.columns):
            return self
        return replace(
            self,
            columns=[self.columns[index] for index in selected],
            rows=[[row[index] for index in selected] for row in self.rows],
            total=None if self.total is None else [self.total[index] for index in selected],
        )

    def records(self) -> list[dict[str, Value]]:
        """Return each row as column key → value."""
        return [dict(zip((column.key for column in self.columns), row, strict=True)) for row in self.rows]

    def texts(self) -> list[list[str]]:
        """Return the formatted cells of each row and of the total."""
        rows = [*self.rows, self.total] if self.total is not None else self.rows
        return [[column.show(value) for column, value in zip(self.columns, row, strict=True)] for row in rows]

    def indented(self) -> list[list[str]]:
        """Return the formatted cells, with module names indented and relative to the name of their parent."""
        texts = self.texts()
        for index, column in enumerate(self.columns):
            if column.tree:
                names = _indent([str(row[index]) for row in self.rows])
                for row, name in zip(texts, names, strict=False):
                    row[index] = name
        return texts


def _indent(names: Sequence[str]) -> list[str]:
    ancestors: list[str] = []
    indented = []
    for name in names:
        while ancestors and not (ancestors[-1] == "" or name.startswith(f"{ancestors[-1]}.")):
            ancestors.pop()
        parent = ancestors[-1] if ancestors else ""
        indented.append(" " * len(ancestors) + (name.removeprefix(f"{parent}.") if parent else name or "model"))
        ancestors.append(name)
    return indented


def _descending(value: Value, *, signed: bool) -> tuple[bool, float]:
    if value is None:
        return True, 0
    return False, -abs(float(value)) if signed else -float(value)


@dataclass(frozen=True, slots=True)
class Items:
    """A list of sentences under a heading; `tones`, as in `op_coverage`, select their colours in text."""

    heading: str
    items: Sequence[str]
    tones: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """A shell command under a heading, which can be copied from every format."""

    heading: str
    command: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Stacked values at each point of a run, such as the bytes of each kind of memory at each op.

    `layers` is name → value at each point, the lowest layer first; `sections` are (name, number of points) along the
    run. `name` is the chart's key in JSON, `title` its heading.

    >>> chart = Chart("memory", {"parameter": [4, 4, 4, 4], "activation": [0, 2, 3, 1]}, [("forward", 4)])
    >>> chart.totals(), chart.sample(2).layers
    ([4, 6, 7, 5], {'parameter': [4, 4], 'activation': [2, 3]})
    """

    name: str
    layers: Mapping[str, Sequence[int]]
    sections: Sequence[tuple[str, int]] = ()
    title: str = ""
    form: Callable[[Any], str] = format_short
    notes: Sequence[str] = ()

    def totals(self) -> list[int]:
        """Return the sum of the layers at each point."""
        return [sum(values) for values in zip(*self.layers.values(), strict=True)]

    def sample(self, count: int) -> Chart:
        """Return the chart with `count` points: for each of `count` equal parts, the one with the largest total."""
        totals = self.totals()
        points = find_peaks(totals, count)
        ends = [round(end * count / len(totals)) for end in accumulate(length for _, length in self.sections)]
        lengths = [end - start for start, end in pairwise([0, *ends])]
        return replace(
            self,
            layers={name: [values[point] for point in points] for name, values in self.layers.items()},
            sections=[(name, length) for (name, _), length in zip(self.sections, lengths, strict=True)],
        )


def find_peaks(totals: Sequence[int], count: int) -> list[int]:
    """Return the index of the largest total in each of `count` equal parts."""
    starts = [len(totals) * index // count for index in range(count + 1)]
    return [max(range(start, max(end, start + 1)), key=totals.__getitem__) for start, end in pairwise(starts)]


class Slice(NamedTuple):
    """Activity of a lane of a Gantt chart from `start` to `end`.

    `label` is short text that is shown where there is room, `note` describes the slice, `shade` sets slices of one kind
    apart: 0 is the strongest.
    """

    kind: str
    start: float
    end: float
    label: str = ""
    note: str = ""
    shade: int = 0


@dataclass(frozen=True, slots=True)
class Gantt:
    """Lanes in which slices of some kinds follow each other, such as the passes of each rank of a pipeline.

    `kinds` is kind → its name in the legend, in the order of the legend; `idle` names the gaps between slices. `length`
    is the time that the chart covers at least. `name` is the chart's key in JSON, `title` its heading.

    >>> gantt = Gantt("pipeline", {"0": [Slice("f", 0, 2), Slice("b", 3, 6)]}, {"f": "forward", "b": "backward"})
    >>> gantt.end(), [piece and piece.kind for piece in gantt.sample("0", 6)]
    (6, ['f', 'f', None, 'b', 'b', 'b'])
    """

    name: str
    lanes: Mapping[str, Sequence[Slice]]
    kinds: Mapping[str, str]
    title: str = ""
    idle: str = "waiting"
    form: Callable[[float], str] = format_seconds
    notes: Sequence[str] = ()
    length: float = 0

    def end(self) -> float:
        return max((self.length, *(slices[-1].end for slices in self.lanes.values() if slices)))

    def sample(self, lane: str, count: int) -> list[Slice | None]:
        """Return, for each of `count` equal parts of the time, the slice that fills most of it; None for a gap."""
        width = self.end() / count
        cells: list[Slice | None] = [None] * count
        filled = [0.0] * count
        for piece in self.lanes[lane]:
            first, last = int(piece.start / width), min(math.ceil(piece.end / width), count)
            for cell in range(first, last):
                share = _share_of(piece, cell, width)
                filled[cell] += share
                best = cells[cell]
                if best is None or share > _share_of(best, cell, width):
                    cells[cell] = piece
        return [piece if share >= 0.5 else None for piece, share in zip(cells, filled, strict=True)]


def _share_of(piece: Slice, cell: int, width: float) -> float:
    return (min(piece.end, (cell + 1) * width) - max(piece.start, cell * width)) / width


class Point(NamedTuple):
    """A point of a scatter plot; `marked` ones, such as a Pareto front, are drawn stronger."""

    x: float
    y: float
    label: str = ""
    marked: bool = False


@dataclass(frozen=True, slots=True)
class Scatter:
    """Points by two quantities, whose names and formats are `x`, `y`, `x_form` and `y_form`.

    `limit` is a line at a value of `y`, such as the memory of a device, and its name; `marks` says what the marked
    points are. `name` is the plot's key in JSON, `title` its heading.

    >>> Scatter("layouts", [Point(2, 8), Point(3, 4)], "time", "memory", limit=(10, "80 GB")).spans()
    ((2, 3), (4, 10))
    """

    name: str
    points: Sequence[Point]
    x: str
    y: str
    x_form: Callable[[float], str] = format_short
    y_form: Callable[[float], str] = format_short
    title: str = ""
    marks: str = "Pareto front"
    limit: tuple[float, str] | None = None
    notes: Sequence[str] = ()

    def spans(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the least and the largest `x`, then `y`, with the limit."""
        xs = [point.x for point in self.points]
        ys = [point.y for point in self.points] + ([] if self.limit is None else [self.limit[0]])
        return (min(xs), max(xs)), (min(ys), max(ys))


Part = str | Items | Command | Table | Chart | Gantt | Scatter


@dataclass(frozen=True, slots=True)
class Document:
    """A report of a command; JSON names its format "fvflops.KIND".

    In `parts` a string is a paragraph. The main table, which CSV contains, is the one named `main`, or the first;
    sorting and `top` apply to it and to the tables named in `also`. If `data` is not empty, JSON contains it in place
    of the tables; it always contains `about`.
    """

    kind: str
    title: str = ""
    parts: Sequence[Part] = ()
    main: str = ""
    also: Collection[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def ranked(self, *, sort: str | None = None, top: int | None = None) -> Document:
        """Return the document with its main table ranked, and its `also` tables, by a column that they have."""
        if sort is None and top is None:
            return self
        main = self.main_table()
        parts: list[Part] = []
        for part in self.parts:
            if isinstance(part, Table) and (part is main or part.name in self.also):
                key = sort if sort is None or part is main or part.has(sort) else None
                part = part.ranked(sort=key, top=top)
            parts.append(part)
        return replace(self, parts=parts)

    def readable_by(self, reader: str) -> Document:
        """Return the document with tables as returned by `Table.readable_by`; for people, without empty ones."""
        parts = [part.readable_by(reader) if isinstance(part, Table) else part for part in self.parts]
        if reader == "people":
            parts = [part for part in parts if not isinstance(part, Table) or (part.rows and part.columns)]
        return replace(self, parts=parts)

    def tables(self) -> list[Table]:
        return [part for part in self.parts if isinstance(part, Table)]

    def main_table(self) -> Table:
        """Return the main table; a document without tables raises ValueError."""
        tables = self.tables()
        if not tables:
            raise ValueError(f"the {self.kind} report has no table here: use --format text, markdown, html or json")
        names = [table.name for table in tables]
        return tables[names.index(self.main)] if self.main in names else tables[0]
