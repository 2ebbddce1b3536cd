"""Count named models into a file, going on where an earlier sweep ended."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TextIO

from fvflops import paths
from fvflops.formulas import resolve_table
from fvflops.sources.options import SourceOptions
from fvflops.sweep.count_model import CountSettings, Executor, OnTick, Task, describe_options, ignore_tick
from fvflops.sweep.model_count import ModelCount
from fvflops.sweep.result_files import ResultError, check_format, encode_row, parse_rows, read_rows, write_rows
from fvflops.units import format_quantity


class Journal:
    """Rows of a sweep beside the file that its output is or, as a symbolic link, leads to."""

    def __init__(self, output: str) -> None:
        self.path = f"{os.path.realpath(output)}.journal"

    def read(self) -> dict[str, ModelCount]:
        """Return model → its last row; an incomplete last line, of a sweep that was killed, is ignored."""
        try:
            data = self._read_lines()
        except FileNotFoundError:
            return {}
        return {row.model: row for row in parse_rows(self.path, data)}

    @contextmanager
    def open(self) -> Iterator[Callable[[ModelCount], None]]:
        """Yield a function that appends a durable row; ResultError while another sweep has the journal open."""
        with _open_locked(self.path) as file:
            os.truncate(file.fileno(), len(self._read_lines()))

            def append(row: ModelCount) -> None:
                file.write(encode_row(row))
                file.flush()

            yield append

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            os.remove(self.path)

    def _read_lines(self) -> bytes:
        data = paths.read_bytes(self.path)
        return data[: data.rfind(b"\n") + 1]


def _open_locked(path: str) -> TextIO:
    """Return a file that is locked until it is closed; a holder of the lock may remove the file before it closes it."""
    while True:
        file = paths.open_text(path, "a")
        try:
            _lock(file, path)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    return file
        except BaseException:
            file.close()
            raise
        file.close()


def _lock(file: TextIO, path: str) -> None:
    """Lock a file where the system has such locks; they end with the process."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ResultError(f"{path} is open in another sweep: wait until it ends, or choose another --output") from None
    except OSError as error:
        raise ResultError(f"{path} cannot be locked ({error.strerror}): choose an --output on another disk") from None


@dataclass(frozen=True, slots=True)
class Plan:
    """State of a sweep: its tasks, longest first as far as known, and the rows that there are already."""

    output: str
    tasks: tuple[Task, ...]
    rows: dict[str, ModelCount]


def plan_sweep(
    names: Sequence[str],
    output: str,
    options: SourceOptions,
    settings: CountSettings,
    *,
    again: bool = False,
    retry_failed: bool = False,
) -> Plan:
    """Return the tasks for the models without a row in the output or its journal.

    With `again` all models are counted again, with `retry_failed` also models whose row has an error. Rows that would
    be kept but were counted by another table, or with other options, raise ResultError, as do files that contain no
    rows of a sweep.
    """
    check_format(output)
    try:
        rows = {**read_rows(output), **Journal(output).read()}
    except ResultError as error:
        raise ResultError(f"{error}: choose another --output") from error
    done = {name for name in names if name in rows and not again and not (retry_failed and rows[name].failure)}
    _check_kept(output, [rows[name] for name in names if name in done], options, settings)
    # The longest must not come last, when other workers have nothing left to do. Only an earlier row tells how long a
    # model takes; without one, listed order costs a sweep at most the time of its longest model.
    waiting = sorted(
        (name for name in names if name not in done),
        key=lambda name: rows[name].seconds if name in rows else float("inf"),
        reverse=True,
    )
    return Plan(output, tuple(Task(name, None, options, settings) for name in waiting), rows)


def run_sweep(plan: Plan, executor: Executor, on_tick: OnTick = ignore_tick) -> Iterator[ModelCount]:
    """Yield each row once it is in the journal, from which the next sweep continues; at the end write the output."""
    journal = Journal(plan.output)
    with journal.open() as append:
        # Another sweep of this output may have ended since the plan was made.
        rows = {**plan.rows, **read_rows(plan.output), **journal.read()}
        try:
            for row in executor(plan.tasks, on_tick):
                append(row)
                rows[row.model] = row
                yield row
        finally:
            write_rows(plan.output, rows.values())
            journal.remove()


def _check_kept(output: str, rows: Collection[ModelCount], options: SourceOptions, settings: CountSettings) -> None:
    table, described = resolve_table(settings.table).name, describe_options(options, settings)
    for row in rows:
        for what, kept, wanted in (("table", row.table, table), ("options", row.options, described)):
            if kept != wanted:
                raise ResultError(
                    f"{output} has {row.model} counted with the {what} {kept or 'of the defaults'}, not "
                    f"{wanted or 'the defaults'}: add --again to count it again, or choose another --output"
                )


def summarise(rows: Collection[ModelCount]) -> str:
    """Return how many models were counted, and how many failed for which reason.

    >>> summarise([ModelCount("a"), ModelCount("b", failure="timeout"), ModelCount("c", failure="timeout")])
    '3 models: 1 counted, 2 failed (2 timeout)'
    """
    failures = Counter(row.failure for row in rows if row.failure)
    failed = failures.total()
    reasons = ", ".join(f"{count} {failure}" for failure, count in sorted(failures.items()))
    text = f"{format_quantity(len(rows), 'model')}: {len(rows) - failed:,} counted"
    return text + (f", {failed:,} failed ({reasons})" if failed else "")
