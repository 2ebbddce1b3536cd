"""Measurements in processes of their own, of their imports, their first count, and many counts in a row."""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = """import json, warnings; warnings.simplefilter("ignore")
from benchmarking.processes import {name}
print(json.dumps({name}(*{arguments})))"""


def run_apart(measure: Callable[..., Any], *arguments: Any) -> Any:
    """Return a measurement by a new process; if that fails, raise RuntimeError with the last line of its output."""
    # Let Python cache bytecode, which an installed package has.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    path = os.pathsep.join([str(ROOT / "tools"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", _PROGRAM.format(name=measure.__name__, arguments=arguments)]
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError((result.stderr.strip().splitlines() or ["it failed"])[-1][:200])
    return json.loads(result.stdout.splitlines()[-1])


def measure_imports(name: str) -> dict[str, float]:
    """Return the seconds for `import torch` and for fvflops, and of the first count, with the modules it imports.

    `name` is of tests/support/models; this process must not have imported torch.
    """
    begun = time.perf_counter()
    import torch

    after_torch = time.perf_counter()
    from fvflops import FlopCountAnalysis

    after_fvflops = time.perf_counter()
    torch.set_num_threads(1)
    from tests.support.models.whole_models import build_case

    model, inputs = build_case(name)
    before = set(sys.modules)
    counted = time.perf_counter()
    FlopCountAnalysis(model, inputs, warn=False).total()
    seconds = time.perf_counter() - counted
    modules = len(set(sys.modules) - before)
    return {"torch": after_torch - begun, "fvflops": after_fvflops - after_torch, "count": seconds, "modules": modules}


def measure_first(case: str, step: str, contender: str) -> dict[str, float]:
    """Return the seconds of a process' first bare run or first count, and the memory that it takes over the model."""
    from benchmarking.contenders import CASES, Subjects

    subjects = Subjects(CASES[case], step)
    run: Callable[[], object] = {"bare": subjects.meta.run, "fvflops": subjects.weightless.count}[contender]
    gc.collect()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = _megabytes("VmRSS")
    begun = time.perf_counter()
    run()
    return {"seconds": time.perf_counter() - begun, "megabytes": _megabytes("VmHWM") - before}


def measure_repeats(name: str, step: str, times: int) -> dict[str, float]:
    """Return the seconds of the first and last tenth of analyses in a row, and how memory and Python's objects grew."""
    from benchmarking.contenders import CASES, Subjects, _from_zoo

    subjects = Subjects(CASES.get(name) or _from_zoo(name), step)
    for _ in range(5):
        subjects.weightless.count()
    gc.collect()
    objects, before = len(gc.get_objects()), _megabytes("VmRSS")
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        subjects.weightless.count()
        seconds.append(time.perf_counter() - begun)
    gc.collect()
    tenth = max(1, times // 10)
    return {
        "first tenth": statistics.median(seconds[:tenth]),
        "last tenth": statistics.median(seconds[-tenth:]),
        "objects": len(gc.get_objects()) - objects,
        "megabytes": _megabytes("VmRSS") - before,
    }


def _megabytes(field: str) -> float:
    """Return the memory of this process, nan where /proc does not tell."""
    lines = []
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:")), float("nan"))
