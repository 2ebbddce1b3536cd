"""Tables of errors of predicted times of serving runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean, median

from tabulate import tabulate

from fvflops.devices.measured_errors import ServingErrors
from serving_runs.launch_scripts import ServingRun
from serving_runs.prediction import Times

_HEADERS = ["runs", "", "number", "TPOT mean", "bias", "TTFT median", "bias", "throughput mean"]
# How runs are put together in tables.
GROUPS: Mapping[str, Callable[[ServingRun], str]] = {
    "engine": lambda run: run.engine,
    "GPU": lambda run: run.gpu,
    "model": lambda run: run.name,
}


def error_table(runs: Sequence[ServingRun], predicted: Mapping[str, Sequence[Times]]) -> str:
    """Return the errors of kinds of predictions in percent, of all runs and by engine, GPU and model.

    Errors are relative: means of absolute ones of TPOT and throughput, the median of TTFT's; biases are medians.
    """
    rows = [_row("all", kind, runs, times) for kind, times in predicted.items()]
    for group_of in GROUPS.values():
        groups: dict[str, list[int]] = defaultdict(list)
        for index, run in enumerate(runs):
            groups[group_of(run)].append(index)
        for name, indexes in sorted(groups.items()):
            for kind, times in predicted.items():
                rows.append(_row(name, kind, [runs[i] for i in indexes], [times[i] for i in indexes]))
    return tabulate(rows, headers=_HEADERS)


def _row(name: str, kind: str, runs: Sequence[ServingRun], times: Sequence[Times]) -> list[str]:
    tpot = [found.tpot / run.tpot - 1 for run, found in zip(runs, times, strict=True)]
    ttft = [found.ttft / run.ttft - 1 for run, found in zip(runs, times, strict=True)]
    rates = [
        run.throughput(*found) / run.throughput(run.ttft, run.tpot) - 1 for run, found in zip(runs, times, strict=True)
    ]
    return [
        name,
        kind,
        str(len(runs)),
        f"{mean(map(abs, tpot)):.1%}",
        f"{median(tpot):+.1%}",
        f"{median(map(abs, ttft)):.1%}",
        f"{median(ttft):+.1%}",
        f"{mean(map(abs, rates)):.1%}",
    ]


def list_errors(
    runs: Sequence[ServingRun], fitted: Sequence[Times], unseen: Sequence[Times]
) -> Iterator[ServingErrors]:
    """Yield the errors of the runs of each engine, as fitted and with each run's model left out."""
    for engine in dict.fromkeys(run.engine for run in runs):
        own = [index for index, run in enumerate(runs) if run.engine == engine]

        def errors(times: Sequence[Times], own: Sequence[int] = own) -> tuple[float, float]:
            tpot = mean(abs(times[index].tpot / runs[index].tpot - 1) for index in own)
            ttft = median(abs(times[index].ttft / runs[index].ttft - 1) for index in own)
            return round(100 * tpot, 1), round(100 * ttft, 1)

        (tpot, ttft), (tpot_held_out, ttft_held_out) = errors(fitted), errors(unseen)
        yield ServingErrors(
            engine=engine,
            runs=len(own),
            tpot=tpot,
            ttft=ttft,
            tpot_held_out=tpot_held_out,
            ttft_held_out=ttft_held_out,
        )


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
