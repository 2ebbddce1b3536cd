"""The result of one model, and the CSV that holds a row for each."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Result:
    """What came out for one model; a failed one has an `error`, one line, and only the figures that are known.

    `counted`, `free` and `omitted` are calls of ops by what the table says of them; `unknown_ops` are those that it has
    no row for, with their calls: "aten::foo 2; aten::bar 1". `unseen` are those of them that ran outside the
    dispatcher, with the place: "unseen::f 2 in 'scan' at net.py:42". `execution` is "shapes" or "real". `built` and
    `inputs` say what was counted, on what.
    """

    model: str
    params: int | None = None
    flops: int | None = None
    activations: int | None = None
    counted: int | None = None
    free: int | None = None
    omitted: int | None = None
    unknown_ops: str = ""
    unseen: str = ""
    seconds: float = 0.0
    execution: str = ""
    error: str = ""
    built: str = ""
    inputs: str = ""


COLUMNS = tuple(field.name for field in fields(Result))
# The columns of earlier sweeps, which did not look for work outside the dispatcher.
_EARLIER = tuple(name for name in COLUMNS if name != "unseen")


class NotASweep(ValueError):
    """A CSV that holds something else than the results of a sweep."""


def read_results(path: Path) -> dict[str, Result]:
    """Return model → result of a CSV, {} where there is none; a row cut short by a crash is left out."""
    if not path.exists() or path.stat().st_size == 0:
        return {}
    with path.open(newline="") as file:
        reader = csv.reader(file)
        header = tuple(next(reader, ()))
        if header == _EARLIER:
            raise NotASweep(f"{path} is of an earlier sweep, without the column 'unseen'")
        if header != COLUMNS:
            raise NotASweep(f"{path} starts with {','.join(header)[:80]!r}, not with the columns of a sweep")
        # The last line of a sweep that was killed may have no end: such a row is counted again.
        rows = [row for row in reader if len(row) == len(COLUMNS)]
    return {row[0]: _parse(dict(zip(COLUMNS, row, strict=True))) for row in rows}


def write_results(path: Path, results: Iterable[Result]) -> None:
    """Write a CSV anew, so that at any moment there is either the old or the new one."""
    beside = path.with_name(path.name + ".new")
    with beside.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(result) for result in results)
    os.replace(beside, path)


def append_result(path: Path, result: Result) -> None:
    """Add one row to a CSV, on disk when this returns."""
    with path.open("a", newline="") as file:
        csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(asdict(result))


def _parse(row: dict[str, str]) -> Result:
    def count(name: str) -> int | None:
        return int(row[name]) if row[name] else None

    return Result(
        model=row["model"],
        params=count("params"),
        flops=count("flops"),
        activations=count("activations"),
        counted=count("counted"),
        free=count("free"),
        omitted=count("omitted"),
        unknown_ops=row["unknown_ops"],
        unseen=row["unseen"],
        seconds=float(row["seconds"] or 0),
        execution=row["execution"],
        error=row["error"],
        built=row["built"],
        inputs=row["inputs"],
    )
