#!/usr/bin/env python3
"""Measures on a machine with a GPU all that needs one, and writes it as JSON and as a page: tools/gpu.py --page PATH.

Counts by shapes beside recorded ones, strides, memory, profiles, peaks and utilisation, metered loops, annotated
traces, and leftovers of an analysis. Each part runs in a process of its own, so that one that ends badly leaves the
others: first the parts that count, together, then the parts that take times, one after the other. On a machine without
CUDA it says so and exits with 2.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]


_SECONDS = 240  # of a process


class Section(NamedTuple):
    """A part of the measurement: in how many processes it runs, with CUDA or with it hidden, and alone or not."""

    module: str
    function: str
    shares: int = 1
    hidden: bool = False
    alone: bool = False


SECTIONS = {
    "environment": Section("environment", "describe_machine"),
    "models": Section("counted_runs", "count_models", shares=4),
    "models without CUDA": Section("counted_runs", "count_models", shares=3, hidden=True),
    "kernels": Section("counted_runs", "count_kernels", shares=2),
    "kernels without CUDA": Section("counted_runs", "count_kernels", hidden=True),
    "steps": Section("counted_runs", "count_steps"),
    "steps without CUDA": Section("counted_runs", "count_steps", hidden=True),
    "layouts": Section("layouts", "compare_layouts", shares=3),
    "outside": Section("outside", "look_outside"),
    "state": Section("state", "look_at_state"),
    "memory": Section("memory", "compare_memory", shares=2),
    "counters": Section("counters", "compare_counters", alone=True),
    "peaks": Section("timing", "measure_peaks", alone=True),
    "profiles": Section("timing", "compare_profiles", alone=True),
    "utilisation": Section("timing", "measure_utilisation", alone=True),
    "loops": Section("loops", "measure_loops", alone=True),
}


def run_part(section: str, share: int, path: Path) -> None:
    import importlib

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch

    torch.set_num_threads(2)
    entry = SECTIONS[section]
    measure: Callable[..., Any] = getattr(importlib.import_module(f"gpu_checks.{entry.module}"), entry.function)
    path.write_text(json.dumps(measure(share, entry.shares), default=str))


def run_apart(section: str, share: int, folder: Path) -> dict[str, Any]:
    """Return the measurements of a share of a section by a process, or its error and the end of its output."""
    path = folder / f"{section.replace(' ', '_')}_{share}.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    if SECTIONS[section].hidden:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, __file__, "--part", section, str(share), str(path)]
    begun = time.monotonic()
    with open(path.with_suffix(".log"), "w") as log:
        try:
            done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=_SECONDS)
            code: int | str = done.returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after {_SECONDS} s"
    seconds = round(time.monotonic() - begun, 1)
    if code == 0 and path.exists():
        return {"seconds": seconds, "found": json.loads(path.read_text())}
    return {"seconds": seconds, "error": str(code), "log": path.with_suffix(".log").read_text()[-3000:]}


def measure(
    names: Sequence[str], folder: Path, report: Callable[[str], None], save: Callable[[Any], object] = id
) -> dict[str, Any]:
    """Return section → results, the errors of its processes, and how long it took; `save` gets it so far."""
    results: dict[str, Any] = {}

    def add(section: str, share: int, result: dict[str, Any]) -> None:
        entry = results.setdefault(section, {"found": {}, "errors": [], "seconds": 0})
        entry["seconds"] = max(entry["seconds"], result["seconds"])
        if "found" in result:
            _merge(entry["found"], result["found"])
        else:
            entry["errors"].append({"share": share, "error": result["error"], "log": result["log"]})
        report(f"{section} {share}: {result['seconds']} s {result.get('error', '')}")

    together = [(name, share) for name in names if not SECTIONS[name].alone for share in range(SECTIONS[name].shares)]
    with ThreadPoolExecutor(max(1, len(together))) as pool:
        runs = [pool.submit(run_apart, name, share, folder) for name, share in together]
        for (name, share), run in zip(together, runs, strict=True):
            add(name, share, run.result())
    save(results)
    for name in names:
        if SECTIONS[name].alone:
            add(name, 0, run_apart(name, 0, folder))
            save(results)
    return results


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    """Add the results of a share: numbers are summed, and mappings joined."""
    for key, value in more.items():
        if isinstance(value, int):
            value += into.get(key, 0)
        elif isinstance(value, dict):
            value = {**into.get(key, {}), **value}
        into[key] = value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="only this part; can be repeated")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu.json", help="where the figures go")
    parser.add_argument("--page", type=Path, help="where the page goes, in Markdown")
    parser.add_argument(
        "--recorded", type=Path, help="where counts and ops of the kernels' cases go: tests/data/cuda_ops.json.gz"
    )
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        section, share, path = arguments.part
        run_part(section, int(share), Path(path))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("this machine has no CUDA device: nothing was measured", file=sys.stderr)
        return 2
    begun = time.monotonic()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)

    def save(results: Any) -> None:
        arguments.json.write_text(json.dumps(results))

    with tempfile.TemporaryDirectory() as folder:
        results = measure(arguments.only or list(SECTIONS), Path(folder), lambda text: print(text, flush=True), save)
    from gpu_checks.counted_runs import write_recorded
    from gpu_checks.page import write_page

    if arguments.recorded is not None:
        write_recorded(results["kernels"]["found"], arguments.recorded)
    text = write_page(results)
    if arguments.page is not None:
        arguments.page.write_text(text)
    print(text)
    print(f"{time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
