#!/usr/bin/env python3
"""Compares estimated times of training steps with measured ones, and fits what the estimates rest on.

    tools/training_times.py                     errors with the shipped configs/efficiencies.yaml and networks.yaml
    tools/training_times.py --set mpt --worst 5
    tools/training_times.py --data FOLDER       other rows: files named as those in tests/data/training_times
    tools/training_times.py --fit               fits all devices, cross-validates by model and by mesh, and prints YAML

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
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import numpy as np  # noqa: E402
from tabulate import tabulate  # noqa: E402
from training_runs.fitting import cross_validate, fit, shipped  # noqa: E402
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
    parser.add_argument("--cache", type=Path, help="file in which prepared runs are kept, for repeated fits")
    arguments = parser.parse_args(argv)
    start = time.perf_counter()
    runs = [run for name in arguments.set or DATASETS for run in _read(name, arguments.data)]
    prepared = _prepare_all(runs, arguments.jobs, arguments.cache)
    print(f"{len(prepared):,} runs planned in {time.perf_counter() - start:.0f} s")
    if arguments.fit:
        _fit_all(prepared)
    else:
        _report(prepared, np.array([shipped(item).predict([item])[0] for item in prepared]), arguments.worst)
    print(f"in all {time.perf_counter() - start:.0f} s")
    return 0


def _read(name: str, folder: Path | None) -> list[TrainingRun]:
    path = None if folder is None else folder / DATASETS[name][0]
    return [run for run in read_runs(name, path) if run.micro_batch is not None]


def _prepare_all(runs: Sequence[TrainingRun], jobs: int, cache: Path | None) -> Prepared:
    """Plan the runs in processes; runs that share a recording go to the same one."""
    if cache is not None and cache.exists():
        return pickle.loads(cache.read_bytes())
    groups: dict[object, list[TrainingRun]] = defaultdict(list)
    for run in runs:
        groups[key_of(run)].append(run)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        prepared = [item for group in pool.map(_prepare_group, groups.values(), chunksize=1) for item in group]
    if cache is not None:
        cache.write_bytes(pickle.dumps(prepared))
    return prepared


def _prepare_group(runs: Sequence[TrainingRun]) -> Prepared:
    import torch

    torch.set_num_threads(1)
    known: dict = {}
    return [prepare(run, known) for run in runs]


def _report(prepared: Prepared, predicted: np.ndarray, worst: int) -> None:
    errors = predicted / np.array([item.run.step_seconds for item in prepared]) - 1
    rows = []
    for name in dict.fromkeys(item.run.dataset for item in prepared):
        own = np.array([error for item, error in zip(prepared, errors, strict=True) if item.run.dataset == name])
        rows.append([name, len(own), *(f"{100 * value:.2f} %" for value in _summary(own))])
    print(tabulate(rows, headers=["set", "runs", "mean error", "bias", "95th percentile"]))
    for index in np.argsort(-abs(errors))[:worst]:
        run = prepared[index].run
        mesh = ", ".join(f"{axis}={size}" for axis, size in run.mesh.items())
        print(
            f"{errors[index]:+7.1%}  {run.place}: {run.name} on {mesh} ({run.device}), micro batch {run.micro_batch}, "
            f"{run.microbatches} microbatches: measured {run.step_seconds:.3f} s, estimated {predicted[index]:.3f} s"
        )


def _summary(errors: np.ndarray) -> tuple[float, float, float]:
    return abs(errors).mean(), errors.mean(), float(np.quantile(abs(errors), 0.95))


def _fit_all(prepared: Prepared) -> None:
    for device in dict.fromkeys(item.run.device for item in prepared):
        runs = [item for item in prepared if item.run.device == device]
        found = fit(device, runs)
        print(f"\n{device}: {len(runs)} runs")
        print("".join(f"  {name}: {value:.4g}\n" for name, value in found.values.items()), end="")
        _report(runs, found.predict(runs), 8)
        groups = {"model": lambda item: item.run.name, "mesh": lambda item: tuple(item.run.mesh.items())}
        for what, group_of in groups.items():
            print(f"cross-validated, each {what} left out of the fit that predicts it:")
            _report(runs, cross_validate(device, runs, group_of, 5), 0)


if __name__ == "__main__":
    sys.exit(main())
