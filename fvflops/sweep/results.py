"""Files of rows: Parquet, CSV, JSON lines or SQLite by their extension, and the journal of a sweep that is running.

A sweep appends each row to a journal beside its output, JSON lines, and writes the output once at its end: Parquet
cannot be appended to, and one way for all formats loses no row where a sweep is killed. The next sweep reads both.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, fields
from typing import Any, TextIO

from fvflops import paths
from fvflops.sources.imports import import_library
from fvflops.sweep.joined import list_names
from fvflops.sweep.model_count import COLUMNS, ModelCount
from fvflops.text import suggest

_NAMES = tuple(field.name for field in fields(ModelCount))
_TEXTS = frozenset(column.key for column in COLUMNS if column.is_text)
_FLOATS = frozenset({"seconds"})
_TABLE = "models"  # of an SQLite file
_INTEGER_BITS = 63  # of Parquet and SQLite
_SQL_TYPES = {"text": "TEXT", "float": "REAL", "integer": "INTEGER"}


class ResultError(ValueError):
    """A file that does not contain the rows of a sweep, or cannot contain them."""


def check_format(path: str) -> None:
    """Raise ResultError for an extension that is not of a format, or ValueError where pyarrow is missing for one."""
    extension = _extension(path)
    if "://" in path:
        raise ResultError(f"--output {path}: a sweep writes a local file: choose one, and copy it when it is complete")
    if extension not in _FORMATS:
        raise ResultError(
            f"--output {path}: results are written as {', '.join(_FORMATS)}{suggest(extension, _FORMATS)}"
        )
    if extension == ".parquet":
        _import_pyarrow()


def has_results(path: str) -> bool:
    """Return whether a file exists that has the extension of results."""
    return _extension(path) in _FORMATS and paths.exists(path)


def read_rows(path: str) -> dict[str, ModelCount]:
    """Return model → row of a file, {} where it does not exist; other contents raise ResultError."""
    if not paths.exists(path):
        return {}
    read, _ = _FORMATS[_extension(path)]
    return {row.model: row for row in (_make_row(path, record) for record in read(path))}


def write_rows(path: str, rows: Iterable[ModelCount]) -> None:
    """Write rows, sorted by model, to a file that is replaced only once it is complete.

    Numbers of 2^63 and above, which Parquet and SQLite cannot hold, raise ResultError.
    """
    _, write = _FORMATS[_extension(path)]
    records = [asdict(row) for row in sorted(rows, key=lambda row: row.model)]
    if write in (_write_parquet, _write_sqlite):
        for record in records:
            for name, value in record.items():
                if isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
                    raise ResultError(
                        f"{path}: {name} of {record['model']} is {value:,}, too large for {_extension(path)}: "
                        "choose --output results.jsonl or .csv"
                    )
    write(path, records)


def encode_row(row: ModelCount, *, ascii: bool = False) -> str:
    """Return a row as one line of JSON, with `ascii` in ASCII.

    >>> encode_row(ModelCount("zoo:lenet5", flops=416520))[:45]
    '{"model": "zoo:lenet5", "parameters": null, "'
    """
    return json.dumps(asdict(row), ensure_ascii=ascii) + "\n"


class Journal:
    """Rows of a sweep that has not written its output yet, in a file beside it.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     journal = Journal(f"{folder}/results.parquet")
    ...     with journal.open() as append:
    ...         append(ModelCount("zoo:lenet5", flops=416520))
    ...     [row.flops for row in journal.read().values()]
    [416520]
    """

    def __init__(self, output: str) -> None:
        self.path = f"{output}.journal"

    def read(self) -> dict[str, ModelCount]:
        """Return model → its last row; an incomplete last line, of a sweep that was killed, is ignored."""
        if not paths.exists(self.path):
            return {}
        lines = self._read_lines().decode().split("\n")[:-1]  # splitlines() splits at further characters
        return {row.model: row for row in (_make_row(self.path, _parse_line(self.path, line)) for line in lines)}

    @contextmanager
    def open(self) -> Iterator[Callable[[ModelCount], None]]:
        """Yield a function that appends a row: once it returns, the row outlives this process.

        While another sweep has the journal open, raise ResultError.
        """
        with paths.open_text(self.path, "a") as file:
            _lock(file, self.path)
            os.truncate(self.path, len(self._read_lines()))

            def append(row: ModelCount) -> None:
                file.write(encode_row(row))
                file.flush()

            yield append

    def remove(self) -> None:
        """Remove the journal, whose rows are in the output."""
        with suppress(FileNotFoundError):
            os.remove(self.path)

    def _read_lines(self) -> bytes:
        data = paths.read_bytes(self.path)
        return data[: data.rfind(b"\n") + 1]


def _lock(file: TextIO, path: str) -> None:
    """Lock a file until it is closed, where the system has such locks; they end with the process."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ResultError(f"{path} is open in another sweep: wait until it ends, or choose another --output") from None


