"""Files of rows: Parquet, CSV, JSON lines or SQLite by their extension.

Each row has a checksum. In CSV and JSON lines, of which a part may be a valid file too, the last row's ends with the
number of rows (`1f3e09ab/3`). Rows without a checksum, as release 1.0 wrote, are read without these checks.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, fields
from typing import Any

from fvflops import paths
from fvflops.reports.escaping import plain_name
from fvflops.reports.formats.csv import write_lines
from fvflops.sweep.joined import import_pyarrow, list_names, read_columns
from fvflops.sweep.model_count import COLUMNS, MORE_METRICS, ModelCount
from fvflops.text import checksum, parse_json, suggest
from fvflops.units import format_quantity

_NAMES = tuple(field.name for field in fields(ModelCount))
_CHECKSUM = "checksum"
_TYPES: Mapping[str, type] = {
    **{column.key: str if column.is_text else int for column in COLUMNS},
    "seconds": float,
    _CHECKSUM: str,
}
_OPTIONAL = frozenset({"ignored", *MORE_METRICS})  # not in files of 1.0, or from before the metric was added
_COLUMNS = (*_NAMES, _CHECKSUM)
_TABLE = "models"  # of an SQLite file
_SQL_TYPES = {str: "TEXT", float: "REAL", int: "INTEGER"}


class ResultError(ValueError):
    """A file that does not contain the rows of a sweep, or cannot contain them."""


def check_format(path: str) -> None:
    """Raise ResultError for an extension that is not of a format, or ValueError where pyarrow is missing for one."""
    extension = _extension(path)
    if "://" in path:
        raise ResultError(f"--output {path}: a sweep writes a local file: choose one, and copy it when it is complete")
    if extension not in _FORMATS:
        near = suggest(extension, _FORMATS)
        raise ResultError(f"--output {path}: results are written as {', '.join(_FORMATS)}{near}")
    if extension == ".parquet":
        import_pyarrow()


def has_results(path: str) -> bool:
    """Return whether a file exists that has the extension of results."""
    return _extension(path) in _FORMATS and paths.exists(path)


def read_rows(path: str) -> dict[str, ModelCount]:
    """Return model → row of a file, {} where it does not exist; other contents raise ResultError."""
    if not paths.exists(path):
        return {}
    read, _ = _FORMATS[_extension(path)]
    rows, sealed, expected = {}, 0, 0
    for record in read(path):
        row, seal = _make_row(path, record)
        rows[row.model] = row
        sealed += bool(seal)
        expected += int(seal.partition("/")[2] or 0)
    if sealed != expected and _extension(path) in _TRUNCATABLE:
        found = f"has {sealed:,} of {expected:,} rows" if expected else "lacks its last rows"
        raise ResultError(f"{path} {found}: restore it, or if you removed rows empty the column {_CHECKSUM}")
    return rows


def write_rows(path: str, rows: Iterable[ModelCount]) -> None:
    """Write rows, sorted by model, at once, none without rows; numbers too large for the format raise ResultError."""
    _, write = _FORMATS[_extension(path)]
    records = [_seal(row) for row in sorted(rows, key=lambda row: row.model)]
    if not records:
        return
    if _extension(path) in _TRUNCATABLE:
        records[-1][_CHECKSUM] += f"/{len(records)}"
    for record in records if write in (_write_parquet, _write_sqlite) else ():
        for name, value in record.items():
            if isinstance(value, int) and value.bit_length() > 63:
                raise ResultError(
                    f"{path}: {name} of {record['model']} is {value:,}, too large for {_extension(path)}: "
                    "choose --output results.jsonl or .csv"
                )
    write(path, records)


def parse_rows(path: str, lines: bytes) -> Iterator[ModelCount]:
    """Yield the rows of JSON lines; errors name the file."""
    return (_make_row(path, record)[0] for record in _parse_lines(path, lines))


def encode_row(row: ModelCount, *, sealed: bool = True) -> str:
    """Return a row as one line of JSON with its checksum, or without in ASCII.

    >>> encode_row(ModelCount("zoo:lenet5", flops=416520))[:45]
    '{"model": "zoo:lenet5", "parameters": null, "'
    """
    return json.dumps(_seal(row) if sealed else asdict(row), ensure_ascii=not sealed) + "\n"


def _check_names(path: str, found: Iterable[str]) -> None:
    missing, other = set(_NAMES) - _OPTIONAL - set(found), set(found) - set(_COLUMNS)
    if missing or other:
        reason = f"lacks {list_names(sorted(missing))}" if missing else f"has {list_names(sorted(other))}"
        raise ResultError(f"{path} is not from a sweep by this version of fvflops: it {reason}")


def _seal(row: ModelCount, names: Iterable[str] = _NAMES) -> dict[str, Any]:
    """Return the named values of a row, in texts with escapes for bytes that are not UTF-8, and their checksum."""
    record: dict[str, Any] = {}
    for name in names:
        value = getattr(row, name)
        if isinstance(value, str):
            value = value.encode("utf-8", "backslashreplace").decode()
        record[name] = float(value) if _TYPES[name] is float else value
    return {**record, _CHECKSUM: checksum(json.dumps(list(record.values())))}


def _make_row(path: str, record: Mapping[str, Any]) -> tuple[ModelCount, str]:
    """Return the row of a record, and its checksum or ""; one that does not fit the row raises ResultError."""
    _check_names(path, record)
    names = [name for name in _NAMES if name in record]
    row = ModelCount(**{name: _convert(path, name, record[name]) for name in names})
    seal = str(record.get(_CHECKSUM) or "")
    if seal and not re.fullmatch(rf"{_seal(row, names)[_CHECKSUM]}(/\d{{1,18}})?", seal):
        raise ResultError(
            f"{path}: the row of {plain_name(row.model)} is damaged, its {_CHECKSUM} differs: restore the file, or if "
            f"you changed the row empty its {_CHECKSUM}"
        )
    return row, seal


def _convert(path: str, name: str, value: Any) -> Any:
    kind = _TYPES[name]
    if kind is str and (value is None or isinstance(value, str)):
        return value or ""
    if kind is not str and value in (None, ""):
        return 0.0 if kind is float else None
    with suppress(TypeError, ValueError, OverflowError):
        number = kind(value)
        is_equal = isinstance(value, str) or (number == value and not isinstance(value, bool))
        if kind is not str and is_equal and math.isfinite(number):
            return number
    raise ResultError(f"{path}: {name} is {plain_name(repr(value))}, not a {'text' if kind is str else 'number'}")


def _parse_lines(path: str, data: bytes) -> Iterator[dict[str, Any]]:
    for line in _decode(path, data).split("\n"):  # splitlines() splits at further characters
        if not line:
            continue
        try:
            record = parse_json(line, finite=True)
        except ValueError as error:
            raise ResultError(f"{path} is not JSON Lines: {error}") from None
        if not isinstance(record, dict):
            raise ResultError(f"{path} is not JSON Lines of a sweep: {plain_name(line[:60])!r}")
        yield record


def _decode(path: str, data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ResultError(f"{path} is not UTF-8 text: {error}") from None


def _extension(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _read_whole(path: str) -> bytes:
    """Return the contents of a file of lines; one without lines, or whose last line has no end, raises ResultError."""
    data = paths.read_bytes(path)
    if not data.endswith(b"\n"):
        reason = "is truncated: its last line is incomplete" if data else "is empty"
        raise ResultError(f"{path} {reason}: restore it, or delete it")
    return data


def _read_csv(path: str) -> Iterator[dict[str, Any]]:
    try:
        headings, *rows = csv.reader(io.StringIO(_decode(path, _read_whole(path)), newline=""), strict=True)
    except csv.Error as error:
        raise ResultError(f"{path} is not CSV: {error}") from None
    _check_names(path, headings)
    if not rows and _CHECKSUM in headings:
        raise ResultError(f"{path} lacks its rows: restore it, or delete it")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(headings):
            raise ResultError(
                f"{path}: row {number} has {format_quantity(len(row), 'cell')}, the header {len(headings)}: "
                "restore the file"
            )
        yield dict(zip(headings, row, strict=True))


def _write_csv(path: str, records: Sequence[dict[str, Any]]) -> None:
    paths.write_text(path, write_lines([_COLUMNS, *(record.values() for record in records)]))


def _read_parquet(path: str) -> Iterator[dict[str, Any]]:
    try:
        columns = read_columns(path)
    except ValueError as error:
        raise ResultError(str(error)) from None
    _check_names(path, columns)
    return (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


def _write_parquet(path: str, records: Sequence[dict[str, Any]]) -> None:
    arrow = import_pyarrow()
    types = {str: arrow.string(), float: arrow.float64(), int: arrow.int64()}
    schema = arrow.schema([(name, types[_TYPES[name]]) for name in _COLUMNS])
    file = io.BytesIO()
    arrow.parquet.write_table(arrow.Table.from_pylist(list(records), schema=schema), file)
    paths.write_bytes(path, file.getvalue())


def _read_sqlite(path: str) -> Iterator[dict[str, Any]]:
    # sqlite3 opens files itself: by way of a copy, a path may be a URI and the file is replaced at once.
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, "rows.sqlite")
        paths.write_bytes(copy, paths.read_bytes(path))
        with closing(sqlite3.connect(copy)) as database:
            database.row_factory = sqlite3.Row
            try:
                (state,) = database.execute("PRAGMA integrity_check(1)").fetchone()
                if state != "ok":
                    raise sqlite3.DatabaseError(state)
                cursor = database.execute(f"SELECT * FROM {_TABLE}")
                _check_names(path, [column[0] for column in cursor.description])
                rows = cursor.fetchall()
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                reason = plain_name(" ".join(str(error).split()))
                raise ResultError(f"{path} has no rows of a sweep, or is damaged: {reason}") from None
    yield from map(dict, rows)


def _write_sqlite(path: str, records: Sequence[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, "rows.sqlite")
        with closing(sqlite3.connect(copy)) as database, database:
            columns = ", ".join(f'"{name}" {_SQL_TYPES[_TYPES[name]]}' for name in _COLUMNS)
            database.execute(f"CREATE TABLE {_TABLE} ({columns}, PRIMARY KEY (model))")
            marks = ", ".join(f":{name}" for name in _COLUMNS)
            database.executemany(f"INSERT INTO {_TABLE} VALUES ({marks})", records)
        paths.write_bytes(path, paths.read_bytes(copy))


# Extension → how rows are read and written.
_FORMATS: Mapping[
    str, tuple[Callable[[str], Iterator[dict[str, Any]]], Callable[[str, Sequence[dict[str, Any]]], None]]
] = {
    ".parquet": (_read_parquet, _write_parquet),
    ".csv": (_read_csv, _write_csv),
    ".jsonl": (
        lambda path: _parse_lines(path, _read_whole(path)),
        lambda path, records: paths.write_text(path, (json.dumps(row, ensure_ascii=False) + "\n" for row in records)),
    ),
    ".sqlite": (_read_sqlite, _write_sqlite),
}
# Formats of which a part may be a valid file too.
_TRUNCATABLE = (".csv", ".jsonl")
