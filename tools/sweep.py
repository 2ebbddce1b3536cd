#!/usr/bin/env python3
"""Counts every model of a library as `fvflops sweep` does: tools/sweep.py timm|torchvision|transformers.

With --execution real each model is built with random weights and run for real, on smaller inputs where it takes them,
and transformers' are smaller. A stopped sweep continues where it was. Prints how many were counted, each failure
with its cause, and reported work outside the dispatcher; exits with 1 if a model failed, or reports such work.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from sweeping.libraries import LIBRARIES, list_names, make_factory  # noqa: E402

from fvflops.cli.commands.sweep import SweepProgress  # noqa: E402
from fvflops.sources import SourceOptions  # noqa: E402
from fvflops.sweep import CountSettings, ModelCount  # noqa: E402
from fvflops.sweep.count_model import UNSEEN  # noqa: E402
from fvflops.sweep.counted_models import plan_sweep, run_sweep, summarise  # noqa: E402
from fvflops.sweep.local_pool import WorkerLimits, run_in_workers  # noqa: E402
from fvflops.sweep.result_files import read_rows  # noqa: E402

_SECONDS, _MEMORY = 300, 10 << 30  # for a model, and for each worker


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/sweep.py", description=__doc__.splitlines()[0])
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument(
        "--execution",
        choices=("shapes", "real"),
        default="shapes",
        help="shapes: without weights where that is possible; real: with random weights, and real numbers (shapes)",
    )
    parser.add_argument("--out", help="the results (default: sweep-LIBRARY.csv, or sweep-LIBRARY-real.csv)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="workers (default: one a core)")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="only models whose name matches, such as 'vit*'")
    return parser.parse_args(argv)


def choose(names: Sequence[str], pattern: str) -> list[str]:
    """Return the names that match after their source."""
    chosen = [name for name in names if fnmatchcase(name.partition(":")[2], pattern)]
    if not chosen:
        raise ValueError(f"--only {pattern!r} matches none of the {len(names):,} models: * matches any text")
    return chosen


def sweep(names: Sequence[str], output: str, arguments: argparse.Namespace, way: str | None, retry: bool) -> None:
    """Count the models without a row, built by a way of the library where execution is real."""
    limits = WorkerLimits(_SECONDS, _MEMORY, ("sweeping.libraries", arguments.library))
    run = partial(run_in_workers, workers=arguments.jobs, limits=limits)
    is_real = way is not None
    execution = "real" if is_real else "auto"
    settings = CountSettings("default", execution, peak_memory=not is_real, memory=limits.memory)
    options = SourceOptions(device="cpu" if is_real else None)
    plan = plan_sweep(names, output, options, settings, retry_failed=retry)
    if way is not None:
        plan = replace(plan, tasks=tuple(replace(task, factory=make_factory(task.name, way)) for task in plan.tasks))
    progress = SweepProgress(len(plan.tasks))
    try:
        for row in run_sweep(plan, run, progress.show_running):
            progress.add(row)
    finally:
        progress.clear()


def find_unseen(row: ModelCount) -> str:
    """Return the work outside the dispatcher of a row.

    >>> find_unseen(ModelCount("m", unsupported="aten::x ×2; unseen::f ×1 in 'scan' at net.py:42"))
    "unseen::f ×1 in 'scan' at net.py:42"
    """
    return "; ".join(item for item in row.unsupported.split("; ") if item.startswith(UNSEEN))


def describe(rows: Sequence[ModelCount], seconds: float, jobs: int) -> str:
    how = Counter(row.execution for row in rows if not row.error)
    unseen = {row.model: found for row in rows if (found := find_unseen(row))}
    unknown = Counter(
        item.partition(" ×")[0] for row in rows if row.unsupported for item in row.unsupported.split("; ")
    )
    versions = ", ".join(sorted({row.versions for row in rows}))
    lines = [f"{versions}: {summarise(rows)}; {how['shapes']:,} in shape execution, {how['real']:,} in real execution"]
    lines += [f"  failed {row.model}: {row.failure}: {row.error}" for row in rows if row.failure]
    lines += [f"  smaller {row.model}: {row.built}" for row in rows if row.built]
    lines.append(f"  unseen work: in {len(unseen):,} models")
    lines += [f"  unseen in {model}: {found}" for model, found in unseen.items()]
    lines += [f"  unsupported {op}: in {models:,} models" for op, models in unknown.most_common()]
    return "\n".join([*lines, f"{seconds:.0f} s with {jobs} workers"])


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    is_real = arguments.execution == "real"
    output = arguments.out or f"sweep-{arguments.library}{'-real' if is_real else ''}.csv"
    begun = time.monotonic()
    try:
        names = choose(list_names(arguments.library), arguments.only)
        ways = LIBRARIES[arguments.library] if is_real else (None,)
        for number, way in enumerate(ways):
            sweep(names, output, arguments, way, retry=number > 0)
    except (ValueError, OSError, ImportError) as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("sweep: stopped: the same command continues", file=sys.stderr)
        return 1
    rows = [row for name, row in read_rows(output).items() if name in set(names)]
    print(describe(rows, time.monotonic() - begun, arguments.jobs))
    return 1 if any(row.failure or find_unseen(row) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
