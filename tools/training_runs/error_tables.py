"""Errors of estimated step times by source, and how well estimates rank the layouts of a study."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.stats import kendalltau
from tabulate import tabulate

from training_runs.rows import TrainingRun

_FEWEST = 3


def relative_errors(runs: Sequence[TrainingRun], predicted: np.ndarray) -> np.ndarray:
    """Return predicted over measured seconds, less 1."""
    return predicted / np.array([run.seconds for run in runs]) - 1


def source_table(runs: Sequence[TrainingRun], predicted: Mapping[str, np.ndarray]) -> str:
    """Return a table of the mean absolute error, bias and 95th percentile of each source, by kind of prediction.

    A kind that did not predict a source has an empty cell.
    """
    kinds = [relative_errors(runs, seconds) for seconds in predicted.values()]
    sources = np.array([run.source for run in runs])
    groups = {source: sources == source for source in dict.fromkeys(sources.tolist())}
    groups["all"] = np.full(len(runs), True)
    rows = [[name, own.sum(), *(_summarise(errors[own]) for errors in kinds)] for name, own in groups.items()]
    headers = ["source", "runs", *(f"{kind}: mean, bias, 95 %" for kind in predicted)]
    return tabulate(rows, headers=headers, disable_numparse=True)


def _summarise(errors: np.ndarray) -> str:
    known = errors[np.isfinite(errors)]
    if not len(known):
        return ""
    values = abs(known).mean(), known.mean(), float(np.quantile(abs(known), 0.95))
    return f"{100 * values[0]:5.1f} {100 * values[1]:+6.1f} {100 * values[2]:6.1f}"


def choice_regret(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Return the fraction by which the layout with the least predicted time takes longer than the best.

    >>> round(choice_regret([2.0, 1.0, 3.0], [5.0, 6.0, 7.0]), 3)
    1.0
    """
    return measured[int(np.argmin(predicted))] / min(measured) - 1


def study_table(runs: Sequence[TrainingRun], predicted: np.ndarray) -> str:
    """Return a table of rank correlation and regret of each model, sequence length and number of GPUs of the study.

    Groups of fewer than three runs have no row; the last row has the means.
    """
    groups: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        if run.publisher == "layout":
            groups[run.name, run.sequence, run.gpus].append(index)
    rows: list[list[str | int]] = []
    values = []
    for (name, sequence, gpus), indexes in sorted(groups.items()):
        if len(indexes) >= _FEWEST:
            measured = [float(runs[index].seconds or np.nan) for index in indexes]
            estimated = [float(predicted[index]) for index in indexes]
            values.append((kendalltau(measured, estimated).statistic, choice_regret(measured, estimated)))
            tau, regret = values[-1]
            rows.append([name, f"{sequence:,}", gpus, len(indexes), f"{tau:.2f}", f"{100 * regret:.1f} %"])
    if not rows:
        return ""
    tau, regret = np.mean(values, axis=0)
    rows.append(["mean", "", "", sum(map(len, groups.values())), f"{tau:.2f}", f"{100 * regret:.1f} %"])
    headers = ["model", "sequence", "GPUs", "runs", "Kendall tau", "regret"]
    return tabulate(rows, headers=headers, disable_numparse=True)
