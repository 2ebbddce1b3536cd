"""Columns of a CSV or Parquet file, such as accuracies, joined to models by name."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fvflops import paths
from fvflops.reports.document import Column, Value, number_column, text_column
from fvflops.reports.escaping import plain_name
from fvflops.sources.imports import import_library
from fvflops.units import format_quantity, format_short

_DECIMALS = 6
# Cells without a value.
_MISSING = frozenset(["", "-", "nan", "na", "n/a", "none", "null"])
_NUMBER = re.compile(r"[+-]?(\d{1,20}(\.\d{0,20})?|\.\d{1,20})(e[+-]?\d{1,3})?%?", re.IGNORECASE)
_SEPARATOR = re.compile(r"[:/]+")
# A tag of pretrained weights, as in `resnet50.a1_in1k`, or the suffix of a file.
_TAG = re.compile(r"\.[a-z]\w*$")


@dataclass(frozen=True, slots=True)
class JoinedFile:
    """Rows of a file: `columns`, and in `rows` (name, cells) as in the file; names may occur twice.

    >>> file = parse_csv("model,top1\\nresnet50,80.4\\nvit_b_16,81.07\\n", "accuracy.csv")
    >>> [column.key for column in file.columns], file.rows
    (['top1'], (('resnet50', (80.4,)), ('vit_b_16', (81.07,))))
    >>> file.columns[0].show(80.4)
    '80.40'
    """

    path: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, tuple[Value, ...]], ...]


@dataclass(frozen=True, slots=True)
class Join:
    """The rows of a file by model, the `missing` models without one, and `notes` on names without a match."""

    file: JoinedFile
    cells: Mapping[str, tuple[Value, ...]]
    missing: tuple[str, ...]
    notes: tuple[str, ...]

    def cells_of(self, model: str) -> tuple[Value, ...]:
        """Return the cells of a model, all None without a row."""
        return self.cells.get(model) or (None,) * len(self.file.columns)


def read_joined(path: str) -> JoinedFile:
    """Return the rows of a .csv, .tsv or .parquet file, whose column `model`, or else the first, has the names.

    A column of numbers, with or without %, is one; empty cells and NaN have no value. A file that is missing, has no
    rows or one column raises ValueError, as does .parquet without pyarrow.
    """
    suffix = path.rpartition(".")[2].lower()
    if suffix not in ("csv", "tsv", "parquet"):
        raise ValueError(f"{path}: a table to join must be a .csv, .tsv or .parquet file")
    if not paths.exists(path):
        raise ValueError(f"--join {path}: there is no such file")
    if suffix == "parquet":
        columns = read_columns(path)
        cells = [["" if cell is None else str(cell) for cell in row] for row in zip(*columns.values(), strict=True)]
        return _make_file(path, list(columns), cells)
    try:
        with paths.open_text(path) as file:
            text = file.read()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text: save it as CSV UTF-8") from None
    return parse_csv(text, path, delimiter="\t" if suffix == "tsv" else ",")


def parse_csv(text: str, path: str, *, delimiter: str = ",") -> JoinedFile:
    """Return the rows of CSV text with a header, above which lines may begin with #; errors are as in `read_joined`."""
    text = text.removeprefix("\ufeff")
    while text.startswith("#"):
        text = text.partition("\n")[2]
    try:
        lines = [line for line in csv.reader(io.StringIO(text), delimiter=delimiter) if any(line)]
    except csv.Error as error:
        raise ValueError(f"{path} is not CSV: {error}") from None
    headings, rows = ([cell.strip() for cell in lines[0]] if lines else []), lines[1:]
    for number, row in enumerate(rows, start=1):
        if len(row) != len(headings):
            raise ValueError(
                f"{path}: row {number} has {format_quantity(len(row), 'cell')}, the header {len(headings)}: "
                f"{plain_name(delimiter.join(row))!r}"
            )
    return _make_file(path, headings, [[cell.strip() for cell in row] for row in rows])


