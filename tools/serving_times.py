#!/usr/bin/env python3
"""Compares predicted times of serving runs with measured ones, and fits the figures of engines.

    tools/serving_times.py FOLDER               errors with the shipped configs/engines.yaml
    tools/serving_times.py FOLDER --held-out    and with figures fitted without each model, and without each GPU
    tools/serving_times.py FOLDER --fit FILE    fits each engine, and writes the figures
    tools/serving_times.py FOLDER --every 4     of each fourth run only

FOLDER has ttft_tpot.csv, the measured runs that NVIDIA's AIConfigurator ships, and files of requests. Each run is
simulated as a closed loop of its clients, by the engine's scheduler, with the settings of its benchmark's launch
script. TPOT is the time for each token after the first, TTFT the time to the first; throughput is of all clients, by
Little's law. Rows that contradict each other, and rows of an unknown layout, are left out and listed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
import yaml  # noqa: E402
from error_figures import write_errors  # noqa: E402
from serving_runs.error_report import error_table, list_errors, unused_runs, worst_runs  # noqa: E402
from serving_runs.fitting import FITTED, Batch, find_features  # noqa: E402
from serving_runs.launch_scripts import ServingRun  # noqa: E402
from serving_runs.prediction import Predictor, Times  # noqa: E402
from serving_runs.requests_replay import FILES, MODEL, replay  # noqa: E402
from serving_runs.rows import read_runs  # noqa: E402
from serving_runs.served_models import record_models  # noqa: E402

from fvflops.serve.engine_kernels import EngineFigures, load_engines  # noqa: E402
from fvflops.serve.serving_model import ServingModel  # noqa: E402

Figures = Mapping[str, EngineFigures]
_Case = tuple[ServingRun, EngineFigures]
_Batches = Mapping[str, tuple[list[int], Batch]]
# Fits around simulations by the figures of the fit before.
_ROUNDS = 2
_HELD_OUT = {"held-out models": "model", "held-out GPUs": "gpu"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/serving_times.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="with ttft_tpot.csv, and files of requests")
    parser.add_argument("--held-out", action="store_true", help="also fit without each model, and without each GPU")
    parser.add_argument("--write", action="store_true", help="with --held-out: write errors to measured_errors.yaml")
    parser.add_argument("--fit", type=Path, metavar="FILE", help="fit, and write the figures to this file")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each Nth run (1)")
    parser.add_argument("--worst", type=int, default=10, metavar="N", help="runs with the largest errors to show (10)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (one a core)")
    parser.add_argument("--models", type=Path, help="file that keeps the recorded models")
    options = parser.parse_args(argv)
    read = read_runs(options.folder / "ttft_tpot.csv")
    runs = [run for run in read if not run.unused][:: options.every]
    replays = [options.folder / name for name in FILES if (options.folder / name).exists()]
    names = [run.model for run in runs] + [MODEL] * bool(replays)
    predictor = Predictor(record_models(names, options.models))
    figures: Figures = load_engines()
    if options.fit:
        figures = _fit(predictor, runs, figures, options.jobs)
        _write(options.fit, figures)
    predicted = {"": _simulate(predictor, runs, [figures[run.engine] for run in runs], options.jobs)}
    if options.held_out:
        batches = _batches(predictor, runs, figures, predicted[""])
        for kind, attribute in _HELD_OUT.items():
            predicted[kind] = _hold_out(predictor, runs, batches, attribute, options.jobs)
    print(f"{len(runs):,} runs, errors of predicted times\n{error_table(runs, predicted)}")
    if options.write and options.held_out:
        write_errors("serving", list_errors(runs, predicted[""], predicted[next(iter(_HELD_OUT))]))
    print(f"\nlargest errors\n{worst_runs(runs, predicted[''], options.worst)}")
    print(f"\nleft out\n{unused_runs(read)}")
    for path in replays:
        print(f"\n{replay(path, predictor.models[MODEL], figures['vllm'])}")
    return 0


def _simulate(
    predictor: Predictor, runs: Sequence[ServingRun], figures: Sequence[EngineFigures], jobs: int
) -> list[Times]:
    """Return the simulated times of runs by figures of each; equal ones are simulated once."""
    cases = [(replace(run, line=0, ttft=0.0, tpot=0.0), item) for run, item in zip(runs, figures, strict=True)]
    # Runs of a model and layout share the times of steps.
    groups: dict[object, list[_Case]] = defaultdict(list)
    for run, item in dict.fromkeys(cases):
        groups[run.model, run.gpu, run.engine, run.layout, item].append((run, item))
    tasks = [(predictor.models, group) for group in groups.values()]
    known: dict[_Case, Times] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:  # starts processes when it gets a task
        found = map(_simulate_group, tasks) if jobs == 1 else pool.map(_simulate_group, tasks)
        for group, times in zip(groups.values(), found, strict=True):
            known.update(zip(group, times, strict=True))
    return [known[case] for case in cases]


def _simulate_group(task: tuple[Mapping[str, ServingModel], Sequence[_Case]]) -> list[Times]:
    models, cases = task
    torch.set_num_threads(1)
    predictor = Predictor(models)
    return [predictor.simulate(run, figures) for run, figures in cases]


def _batches(predictor: Predictor, runs: Sequence[ServingRun], figures: Figures, times: Sequence[Times]) -> _Batches:
    """Return engine → the indexes of its runs, and these as a batch."""
    found = {}
    for engine in dict.fromkeys(run.engine for run in runs):
        own = [index for index, run in enumerate(runs) if run.engine == engine]
        chosen = [runs[index] for index in own]
        features = find_features(predictor, chosen)
        found[engine] = own, Batch(chosen, features, figures[engine], [times[index] for index in own])
    return found


def _hold_out(
    predictor: Predictor, runs: Sequence[ServingRun], batches: _Batches, attribute: str, jobs: int
) -> list[Times]:
    """Return the times of runs by figures fitted to the runs of the engine with other values of an attribute.

    An engine with one value has its priors alone.
    """
    figures: list[EngineFigures] = [EngineFigures()] * len(runs)
    for own, batch in batches.values():
        for value in dict.fromkeys(getattr(run, attribute) for run in batch.runs):
            others = [place for place, run in enumerate(batch.runs) if getattr(run, attribute) != value]
            found = batch.take(others).fit(f"held out: {value}")
            for place, index in enumerate(own):
                if getattr(batch.runs[place], attribute) == value:
                    figures[index] = found
    return _simulate(predictor, runs, figures, jobs)


def _fit(predictor: Predictor, runs: Sequence[ServingRun], figures: Figures, jobs: int) -> Figures:
    """Return engine → fitted figures, by fits around simulations by those before."""
    found = dict(figures)
    for _ in range(_ROUNDS):
        times = _simulate(predictor, runs, [found[run.engine] for run in runs], jobs)
        for engine, (own, batch) in _batches(predictor, runs, found, times).items():
            found[engine] = batch.fit(f"fitted to {len(own)} runs that NVIDIA's AIConfigurator 0.12 ships")
    return found


def _write(path: Path, figures: Figures) -> None:
    """Write figures as configs/engines.yaml has them, below the comments that the file begins with."""
    engines = {
        engine: {**{name: _rounded(getattr(item, name)) for name in FITTED}, "source": item.source}
        for engine, item in figures.items()
    }
    head = [line for line in path.read_text().splitlines() if line.startswith("#")] if path.exists() else []
    document = {"description": "What inference engines add to the times of kernels", "engines": engines}
    text = yaml.safe_dump(document, sort_keys=False, width=110)
    path.write_text("\n".join([*head, "", text] if head else [text]))


def _rounded(value: float) -> float:
    """Return a figure with three digits, 0 below a nanosecond."""
    return float(f"{value:.3g}") if value >= 1e-9 else 0.0


if __name__ == "__main__":
    sys.exit(main())
