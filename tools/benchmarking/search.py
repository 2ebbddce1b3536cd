"""The search: rates of counting models that were never counted before, in CPU time of one core."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarking.candidates import SPACES
from benchmarking.counting import build_on_meta, count_quietly
from benchmarking.rounds import Limits, Rounds

Result = TypeVar("Result")

_WARM_UP = 40  # candidates counted before, as in a search that goes on


def run_search(space_name: str, limits: Limits) -> Rounds:
    """Time building and counting one candidate after the other, and running it on the meta device."""
    space = SPACES[space_name]
    image = torch.zeros(space.shape)
    builders = space.builders(random.Random(0), _WARM_UP + 10 * limits.rounds)
    for build in builders[:_WARM_UP]:
        count_quietly(build_on_meta(build).eval(), image)
    seconds: dict[str, list[float]] = {}
    counted = 0
    order = random.Random(1)
    begun = time.perf_counter()
    for index, build in enumerate(builders[_WARM_UP:]):
        if index >= limits.least and time.perf_counter() - begun > limits.seconds:
            break
        gc.collect()
        model = _time(seconds, "build without initialisers", partial(build_on_meta, build)).eval()
        _time(seconds, "build", partial(_build, build))
        runs = {"count": count_quietly, "bare": _run, "FlopCounterMode on meta": _count_with_torch}
        for name in order.sample(list(runs), len(runs)):
            flops = _time(seconds, name, partial(runs[name], model, image))
            counted = flops if name == "count" else counted
    seconds["build and count"] = [
        sum(pair) for pair in zip(seconds["build without initialisers"], seconds["count"], strict=True)
    ]
    return Rounds(seconds, {"fvflops, last candidate": counted})


def _time(seconds: dict[str, list[float]], name: str, run: Callable[[], Result]) -> Result:
    begun = time.process_time()
    result = run()
    seconds.setdefault(name, []).append(time.process_time() - begun)
    return result


def _build(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def _run(model: nn.Module, image: torch.Tensor) -> int:
    with torch.no_grad():
        model(image.to("meta"))
    return 0


def _count_with_torch(model: nn.Module, image: torch.Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        _run(model, image)
    return counter.get_total_flops()
