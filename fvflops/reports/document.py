"""A report as data: paragraphs, lists and tables of exact values, which every format of `formats` can write."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from fvflops.units import format_short, format_signed
from fvflops.views.ranking import check_sort, check_top, natural_key, truncation_note

# What a cell holds; None is a value that is not known, or that this row does not have.
Value = str | int | float | bool | Fraction | None
NAME = "name"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its key in data formats, its heading for people, and how its values read.

    A `words` column is aligned left, sorted by name, and shortened where a line would be too long; the others hold
    numbers. `missing` is what people read where a value is None. `tree` says that the values are modules' dotted names,
    a parent before its children, "" being the model. `signed` numbers are sorted by magnitude. Where a line is too
    long, columns with the largest `optional` go first, and words to `keep` are shortened last. `only` is "people" for a
    column that CSV and JSON do not have, "data" for one that only they have.
    """

    key: str
    heading: str = ""
    form: Callable[[Any], str] = str
    is_text: bool = False
    missing: str = ""
    tree: bool = False
    signed: bool = False
    shorten_last: bool = False
    optional: int = 0
    only: str = ""

    def show(self, value: Value) -> str:
        """Return a value as people read it, not yet escaped for any format."""
        if value is None:
            return self.missing
        return self.form(value) or ("model" if self.tree else "")


def text_column(
    key: str, heading: str = "", *, form: Callable[[Any], str] = str, missing: str = "", shorten_last: bool = False
) -> Column:
    """Return a column of names or other text."""
    return Column(key, heading or key, form, is_text=True, missing=missing, shorten_last=shorten_last)


def module_column(key: str = "module") -> Column:
    """Return a column of module names; text shows them as a tree."""
    return Column(key, key, is_text=True, tree=True)


def number_column(
    key: str,
    heading: str = "",
    *,
    form: Callable[[Any], str] = format_short,
    missing: str = "",
    only: str = "",
) -> Column:
    """Return a column of numbers, by default in thousands, millions and so on.

    >>> number_column("flops", "FLOPs").show(4_089_184_256)
    '4.09G'
    """
    return Column(key, heading or key, form, missing=missing, only=only)


def difference_column(key: str, heading: str = "", *, form: Callable[[Any], str] = format_signed) -> Column:
    """Return a column of differences, which have a sign and are sorted by magnitude.

    >>> difference_column("flops").show(-12_845_056)
    '-12.8M'
    """
    return Column(key, heading or key, form, signed=True)


