"""Architecture search: MobileNets at random, and the time of counting new ones."""

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

from benchmarking.measuring import Limits
from fvflops import FlopCountAnalysis, count_many
from fvflops.sources import SourceOptions
from fvflops.sources.meta import build_on_meta
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

define_torchvision_schemas()
_WARM_UP = 400  # candidates counted before, as in a search through thousands
_BATCH = 8  # candidates counted one after the other, as a search does, before something else is timed

Build = Callable[[], nn.Module]
Result = TypeVar("Result")


def _mobile_net(seed: int) -> nn.Module:
    """Return a MobileNetV2 with expansions, widths and depths at random."""
    import torchvision

    draw = random.Random(seed)
    blocks = [
        [draw.choice((1, 3, 4, 6)), int(width * draw.choice((0.75, 1.0, 1.25))), draw.randint(1, 4), stride]
        for width, stride in zip((16, 24, 32, 64, 96, 160, 320), (1, 2, 2, 2, 1, 2, 1), strict=True)
    ]
    width = draw.choice((0.5, 0.75, 1.0, 1.25, 1.5))
    return torchvision.models.MobileNetV2(width_mult=width, inverted_residual_setting=blocks)


def time_search(limits: Limits) -> dict[str, list[float]]:
    """Time building and counting batches of candidates, and running them on the meta device; seconds a candidate."""
    image, options = torch.zeros(1, 3, 224, 224), SourceOptions(inputs=("1,3,224,224",))
    builders = [partial(_mobile_net, seed) for seed in range(_WARM_UP + 2 * _BATCH * limits.rounds)]
    _count(_build_all(builders[:_WARM_UP]), image)
    seconds: dict[str, list[float]] = {}
    order = random.Random(1)
    for index in limits.count():
        start = _WARM_UP + 2 * _BATCH * index
        batch, rows = builders[start : start + _BATCH], builders[start + _BATCH : start + 2 * _BATCH]
        models = _time(seconds, "build without initialisers", partial(_build_all, batch))
        _time(seconds, "build", partial(_build, batch))
        runs: dict[str, Callable[[], object]] = {
            "count": partial(_count, models, image),
            "bare": partial(_run, models, image),
            "FlopCounterMode on meta": partial(_count_with_torch, models, image),
            "count_many, built": partial(_count_many, rows, options),
        }
        for name in order.sample(list(runs), len(runs)):
            _time(seconds, name, runs[name])
    pairs = zip(seconds["build without initialisers"], seconds["count"], strict=True)
    return {**seconds, "build and count": [sum(pair) for pair in pairs]}


def _time(seconds: dict[str, list[float]], name: str, run: Callable[[], Result]) -> Result:
    gc.collect()
    begun = time.process_time()
    result = run()
    seconds.setdefault(name, []).append((time.process_time() - begun) / _BATCH)
    return result


def _build_all(builders: Sequence[Build]) -> list[nn.Module]:
    return [build_on_meta(build).eval() for build in builders]


def _count(models: Sequence[nn.Module], image: torch.Tensor) -> None:
    for model in models:
        FlopCountAnalysis(model, image, warn=False).total()


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
