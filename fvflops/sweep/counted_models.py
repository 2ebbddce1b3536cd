"""Count named models into a file, going on where an earlier sweep ended."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from fvflops.formulas import resolve_table
from fvflops.sources.options import SourceOptions
from fvflops.sweep.count_model import CountSettings, describe_options
from fvflops.sweep.journal import Journal
from fvflops.sweep.model_count import ModelCount
from fvflops.sweep.result_files import ResultError, check_format, read_rows, write_rows
from fvflops.sweep.task import Executor, OnTick, Task


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep has to do: the tasks, longest first as far as known, and the rows that there are already."""

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

    With `again` all models are counted again, with `retry_failed` also those whose row has an error. Rows that would be
    kept but were counted by another table, or with other options, raise ResultError, as do files that contain no rows
    of a sweep.
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


def run_sweep(plan: Plan, executor: Executor, on_tick: OnTick = lambda names: None) -> Iterator[ModelCount]:
    """Yield the row of each task once it is saved; write the output at the end, also of a sweep that is interrupted.

    A sweep that is killed leaves its rows in the journal, from which the next one goes on.
    """
    journal = Journal(plan.output)
    with journal.open() as append:
        # Another sweep of this output may have ended since the plan was made.
        rows = {**plan.rows, **read_rows(plan.output), **journal.read()}
        try:
            for row in executor.run(plan.tasks, on_tick):
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
    failures: dict[str, int] = {}
    for row in rows:
        if row.failure:
            failures[row.failure] = failures.get(row.failure, 0) + 1
    failed = sum(failures.values())
    reasons = ", ".join(f"{count} {failure}" for failure, count in sorted(failures.items()))
    text = f"{len(rows):,} model{'' if len(rows) == 1 else 's'}: {len(rows) - failed:,} counted"
    return text + (f", {failed:,} failed ({reasons})" if failed else "")
