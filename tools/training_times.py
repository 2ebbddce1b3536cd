#!/usr/bin/env python3
"""Compares estimated times of training steps with measured ones, and fits the figures of the estimates.

    tools/training_times.py                     errors with the shipped configs/efficiencies.yaml and networks.yaml
    tools/training_times.py --only MPT --worst 5
    tools/training_times.py --fit               fits each software, and prints YAML
    tools/training_times.py --held-out          predicts each source by a fit to all others of its software
    tools/training_times.py --write             writes both errors to configs/measured_errors.yaml and the page of them
    tools/training_times.py --fit --cache FILE  keeps the plans, which take most of the time, for the next fit

The figures in configs/ are fitted to the sources that sources.yaml says. A second table has for a study of layouts the
rank correlation of estimated with measured times, and by how much the layout with the least estimate is slower than the
best.

Every run is planned as `fvflops plan` plans it (tools/training_runs): its model is executed by shapes on one rank of
each kind; equal parts of several runs are executed once.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import numpy as np  # noqa: E402
from error_figures import write_errors  # noqa: E402
from training_runs.batch import Batch  # noqa: E402
from training_runs.error_tables import relative_errors, source_table, study_table  # noqa: E402
from training_runs.fitting import fit, hold_out, point_of, predict_shipped  # noqa: E402
from training_runs.prepared import PreparedRun, is_planned, key_of, prepare  # noqa: E402
from training_runs.rows import TrainingRun, read_runs  # noqa: E402

from fvflops.devices.measured_errors import NODES, ONE_NODE, RunErrors  # noqa: E402
from fvflops.garbage_collector import gc_paused  # noqa: E402

Prepared = list[PreparedRun]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/training_times.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", help="only sources that begin with this word; may be repeated")
    parser.add_argument("--fit", action="store_true", help="fit, and print YAML")
    parser.add_argument("--held-out", action="store_true", help="predict each source by a fit without it")
    parser.add_argument("--write", action="store_true", help="write the errors that reports show (with --held-out)")
    parser.add_argument("--worst", type=int, default=8, metavar="N", help="rows with the largest errors to show (8)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (one a core)")
    parser.add_argument("--cache", type=Path, help="file that keeps planned runs; delete it if planning changes")
    arguments = parser.parse_args(argv)
    start = time.perf_counter()
    runs = [run for run in read_runs() if is_planned(run) and run.publisher in (arguments.only or [run.publisher])]
    prepared = _prepare_all(runs, arguments.jobs, arguments.cache)
    print(f"{len(prepared):,} runs planned in {time.perf_counter() - start:.0f} s")
    kinds = {"shipped": np.array([predict_shipped(item) for item in prepared])}
    if arguments.fit:
        kinds["fitted"] = _fit_all(prepared)
        print("\nerrors in %\n" + source_table([item.run for item in prepared], kinds))
    else:
        if arguments.held_out or arguments.write:
            kinds["held out by source"] = _hold_out(prepared)
        _report(prepared, kinds, arguments.worst)
        if arguments.write:
            write_errors("runs", list_errors(prepared, *kinds.values()))
    print(f"in all {time.perf_counter() - start:.0f} s")
    return 0


def _prepare_all(runs: Sequence[TrainingRun], jobs: int, cache: Path | None) -> Prepared:
    """Plan the runs in processes; runs that share a recording go to the same one."""
    kept: Prepared = pickle.loads(cache.read_bytes()) if cache is not None and cache.exists() else []
    known = {item.run.line: item for item in kept}
    groups: dict[object, list[TrainingRun]] = defaultdict(list)
    for run in runs:
        if run.line not in known or known[run.line].run != run:
            groups[key_of(run)].append(run)
    if groups:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            for group in pool.map(_prepare_group, groups.values(), chunksize=1):
                known.update({item.run.line: item for item in group})
        if cache is not None:
            cache.write_bytes(pickle.dumps(list(known.values())))
    return [known[run.line] for run in runs]


@gc_paused()
def _prepare_group(runs: Sequence[TrainingRun]) -> Prepared:
    import torch

    torch.set_num_threads(1)
    known: dict = {}
    return [prepare(run, known) for run in runs]


def _report(prepared: Prepared, predicted: Mapping[str, np.ndarray], worst: int) -> None:
    """Print the errors of each source, the layouts of studies, and the largest errors of the first prediction."""
    runs = [item.run for item in prepared]
    print("errors in %\n" + source_table(runs, predicted))
    for kind, seconds in predicted.items():
        table = study_table(runs, seconds)
        if table:
            print(f"\nlayouts, {kind}\n{table}")
    seconds = next(iter(predicted.values()))
    errors = relative_errors(runs, seconds)
    print()
    for index in np.argsort(-abs(errors))[:worst]:
        run = runs[index]
        mesh = ", ".join(f"{axis}={size}" for axis, size in run.mesh.items())
        print(
            f"{errors[index]:+7.1%}  {run}, {mesh}, micro batch {run.micro_batch}, "
            f"{run.microbatches} microbatches: measured {run.seconds:.3f} s, estimated {seconds[index]:.3f} s"
        )


def _hold_out(prepared: Prepared) -> np.ndarray:
    """Return the seconds of each run by a fit to all others of its software that others have published."""
    predicted = np.full(len(prepared), np.nan)
    for _, own, batch in _batches(prepared):
        predicted[own] = hold_out(batch)
    return predicted


def list_errors(prepared: Prepared, shipped: np.ndarray, held_out: np.ndarray) -> Iterator[RunErrors]:
    """Yield the errors of the runs of each software, GPU, source and number of nodes."""
    runs = [item.run for item in prepared]
    errors, unseen = (100 * relative_errors(runs, seconds) for seconds in (shipped, held_out))
    groups: dict[tuple[str, str, str, str, bool], list[int]] = defaultdict(list)
    for index, run in enumerate(runs):
        nodes = ONE_NODE if run.gpus <= run.gpus_per_node else NODES
        groups[run.software, run.device, run.source, nodes, run.is_fitted].append(index)
    for (software, device, source, nodes, fitted), own in sorted(groups.items(), reverse=True):
        mean_unseen = float(abs(unseen[own]).mean())
        yield RunErrors(
            software=software,
            device=device,
            nodes=nodes,
            source=source,
            fitted=fitted,
            runs=len(own),
            mean=round(float(abs(errors[own]).mean()), 1),
            bias=round(float(errors[own].mean()), 1),
            percentile_95=round(float(np.quantile(abs(errors[own]), 0.95)), 1),
            held_out=None if np.isnan(mean_unseen) else round(mean_unseen, 1),
        )


def _batches(prepared: Prepared) -> Iterator[tuple[str, np.ndarray, Batch]]:
    """Yield each software, the indexes of its runs, and these as a batch."""
    by_software: dict[str, list[int]] = defaultdict(list)
    for index, item in enumerate(prepared):
        by_software[item.run.software].append(index)
    for software, indexes in by_software.items():
        yield software, np.array(indexes), Batch([prepared[index] for index in indexes])


def _fit_all(prepared: Prepared) -> np.ndarray:
    """Print the fitted figures of each software; return the predicted seconds of all runs that they are fitted to."""
    predicted = np.full(len(prepared), np.nan)
    fitted = np.flatnonzero([item.run.is_fitted for item in prepared])
    for software, own, batch in _batches([prepared[index] for index in fitted]):
        found = fit(batch)
        print(f"\n{software}: {len(batch.runs)} runs")
        print("".join(f"  {name}: {value:.4g}\n" for name, value in found.items()), end="", flush=True)
        predicted[fitted[own]] = batch.predict([point_of(found)])[0]
    return predicted


if __name__ == "__main__":
    sys.exit(main())
