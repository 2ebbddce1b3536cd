"""Measurements in processes of their own: `python -m benchmarking.processes NAME [ARGUMENT ...]` prints one as JSON."""

from __future__ import annotations

import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Name → how many analyses, whether with backward, the zoo's model and the shape of its input.
REPEATS: dict[str, tuple[int, bool, str, tuple[int, ...]]] = {
    "LeNet-5": (1000, False, "lenet5", (1, 1, 28, 28)),
    "LeNet-5, forward+backward": (1000, True, "lenet5", (1, 1, 28, 28)),
    "LeNet-5, each time another model": (1000, False, "lenet5", (1, 1, 28, 28)),
    "ResNet-50": (100, False, "resnet50", (1, 3, 224, 224)),
}


def run_apart(name: str, *arguments: str) -> Any:
    """Return a measurement by a new process; if that fails, raise RuntimeError with the last line of its output."""
    # Let Python cache bytecode, which an installed package has.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    path = os.pathsep.join([str(ROOT / "tools"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "benchmarking.processes", name, *arguments]
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
    FlopCountAnalysis(model, inputs).total()
    seconds = time.perf_counter() - counted
    return {
        "torch": after_torch - begun,
        "fvflops": after_fvflops - after_torch,
        "count": seconds,
        "modules": len(set(sys.modules) - before),
    }


def measure_first(case: str, step: Any, contender: str) -> dict[str, Any]:
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
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "megabytes": [_megabytes(field) - before for field in ("VmRSS", "VmHWM")]}


def measure_repeats(name: str, share: str) -> dict[str, Any]:
    """Return the seconds of the first and last tenth of analyses in a row, and how memory and Python's objects grew."""
    import torch

    from benchmarking.contenders import count
    from fvflops.zoo import build

    times, backward, zoo_name, shape = REPEATS[name]
    times = max(20, int(times * float(share)))
    model, value = build(zoo_name).eval(), torch.zeros(shape)
    loss = torch.sum if backward else None
    for _ in range(5):
        count(model, value, loss)
    gc.collect()
    objects, before = len(gc.get_objects()), _megabytes("VmRSS")
    seconds = []
    for _ in range(times):
        if "another model" in name:
            model = build(zoo_name).eval()
        begun = time.perf_counter()
        count(model, value, loss)
        seconds.append(time.perf_counter() - begun)
    gc.collect()
    return {
        "times": times,
        "first": statistics.median(seconds[: times // 10]),
        "last": statistics.median(seconds[-(times // 10) :]),
        "objects": len(gc.get_objects()) - objects,
        "megabytes": _megabytes("VmRSS") - before,
    }


def _megabytes(field: str) -> float:
    """Return the memory of this process, nan where /proc does not tell."""
    lines = []
    with suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:")), float("nan"))


MEASURES: dict[str, Callable[..., Any]] = {
    "imports": measure_imports,
    "first": measure_first,
    "repeats": measure_repeats,
}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    measure, *arguments = sys.argv[1:]
    print(json.dumps(MEASURES[measure](*arguments)))