def _check_names(path: str, found: Iterable[str]) -> None:
    missing, other = set(_NAMES) - set(found), set(found) - set(_NAMES)
    if missing or other:
        reason = f"lacks {list_names(sorted(missing))}" if missing else f"has {list_names(sorted(other))}"
        raise ResultError(f"{path} is not of a sweep of this version of fvflops, it {reason}")


def _make_row(path: str, record: Mapping[str, Any]) -> ModelCount:
    _check_names(path, record)
    return ModelCount(**{name: _convert(path, name, record[name]) for name in _NAMES})


def _convert(path: str, name: str, value: Any) -> Any:
    try:
        if name in _TEXTS:
            return "" if value is None else str(value)
        if value in (None, ""):
            return 0.0 if name in _FLOATS else None
        return float(value) if name in _FLOATS else int(value)
    except (TypeError, ValueError):
        raise ResultError(f"{path}: {name} is {value!r}, not a number") from None


def _parse_line(path: str, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ResultError(f"{path} is not in JSON lines: {error}") from None
    if not isinstance(record, dict):
        raise ResultError(f"{path} is not in JSON lines of a sweep: {line[:60]!r}")
    return record


def _extension(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _read_lines(path: str) -> Iterator[dict[str, Any]]:
    for line in _read_text(path).split("\n"):
        if line:
            yield _parse_line(path, line)


def _read_text(path: str) -> str:
    try:
        return paths.read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ResultError(f"{path} is not UTF-8 text: {error}") from None


def _write_lines(path: str, records: Sequence[dict[str, Any]]) -> None:
    paths.write_text(path, (json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def _read_csv(path: str) -> Iterator[dict[str, Any]]:
    reader = csv.DictReader(io.StringIO(_read_text(path), newline=""), restkey="cells without a heading")
    _check_names(path, map(str, reader.fieldnames or ()))
    yield from reader


def _write_csv(path: str, records: Sequence[dict[str, Any]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, _NAMES, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    paths.write_text(path, text.getvalue())


def _read_parquet(path: str) -> Iterator[dict[str, Any]]:
    arrow = _import_pyarrow()
    try:
        table = arrow.parquet.read_table(io.BytesIO(paths.read_bytes(path)))
    except arrow.ArrowInvalid as error:
        raise ResultError(f"{path} is not a Parquet file: {error}") from None
    _check_names(path, table.column_names)
    yield from table.to_pylist()


def _write_parquet(path: str, records: Sequence[dict[str, Any]]) -> None:
    arrow = _import_pyarrow()
    types = {"text": arrow.string(), "float": arrow.float64(), "integer": arrow.int64()}
    schema = arrow.schema([(name, types[_kind(name)]) for name in _NAMES])
    file = io.BytesIO()
    arrow.parquet.write_table(arrow.Table.from_pylist(list(records), schema=schema), file)
    paths.write_bytes(path, file.getvalue())


def _import_pyarrow() -> Any:
    import_library("pyarrow.parquet", extra="parquet")
    return import_library("pyarrow")


def _read_sqlite(path: str) -> Iterator[dict[str, Any]]:
    # sqlite3 opens files itself: by way of a copy, a path may be a URI and the file is replaced at once.
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, "rows.sqlite")
        paths.write_bytes(copy, paths.read_bytes(path))
        with closing(sqlite3.connect(copy)) as database:
            database.row_factory = sqlite3.Row
            try:
                cursor = database.execute(f"SELECT * FROM {_TABLE}")
                _check_names(path, [column[0] for column in cursor.description])
                rows = cursor.fetchall()
            except sqlite3.DatabaseError as error:
                raise ResultError(f"{path} has no rows of a sweep: {error}") from None
    yield from map(dict, rows)


def _write_sqlite(path: str, records: Sequence[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, "rows.sqlite")
        with closing(sqlite3.connect(copy)) as database, database:
            columns = ", ".join(f'"{name}" {_SQL_TYPES[_kind(name)]}' for name in _NAMES)
            database.execute(f"CREATE TABLE {_TABLE} ({columns}, PRIMARY KEY (model))")
            marks = ", ".join(f":{name}" for name in _NAMES)
            database.executemany(f"INSERT INTO {_TABLE} VALUES ({marks})", records)
        paths.write_bytes(path, paths.read_bytes(copy))


def _kind(name: str) -> str:
    return "text" if name in _TEXTS else "float" if name in _FLOATS else "integer"


_Reader = Callable[[str], Iterator[dict[str, Any]]]
_Writer = Callable[[str, Sequence[dict[str, Any]]], None]

# Extension → how rows are read and written.
_FORMATS: Mapping[str, tuple[_Reader, _Writer]] = {
    ".parquet": (_read_parquet, _write_parquet),
    ".csv": (_read_csv, _write_csv),
    ".jsonl": (_read_lines, _write_lines),
    ".sqlite": (_read_sqlite, _write_sqlite),
}
