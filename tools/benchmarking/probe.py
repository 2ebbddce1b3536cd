"""Probe: one measurement that needs a process of its own, printed as JSON.

python -m benchmarking.probe first CASE STEP CONTENDER; python -m benchmarking.probe repeat NAME SHARE
"""

from __future__ import annotations

import gc
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from benchmarking.contenders import CASES, Step, Subjects, count
from fvflops.zoo import build

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def resident_megabytes() -> float | None:
    return _read("VmRSS")


def peak_megabytes() -> float | None:
    """Return the most that was resident since `forget_peak`, or since the process began where it cannot be reset."""
    return _read("VmHWM")


def forget_peak() -> None:
    """Let the peak begin again at the memory resident now."""
    with suppress(OSError):
        _RESET.write_text("5")


def _read(field: str) -> float | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":")), None)


def measure_first(case_name: str, step: Step, contender: str) -> dict[str, Any]:
    """Return the seconds of a process' first bare run or first count, and the memory that it takes over the model."""
    subjects = Subjects(CASES[case_name], step)
    run = {"bare": subjects.meta.run, "fvflops": subjects.weightless.count}[contender]
    gc.collect()
    forget_peak()
    before = resident_megabytes()
    begun = time.perf_counter()
    counted = run()
    seconds = time.perf_counter() - begun
    after, peak = resident_megabytes(), peak_megabytes()
    grown = None if before is None or after is None or peak is None else [after - before, peak - before]
    return {"seconds": seconds, "counted": counted, "megabytes": grown}


def _same_image(name: str, size: int, channels: int) -> Callable[[int], tuple[nn.Module, torch.Tensor]]:
    model, image = build(name).eval(), torch.zeros(1, channels, size, size)
    return lambda index: (model, image)


def _other_batches() -> Callable[[int], tuple[nn.Module, torch.Tensor]]:
    model = build("lenet5").eval()
    return lambda index: (model, torch.zeros(1 + index, 1, 28, 28))


def _other_models() -> Callable[[int], tuple[nn.Module, torch.Tensor]]:
    return lambda index: (build("lenet5").eval(), torch.zeros(1, 1, 28, 28))


# Name → how often, whether with backward, and the subject of the n-th analysis.
REPEATS: dict[str, tuple[int, bool, Callable[[], Callable[[int], tuple[nn.Module, torch.Tensor]]]]] = {
    "LeNet-5": (1000, False, lambda: _same_image("lenet5", 28, 1)),
    "LeNet-5, forward+backward": (1000, True, lambda: _same_image("lenet5", 28, 1)),
    "LeNet-5, each time another batch size": (1000, False, _other_batches),
    "LeNet-5, each time another model": (1000, False, _other_models),
    "ResNet-50": (100, False, lambda: _same_image("resnet50", 224, 3)),
}


def measure_repeats(name: str, share: float = 1.0) -> dict[str, Any]:
    """Return the seconds of each of many analyses in a row, and how memory and Python's objects grew over them."""
    times, backward, prepare = REPEATS[name]
    times = max(20, int(times * share))
    subject = prepare()
    loss = (lambda result: result.sum()) if backward else None
    for _ in range(5):
        count(*subject(0), loss)
    gc.collect()
    objects, before = len(gc.get_objects()), resident_megabytes()
    seconds = []
    for index in range(times):
        model, value = subject(index)
        begun = time.perf_counter()
        count(model, value, loss)
        seconds.append(time.perf_counter() - begun)
    del model, value
    gc.collect()
    after = resident_megabytes()
    part = times // 10
    return {
        "times": times,
        "first": statistics.median(seconds[:part]),
        "last": statistics.median(seconds[-part:]),
        "objects": len(gc.get_objects()) - objects,
        "megabytes": None if before is None or after is None else after - before,
    }


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    kind, *rest = arguments
    result = measure_first(*cast("list[Any]", rest)) if kind == "first" else measure_repeats(rest[0], float(rest[1]))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
