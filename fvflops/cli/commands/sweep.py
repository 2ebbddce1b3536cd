"""`fvflops sweep`: count many models into a file, in worker processes or on a Ray cluster."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TextIO

from fvflops.cli import shared_options
from fvflops.cli.argument_values import parse_assumptions, parse_count, parse_limit
from fvflops.cli.model_table import MEMORY, ParetoPlot, add_pareto_plot, read_plot, write_plot
from fvflops.cli.outputs import STANDARD
from fvflops.cli.parser import add_options, find_group
from fvflops.cli.planning.accelerator import built_on, runs_on
from fvflops.cli.process import report_stream, termination_raised
from fvflops.cli.progress import Progress
from fvflops.formulas import load_table
from fvflops.sources.imports import add_current_folder, import_library
from fvflops.sources.load import check_models, find_source
from fvflops.sources.patterns import expand_names
from fvflops.sweep.count_model import CountSettings, Executor, Task, ignore_tick, machine_memory
from fvflops.sweep.counted_models import Plan, plan_sweep, run_sweep, summarise
from fvflops.sweep.joined import Join, join, read_joined
from fvflops.sweep.local_pool import WorkerLimits, import_pebble, run_in_workers
from fvflops.sweep.model_count import ModelCount
from fvflops.sweep.ray_pool import run_on_cluster
from fvflops.sweep.result_files import encode_row
from fvflops.text import printable_short
from fvflops.units import format_bytes, format_quantity, parse_size

EXAMPLES = (
    "fvflops sweep 'zoo:resnet*' zoo:lenet5 --output counts.csv",
    "fvflops sweep 'timm:resnet*' --output counts.csv --timeout 60 --plot front.svg",
)
FIRST = ("--output", "--workers", "--batch", "--seq", "--plot")
_SHOWN_FAILURES = 10
_LEAST_MEMORY = 1_000_000_000  # bytes, for torch and a library of models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared_options.add_convention(parser)
    add_options(
        parser,
        """
        models MODEL  names and patterns: 'timm:resnet*', 'zoo:*', 'hf:models/*' (folders), @names.txt (one a line)
        --output FILE  a row for each model: .parquet, .csv, .jsonl or .sqlite; a model with a row is not counted again;
            - is standard output, in JSON lines
        """,
        nargs={"models": "+"},
        required={"output": True},
    )
    shared_options.add_inputs(parser)
    shared_options.add_assume(parser)
    shared_options.add_run(parser)
    parser.add_argument(
        "--no-peak-memory", action="store_true", help="do not predict peak memory, which takes about half of the time"
    )
    parser.add_argument("--again", action="store_true", help="count models again that have a row")
    parser.add_argument("--retry-failed", action="store_true", help="count models again whose row has an error")
    add_pareto_plot(find_group(parser, "additional files"), join="columns for the plot, of")
    add_options(
        parser,
        """
        workers:
        --workers N  worker processes; default: one for each core
        --ray ADDRESS  a Ray cluster instead of worker processes: auto, or ray://HOST:10001
        --timeout S  seconds for a model; default: 300
        --memory SIZE  bytes that a worker may allocate, such as 12G; default: 80%% of the memory, divided among the
            workers, and no limit on a cluster
        """,
        type={"workers": parse_count, "timeout": parse_limit, "memory": _parse_bytes},
        default={"timeout": 300.0},
    )
    workers = find_group(parser, "workers")
    shared_options.add_imports(workers, help="module that each worker imports first, such as one that registers ops")


def run(arguments: argparse.Namespace) -> int:
    """Count the models and return the exit code: 1 if one failed."""
    names = expand_names(arguments.models)
    options = shared_options.model_options(arguments, device=built_on(arguments))
    if any(find_source(name) == "" for name in names):
        add_current_folder()  # of the workers too
    table = load_table(arguments.table)
    joined, plot = _read_plot(arguments, names)
    check_models(names, options)
    if arguments.ray is not None and arguments.workers is not None:
        raise ValueError(f"--workers {arguments.workers}: a cluster has one for each of its cores: omit --workers")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = arguments.workers or cores or 1
    available = None if arguments.ray is not None else machine_memory()
    # All workers together may allocate 80 % of the memory.
    memory = arguments.memory or (None if available is None else int(available * 0.8) // workers)
    settings = CountSettings(
        arguments.table,
        arguments.execution,
        parse_assumptions(arguments.assume),
        arguments.train,
        peak_memory=not arguments.no_peak_memory,
        memory=memory,
        kernels=runs_on(arguments)[0],
    )
    executor = _make_executor(arguments, workers, memory)
    if arguments.output == STANDARD:
        tasks = [Task(name, None, options, settings) for name in names]
        return _run_to_stdout(tasks, executor)
    plan = plan_sweep(
        names, arguments.output, options, settings, again=arguments.again, retry_failed=arguments.retry_failed
    )
    rows, failed = _run_to_file(names, plan, executor)
    if plot is not None:
        sentence, failure = write_plot(plot, rows, joined, table)
        print(sentence, file=report_stream())
        if failure:
            print(failure, file=sys.stderr)
        failed = failed or bool(failure)
    return int(failed)


def _read_plot(arguments: argparse.Namespace, names: Sequence[str]) -> tuple[Join | None, ParetoPlot | None]:
    """Return the joined columns and the plot; ValueError for options without effect."""
    joined = None if arguments.join is None else join(read_joined(arguments.join), names)
    plot = read_plot(arguments, joined)
    if plot is None and joined is not None:
        raise ValueError(f"--join {arguments.join} has columns for a plot: add --plot, such as --plot pareto.svg")
    if plot is not None and arguments.output == STANDARD:
        raise ValueError(f"--plot {plot.path} needs a file of rows: write them by --output, such as counts.csv")
    if plot is not None and arguments.no_peak_memory and MEMORY in plot.axes:
        raise ValueError(f"--plot {plot.path} shows the memory: omit --no-peak-memory")
    return joined, plot


def _make_executor(arguments: argparse.Namespace, workers: int, memory: int | None) -> Executor:
    shared_options.import_modules(arguments.imports)
    limits = WorkerLimits(arguments.timeout, memory, tuple(arguments.imports))
    if arguments.ray is not None:
        import_library("ray")
        return partial(run_on_cluster, address=arguments.ray, limits=limits)
    import_pebble()
    return partial(run_in_workers, workers=workers, limits=limits)


def _run_to_stdout(tasks: Sequence[Task], executor: Executor) -> int:
    failed = False
    with termination_raised():
        for row in executor(tasks, ignore_tick):
            report_stream().write(encode_row(row, sealed=False))
            report_stream().flush()
            failed = failed or bool(row.failure)
    return int(failed)


def _run_to_file(names: Sequence[str], plan: Plan, executor: Executor) -> tuple[list[ModelCount], bool]:
    """Count into the file; return the rows of the names, and whether one is missing or has an error."""
    progress = SweepProgress(len(plan.tasks))
    begun = time.monotonic()
    rows = {name: plan.rows[name] for name in names if name in plan.rows}
    left = len(plan.tasks)
    interrupted: type[KeyboardInterrupt] | None = None
    try:
        with termination_raised():
            for row in run_sweep(plan, executor, progress.show_running):
                left -= 1
                rows[row.model] = row
                progress.add(row)
    except KeyboardInterrupt as interrupt:
        interrupted = type(interrupt)
    finally:
        progress.clear()
    _report(list(rows.values()), len(names) - len(plan.tasks), plan.output, time.monotonic() - begun)
    if interrupted is not None:
        raise interrupted(f"{format_quantity(left, 'model')} left; the same command continues")
    return list(rows.values()), bool(left) or any(row.failure for row in rows.values())


def _report(rows: Sequence[ModelCount], earlier: int, output: str, seconds: float) -> None:
    before = f", {earlier:,} of them earlier" if earlier else ""
    print(f"{summarise(rows)}{before}; {seconds:.0f} s; {output}", file=report_stream())
    failed = [row for row in rows if row.failure]
    for row in failed[:_SHOWN_FAILURES]:
        print(f"  {row.model}: {row.failure}: {printable_short(row.error)}", file=sys.stderr)
    if len(failed) > _SHOWN_FAILURES:
        print(f"  {len(failed) - _SHOWN_FAILURES:,} more: see the column error of {output}", file=sys.stderr)


class SweepProgress(Progress):
    """A bar with the rate, the failures and the models that are being counted."""

    def __init__(
        self, total: int, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(stream, clock=clock)
        self._total = total
        self._done = self._failed = 0
        self._running: Sequence[str] = ()

    def add(self, row: ModelCount) -> None:
        """Show that one more model is done."""
        self._done += 1
        self._failed += bool(row.failure)
        self.show_running(self._running)

    def show_running(self, names: Sequence[str]) -> None:
        self._running = names
        elapsed = self._clock() - self._start
        rate = f", {self._done / elapsed:.1f}/s" if self._done and elapsed > 1 else ""
        failed = f", {self._failed:,} failed" if self._failed else ""
        listed = f": {', '.join(map(printable_short, names))}" if names else ""
        self.show(self._done, self._total, noun="model", note=f"{rate}{failed}{listed}")


def _parse_bytes(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size < _LEAST_MEMORY:
        least = format_bytes(_LEAST_MEMORY)
        raise argparse.ArgumentTypeError(f"must be at least {least}, which torch itself needs; got {text!r}")
    return size
