"""The search: rates of counting models that were never counted before, in CPU time of one core."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarking.candidates import SPACES
from benchmarking.counting import build_on_meta, count_quietly
from benchmarking.rounds import Limits, Rounds
from fvflops import count_many
from fvflops.sources import SourceOptions

_WARM_UP = 400  # candidates counted before, as in a search through thousands
_BATCH = 8  # candidates counted one after the other, as a search does, before something else is timed

Build = Callable[[], nn.Module]
Result = TypeVar("Result")


def run_search(space_name: str, limits: Limits) -> Rounds:
    """Time building and counting batches of candidates, and running them on the meta device; seconds a candidate."""
    space = SPACES[space_name]
    image = torch.zeros(space.shape)
    options = SourceOptions(inputs=(",".join(map(str, space.shape)),))
    builders = space.builders(random.Random(0), _WARM_UP + 2 * _BATCH * limits.rounds)
    for build in builders[:_WARM_UP]:
        count_quietly(build_on_meta(build).eval(), image)
    seconds: dict[str, list[float]] = {}
    counted: list[int] = []
    order = random.Random(1)
    begun = time.perf_counter()
    for index in range(limits.rounds):
        if index >= limits.least and time.perf_counter() - begun > limits.seconds:
            break
        start = _WARM_UP + 2 * _BATCH * index
        batch, rows = builders[start : start + _BATCH], builders[start + _BATCH : start + 2 * _BATCH]
        models = _time(seconds, "build without initialisers", partial(_build_all, batch))
        _time(seconds, "build", partial(_build, batch))
        runs: dict[str, Callable[[], object]] = {
            "count": partial(_count, models, image, counted),
            "bare": partial(_run, models, image),
            "FlopCounterMode on meta": partial(_count_with_torch, models, image),
            "count_many, built": partial(_count_many, rows, options),
        }
        for name in order.sample(list(runs), len(runs)):
            _time(seconds, name, runs[name])
    seconds["build and count"] = [
        sum(pair) for pair in zip(seconds["build without initialisers"], seconds["count"], strict=True)
    ]
    return Rounds(seconds, {"fvflops, last candidate": counted[-1]})


def _time(seconds: dict[str, list[float]], name: str, run: Callable[[], Result]) -> Result:
    gc.collect()
    begun = time.process_time()
    result = run()
    seconds.setdefault(name, []).append((time.process_time() - begun) / _BATCH)
    return result


def _build_all(builders: Sequence[Build]) -> list[nn.Module]:
    return [build_on_meta(build).eval() for build in builders]


def _count(models: Sequence[nn.Module], image: torch.Tensor, counted: list[int]) -> None:
    for model in models:
        counted.append(count_quietly(model, image))


def _count_many(builders: Sequence[Build], options: SourceOptions) -> None:
    for row in count_many(builders, options=options):
        if row.error:
            raise RuntimeError(row.error)


def _build(builders: Sequence[Build]) -> None:
    with torch.device("meta"):
        for build in builders:
            build()


def _run(models: Sequence[nn.Module], image: torch.Tensor) -> None:
    with torch.no_grad():
        for model in models:
            model(image.to("meta"))


def _count_with_torch(models: Sequence[nn.Module], image: torch.Tensor) -> None:
    for model in models:
        with FlopCounterMode(display=False):
            _run([model], image)
