"""Tables of errors of predicted times of serving runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from pandas import DataFrame
from tabulate import tabulate

from fvflops.devices.measured_errors import ServingErrors
from serving_runs.launch_scripts import ServingRun
from serving_runs.prediction import Times

_HEADERS = ["runs", "", "number", "TPOT mean", "bias", "TTFT median", "bias", "throughput mean"]


def find_errors(runs: Sequence[ServingRun], times: Sequence[Times]) -> DataFrame:
    """Return a row for each run: its engine, GPU and model, and the relative errors of predicted times."""
    rows = [
        {
            "engine": run.engine,
            "GPU": run.gpu,
            "model": run.name,
            "tpot": found.tpot / run.tpot - 1,
            "ttft": found.ttft / run.ttft - 1,
            "throughput": run.throughput(*found) / run.throughput(run.ttft, run.tpot) - 1,
        }
        for run, found in zip(runs, times, strict=True)
    ]
    return DataFrame(rows)


def error_table(runs: Sequence[ServingRun], predicted: Mapping[str, Sequence[Times]]) -> str:
    """Return the errors of kinds of predictions in percent, of all runs and by engine, GPU and model.

    Errors are relative: means of absolute ones of TPOT and throughput, the median of TTFT's; biases are medians.
    """
    errors = {kind: find_errors(runs, times) for kind, times in predicted.items()}
    rows = [_row("all", kind, found) for kind, found in errors.items()]
    for column in ("engine", "GPU", "model"):
        for name in sorted({*next(iter(errors.values()))[column]}):
            rows += [_row(name, kind, found[found[column] == name]) for kind, found in errors.items()]
    return tabulate(rows, headers=_HEADERS)


def _row(name: str, kind: str, errors: DataFrame) -> list[str]:
    tpot, ttft, rates = errors.tpot, errors.ttft, errors.throughput
    return [
        *(name, kind, str(len(errors)), f"{tpot.abs().mean():.1%}", f"{tpot.median():+.1%}"),
        *(f"{ttft.abs().median():.1%}", f"{ttft.median():+.1%}", f"{rates.abs().mean():.1%}"),
    ]


def list_errors(
    runs: Sequence[ServingRun], fitted: Sequence[Times], unseen: Sequence[Times]
) -> Iterator[ServingErrors]:
    """Yield the errors of the runs of each engine, as fitted and with each run's model left out."""
    held_out = find_errors(runs, unseen)
    for engine, own in find_errors(runs, fitted).groupby("engine", sort=False):
        figures = {}
        for errors, suffix in ((own, ""), (held_out.loc[own.index], "_held_out")):
            figures[f"tpot{suffix}"] = round(float(100 * errors.tpot.abs().mean()), 1)
            figures[f"ttft{suffix}"] = round(float(100 * errors.ttft.abs().median()), 1)
        yield ServingErrors(engine=str(engine), runs=len(own), **figures)


def worst_runs(runs: Sequence[ServingRun], times: Sequence[Times], number: int) -> str:
    """Return lines that describe the runs with the largest errors of TPOT."""
    order = sorted(range(len(runs)), key=lambda i: -abs(times[i].tpot / runs[i].tpot - 1))
    lines = []
    for index in order[:number]:
        run, found = runs[index], times[index]
        lines.append(
            f"{found.tpot / run.tpot - 1:+7.1%}  {run.describe()}: measured {run.tpot * 1e3:.1f} ms a token after "
            f"{run.ttft:.2f} s, predicted {found.tpot * 1e3:.1f} ms after {found.ttft:.2f} s"
        )
    return "\n".join(lines)


def unused_runs(runs: Sequence[ServingRun]) -> str:
    """Return lines that say which runs are left out and why."""
    groups: dict[str, list[ServingRun]] = defaultdict(list)
    for run in runs:
        if run.unused:
            groups[run.unused].append(run)
    return "\n".join(
        f"{len(items):4}  {reason}: {items[0].describe()}" + (" and others" if len(items) > 1 else "")
        for reason, items in sorted(groups.items(), key=lambda item: -len(item[1]))
    )