def data_only(columns: Iterable[Column], keys: Collection[str]) -> list[Column]:
    """Return columns of which those with some keys are in CSV and JSON only."""
    return [replace(column, only="data") if column.key in keys else column for column in columns]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of exact values; each has a value for each column.

    `name` is the table's key in JSON, `title` its heading, and `total` an optional last row. The note on rows that are
    not shown counts them by `noun` ("3 modules more") and gives their sum in the column with the key `summed`. `sort`
    is the key of the column by which the rows are ranked.

    >>> table = Table("modules", (module_column(), number_column("flops")), [("fc1", 24), ("fc2", 48)], noun="module")
    >>> top = table.ranked(sort="flops", top=1)
    >>> top.rows, top.notes
    ([('fc2', 48)], ('1 module more.',))
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

    def ranked(self, *, sort: str | None = None, top: int | None = None) -> Table:
        """Return the table with its largest values first, and `top` rows of it.

        `sort` is the key of a column, or "name" for the first one of words; names are in their natural order. None
        keeps the order. A key that no column has, and a `top` below 1, raise ValueError.
        """
        check_top(top)
        columns, rows = self.columns, list(self.rows)
        keys = [column.key for column in columns]
        if sort is not None:
            check_sort(sort, keys if NAME in keys else [*keys, NAME])
            place = keys.index(sort) if sort in keys else self._find_names()
            if columns[place].is_text:
                rows.sort(key=lambda row: natural_key(str(row[place] or "")))
            else:
                rows.sort(key=lambda row: _descending(row[place], signed=columns[place].signed))
            columns = [replace(column, tree=False, form=_or_model) if column.tree else column for column in columns]
        return replace(
            self,
            columns=columns,
            rows=rows[:top],
            notes=(*self.notes, *self._describe_rest(rows, top)),
            sort=self.sort if sort is None else sort,
        )

    def has(self, key: str) -> bool:
        """Return whether the rows can be sorted by a key."""
        return key == NAME or any(column.key == key for column in self.columns)

    def _describe_rest(self, rows: Sequence[Sequence[Value]], top: int | None) -> list[str]:
        note = truncation_note(rows, top, self.noun)
        if not note or not self.summed:
            return note
        place = [column.key for column in self.columns].index(self.summed)
        column = self.columns[place]
        value: Any = sum(row[place] or 0 for row in rows[top:])
        return [f"{note[0].rstrip('.')}: {column.heading} {column.show(value)}."]

    def _find_names(self) -> int:
        return next((place for place, column in enumerate(self.columns) if column.is_text), 0)

    def readable_by(self, reader: str) -> Table:
        """Return the table with the columns that "people" or "data" formats have."""
        kept = [place for place, column in enumerate(self.columns) if column.only in ("", reader)]
        if len(kept) == len(self.columns):
            return self
        return replace(
            self,
            columns=[self.columns[place] for place in kept],
            rows=[[row[place] for place in kept] for row in self.rows],
            total=None if self.total is None else [self.total[place] for place in kept],
        )

    def records(self) -> list[dict[str, Value]]:
        """Return each row as column key → value."""
        return [dict(zip((column.key for column in self.columns), row, strict=True)) for row in self.rows]

    def texts(self) -> list[list[str]]:
        """Return each row, and the total, as people read them."""
        rows = [*self.rows, self.total] if self.total is not None else self.rows
        return [[column.show(value) for column, value in zip(self.columns, row, strict=True)] for row in rows]

    def indented(self) -> list[list[str]]:
        """Return what `texts` does, with module names below each other and without what the name above says.

        >>> rows = [("", 9), ("layers", 8), ("layers.0.fc", 8), ("head", 1)]
        >>> [row[0] for row in Table("modules", (module_column(), number_column("flops")), rows).indented()]
        ['model', ' layers', '  0.fc', ' head']
        """
        texts = self.texts()
        for place, column in enumerate(self.columns):
            if column.tree:
                names = _indent([str(row[place]) for row in self.rows])
                for row, name in zip(texts, names, strict=False):
                    row[place] = name
        return texts


def _indent(names: Sequence[str]) -> list[str]:
    above: list[str] = []
    shown = []
    for name in names:
        while above and not (above[-1] == "" or name.startswith(f"{above[-1]}.")):
            above.pop()
        parent = above[-1] if above else ""
        shown.append(" " * len(above) + (name.removeprefix(f"{parent}.") if parent else name or "model"))
        above.append(name)
    return shown


def _descending(value: Value, *, signed: bool) -> tuple[bool, float]:
    if value is None:
        return True, 0
    return False, -abs(float(value)) if signed else -float(value)


def _or_model(name: str) -> str:
    return name or "model"


@dataclass(frozen=True, slots=True)
class Items:
    """A list of sentences under a heading."""

    heading: str
    items: Sequence[str]


Part = str | Items | Table


@dataclass(frozen=True, slots=True)
class Document:
    """What a command reports; `kind` is its name in JSON, "fvflops.KIND".

    `parts` stand in their order: a string is a paragraph. CSV has the table named `main`, or the first one; the tables
    named in `also` are sorted and cut as that is. `data` is what JSON holds in place of the tables, where there is more
    to say than they do.
    """

    kind: str
    title: str = ""
    parts: Sequence[Part] = ()
    main: str = ""
    also: Collection[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)

    def ranked(self, *, sort: str | None = None, top: int | None = None) -> Document:
        """Return the document with its main table in an order, as `Table.ranked` gives it, and those of `also`.

        Of these a table without the column `sort` keeps its order.
        """
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
        """Return the document with its tables as `Table.readable_by` gives them; people see no empty ones."""
        parts = [part.readable_by(reader) if isinstance(part, Table) else part for part in self.parts]
        if reader == "people":
            parts = [part for part in parts if not isinstance(part, Table) or (part.rows and part.columns)]
        return replace(self, parts=parts)

    def tables(self) -> list[Table]:
        """Return the tables in their order."""
        return [part for part in self.parts if isinstance(part, Table)]

    def main_table(self) -> Table:
        """Return the table that CSV has; without one it raises ValueError."""
        tables = self.tables()
        if not tables:
            raise ValueError(f"the {self.kind} report has no table here: take --format text, markdown, html or json")
        names = [table.name for table in tables]
        return tables[names.index(self.main)] if self.main in names else tables[0]