def import_pyarrow() -> Any:
    """Return the module pyarrow, with pyarrow.parquet; without it raise ValueError that names the extra."""
    import_library("pyarrow.parquet", extra="parquet")
    return import_library("pyarrow")


def read_columns(path: str) -> dict[str, list[Any]]:
    """Return column → values of a file; another one raises ValueError in one line."""
    arrow = import_pyarrow()
    data = paths.read_bytes(path)
    try:
        table = arrow.parquet.read_table(io.BytesIO(data))
        return {str(name): table.column(index).to_pylist() for index, name in enumerate(table.column_names)}
    # For a damaged file pyarrow raises errors of many kinds, Unicode and memory errors among them.
    except (arrow.ArrowException, OSError, ValueError, LookupError, TypeError, MemoryError) as error:
        reason = plain_name(" ".join(str(error).split()))
        raise ValueError(f"{path} is not a Parquet file, or damaged: {reason}") from None


def _make_file(path: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> JoinedFile:
    if len(headings) < 2 or not rows:
        raise ValueError(
            f"{path} has {format_quantity(len(headings), 'column')} and {format_quantity(len(rows), 'row')}: "
            "it needs a header, names of models in the first column and values in others"
        )
    for heading in headings:
        if not heading or headings.count(heading) > 1:
            raise ValueError(f"{path}: the header has {f'two columns {heading!r}' if heading else 'an empty cell'}")
    lowered = [heading.lower() for heading in headings]
    key = lowered.index("model") if "model" in lowered else 0
    columns, values = [], []
    for index, cells in enumerate(zip(*rows, strict=True)):
        if index != key:
            try:
                column, parsed = _read_column(headings[index], cells)
            except ValueError as error:
                raise ValueError(f"{path}: {headings[index]}: {error}") from None
            columns.append(column)
            values.append(parsed)
    names = [row[key] for row in rows]
    return JoinedFile(path, tuple(columns), tuple(zip(names, zip(*values, strict=True), strict=True)))


def _read_column(heading: str, cells: Sequence[str]) -> tuple[Column, list[Value]]:
    present = [cell for cell in cells if cell.lower() not in _MISSING]
    if not present or not all(map(_NUMBER.fullmatch, present)):
        return text_column(heading), [None if cell in ("", "-") else cell for cell in cells]
    parsed = [_parse_number(cell) if cell.lower() not in _MISSING else None for cell in cells]
    # A column has one number format, with the most digits after the point of any cell.
    decimals = max(len(cell.lower().partition("e")[0].rstrip("%").partition(".")[2]) for cell in present)
    return number_column(heading, form=partial(_write_number, decimals)), parsed


def _parse_number(text: str) -> Value:
    digits = text.rstrip("%")
    if digits.lstrip("+-").isdecimal():
        return int(digits)
    if not math.isfinite(number := float(digits)):
        raise ValueError(f"{text!r} is too large a number")
    return number


def _write_number(decimals: int, value: float) -> str:
    if abs(value) >= 1e7:
        return format_short(value)
    decimals = min(decimals, _DECIMALS)
    # A tick of a plot may have more digits than the cells.
    is_exact = math.isclose(value, round(value, decimals), rel_tol=1e-9, abs_tol=10.0 ** -(_DECIMALS + 1))
    return f"{value:.{decimals}f}" if is_exact else f"{value:.{_DECIMALS}g}"


def join(file: JoinedFile, models: Sequence[str]) -> Join:
    """Return the rows of a file by model.

    A row has a model's name if the parts of one, between colons and slashes, are the last parts of the other:
    `resnet50` is `timm:resnet50`, but `zoo:resnet50` is not. Case does not matter, nor whether words are separated by
    `-` or `_`; a tag (`resnet50.a1_in1k`) does if both have one. A row with the same tag is preferred, then one with
    more parts. A name for which several rows remain has none, nor have several models that share a row.

    >>> file = parse_csv("name,top1\\nresnet50,80.4\\nVIT-B-16,81.07\\nalexnet,56.5\\n", "accuracy.csv")
    >>> joined = join(file, ["timm:resnet50", "torchvision:vit_b_16", "zoo:gpt2"])
    >>> joined.cells_of("timm:resnet50"), joined.cells_of("zoo:gpt2"), joined.notes
    ((80.4,), (None,), ('accuracy.csv has no row for zoo:gpt2.', '1 row of accuracy.csv has no model: alexnet.'))
    """
    fitting = _find_rows(file, dict.fromkeys(models))
    by_row: dict[int, list[str]] = {}
    for model, numbers in fitting.items():
        if len(numbers) == 1:
            by_row.setdefault(numbers[0], []).append(model)
    for number, names in by_row.items():  # of several models the one that has the row's whole name
        exact = [model for model in names if _split(model) == _split(file.rows[number][0])]
        by_row[number] = exact or names
    cells = {names[0]: file.rows[number][1] for number, names in by_row.items() if len(names) == 1}
    several = {
        model: [file.rows[number][0] for number in numbers] for model, numbers in fitting.items() if len(numbers) > 1
    }
    missing = tuple(model for model in fitting if model not in cells)
    used = {file.rows[number][0] for number in by_row}.union(*several.values())
    unused = [name for name, _ in file.rows if name and name not in used]
    notes = []
    for model, names in several.items():
        notes.append(f"{file.path} has several rows for {plain_name(model)}: {list_names(names)}.")
    for number, names in by_row.items():
        if len(names) > 1:
            row = plain_name(file.rows[number][0])
            notes.append(f"{file.path}: the row {row} fits {list_names(names)}: write their full names.")
    if without := [model for model in missing if not fitting[model]]:
        notes.append(f"{file.path} has no row for {list_names(without)}.")
    if unused:
        verb = "has" if len(unused) == 1 else "have"
        notes.append(f"{format_quantity(len(unused), 'row')} of {file.path} {verb} no model: {list_names(unused)}.")
    return Join(file, cells, missing, tuple(notes))


def list_names(names: Sequence[str]) -> str:
    """Return the first five names for a sentence, and the number of others."""
    rest = len(names) - 5
    return ", ".join(map(plain_name, names[:5])) + (f" and {rest:,} more" if rest > 0 else "")


def _find_rows(file: JoinedFile, models: Iterable[str]) -> dict[str, list[int]]:
    """Return model → the numbers of the rows that fit its name best, [] for none."""
    rows = [_split(name) for name, _ in file.rows]
    by_last: dict[str, list[int]] = {}
    for number, parts in enumerate(rows):
        for last in {parts[-1], _TAG.sub("", parts[-1])} if parts else ():
            by_last.setdefault(last, []).append(number)
    return {model: _find_fitting(_split(model), rows, by_last) for model in models}


def _find_fitting(
    parts: tuple[str, ...], rows: Sequence[tuple[str, ...]], by_last: Mapping[str, Sequence[int]]
) -> list[int]:
    last = parts[-1] if parts else ""
    untagged = _TAG.sub("", last)
    for name in dict.fromkeys((last, untagged)):
        # A tag is ignored if only one of the names has one.
        candidates = [
            (rows[number][-1] == name, common, number)
            for number in by_last.get(name, ())
            if untagged in (last, rows[number][-1]) or rows[number][-1] == last
            if (common := _count_common(parts[:-1], rows[number][:-1])) is not None
        ]
        if candidates:
            best = max(candidate[:2] for candidate in candidates)
            return [number for *key, number in candidates if tuple(key) == best]
    return []


def _split(name: str) -> tuple[str, ...]:
    return tuple(part for part in _SEPARATOR.split(name.strip().lower().replace("-", "_")) if part)


def _count_common(first: Sequence[str], second: Sequence[str]) -> int | None:
    """Return how many parts are the last of both, None if one has others than the other."""
    count = min(len(first), len(second))
    return count if list(first[len(first) - count :]) == list(second[len(second) - count :]) else None
