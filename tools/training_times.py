#!/usr/bin/env python3
"""Compares estimated times of training steps with measured ones, and fits what the estimates rest on.

    tools/training_times.py                     errors with the shipped configs/efficiencies.yaml and networks.yaml
    tools/training_times.py --set mpt --worst 5
    tools/training_times.py --data FOLDER       other rows: files named as those in tests/data/training_times
    tools/training_times.py --fit               fits each device, cross-validates by model and by mesh, and prints YAML
    tools/training_times.py --fit --cache FILE  keeps the plans, which take most of the time, for the next fit

The set "published" is not fitted to. In cross-validation the models (or meshes) of a device are divided into five
folds, and each fold's runs are predicted by a fit to the others.

Every run is planned as `fvflops plan` plans it (tools/training_runs): its model is executed by shapes on one rank of
each kind; what several runs have in common is executed once.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import numpy as np  # noqa: E402
from tabulate import tabulate  # noqa: E402
from training_runs.batch import Batch  # noqa: E402
from training_runs.fitting import SOFTWARE_OF, cross_validate, fit, predict_shipped  # noqa: E402
from training_runs.prepared import PreparedRun, key_of, prepare  # noqa: E402
from training_runs.rows import DATASETS, TrainingRun, read_runs  # noqa: E402

Prepared = list[PreparedRun]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the errors, or a fit; return the exit code."""
    parser = argparse.ArgumentParser(prog="tools/training_times.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--set", action="append", choices=DATASETS, help="only this dataset; may be repeated")
    parser.add_argument("--data", type=Path, help="folder with the files of the datasets")
    parser.add_argument("--fit", action="store_true", help="fit, cross-validate and print YAML")
    parser.add_argument("--worst", type=int, default=8, metavar="N", help="rows with the largest errors to show (8)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (one a core)")
    parser.add_argument("--cache", type=Path, help="file that keeps planned runs; delete it if planning changes")
    arguments = parser.parse_args(argv)
    start = time.perf_counter()
    runs = [run for name in arguments.set or DATASETS for run in _read(name, arguments.data)]
    prepared = _prepare_all(runs, arguments.jobs, arguments.cache)
    print(f"{len(prepared):,} runs planned in {time.perf_counter() - start:.0f} s")
    predicted = np.array([predict_shipped(item) for item in prepared])
    if arguments.fit:
        _report_fits(prepared, {"shipped": predicted, **_fit_all(prepared)})
    else:
        _report(prepared, predicted, arguments.worst)
    print(f"in all {time.perf_counter() - start:.0f} s")
    return 0


def _read(name: str, folder: Path | None) -> list[TrainingRun]:
    path = None if folder is None else folder / DATASETS[name][0]
    return [run for run in read_runs(name, path) if run.micro_batch is not None]


def _prepare_all(runs: Sequence[TrainingRun], jobs: int, cache: Path | None) -> Prepared:
    """Plan the runs in processes; runs that share a recording go to the same one."""
    kept: Prepared = pickle.loads(cache.read_bytes()) if cache is not None and cache.exists() else []
    by_place = {item.run.place: item for item in kept}
    groups: dict[object, list[TrainingRun]] = defaultdict(list)
    for run in runs:
        if run.place not in by_place or by_place[run.place].run != run:
            groups[key_of(run)].append(run)
    if groups:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            for group in pool.map(_prepare_group, groups.values(), chunksize=1):
                by_place.update({item.run.place: item for item in group})
        if cache is not None:
            cache.write_bytes(pickle.dumps(list(by_place.values())))
    return [by_place[run.place] for run in runs]


def _prepare_group(runs: Sequence[TrainingRun]) -> Prepared:
    import torch

    torch.set_num_threads(1)
    known: dict = {}
    return [prepare(run, known) for run in runs]


def _report(prepared: Prepared, predicted: np.ndarray, worst: int) -> None:
    errors = _errors(prepared, predicted)
    rows = [
        [name, len(own), *(f"{100 * value:.2f} %" for value in _summary(own))]
        for name, own in _by_set(prepared, errors).items()
    ]
    print(tabulate(rows, headers=["set", "runs", "mean error", "bias", "95th percentile"]))
    for index in np.argsort(-abs(errors))[:worst]:
        run = prepared[index].run
        mesh = ", ".join(f"{axis}={size}" for axis, size in run.mesh.items())
        print(
            f"{errors[index]:+7.1%}  {run.place}: {run.name} on {mesh} ({run.device}), micro batch {run.micro_batch}, "
            f"{run.microbatches} microbatches: measured {run.step_seconds:.3f} s, estimated {predicted[index]:.3f} s"
        )


def _errors(prepared: Prepared, predicted: np.ndarray) -> np.ndarray:
    return predicted / np.array([item.run.step_seconds for item in prepared]) - 1


def _by_set(prepared: Prepared, errors: np.ndarray) -> dict[str, np.ndarray]:
    names = np.array([item.run.dataset for item in prepared])
    return {name: errors[names == name] for name in dict.fromkeys(names.tolist())}


def _summary(errors: np.ndarray) -> tuple[float, float, float]:
    return abs(errors).mean(), errors.mean(), float(np.quantile(abs(errors), 0.95))


def _fit_all(prepared: Prepared) -> dict[str, np.ndarray]:
    """Print the fitted figures of each software; return by kind of fit the predicted seconds of all runs."""
    predicted = {kind: np.full(len(prepared), np.nan) for kind in ("fitted", *_GROUPS)}
    for software in filter(None, dict.fromkeys(SOFTWARE_OF[item.run.dataset] for item in prepared)):
        own = np.array([SOFTWARE_OF[item.run.dataset] == software for item in prepared])
        batch = Batch([prepared[index] for index in np.flatnonzero(own)])
        start = time.perf_counter()
        found = fit(software, batch)
        print(f"\n{software}: {len(batch.runs)} runs, fitted in {time.perf_counter() - start:.1f} s")
        print("".join(f"  {name}: {value:.4g}\n" for name, value in found.values.items()), end="", flush=True)
        predicted["fitted"][own] = batch.predict([found.point()])[0]
        for kind, group_of in _GROUPS.items():
            predicted[kind][own] = cross_validate(software, batch, group_of, _FOLDS)
    return predicted


_FOLDS = 5
_GROUPS: Mapping[str, Callable[[PreparedRun], object]] = {
    "held-out models": lambda item: item.run.name,
    "held-out meshes": lambda item: tuple(item.run.mesh.items()),
}


def _report_fits(prepared: Prepared, predicted: Mapping[str, np.ndarray]) -> None:
    """Print the mean errors of each set by kind of fit, and their 95th percentiles."""
    by_kind = {kind: _by_set(prepared, _errors(prepared, seconds)) for kind, seconds in predicted.items()}
    rows = []
    for name in dict.fromkeys(item.run.dataset for item in prepared):
        errors = [by_set[name] for by_set in by_kind.values()]
        summaries = [_summary(own) if np.isfinite(own).all() else None for own in errors]
        shown = ["" if item is None else f"{100 * item[0]:.2f} ({100 * item[2]:.1f})" for item in summaries]
        rows.append([name, len(errors[0]), *shown])
    print("\nmean absolute error (95th percentile), %")
    print(tabulate(rows, headers=["set", "runs", *by_kind], disable_numparse=True))


if __name__ == "__main__":
    sys.exit(main())
