"""Architecture search: MobileNets and cells of NAS-Bench-201 at random, and the time of counting new ones."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
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


def _mobile_net(seed: float) -> nn.Module:
    """Return a MobileNetV2 with expansions, widths and depths at random."""
    import torchvision

    draw = random.Random(seed)
    blocks = [
        [draw.choice((1, 3, 4, 6)), int(width * draw.choice((0.75, 1.0, 1.25))), draw.randint(1, 4), stride]
        for width, stride in zip((16, 24, 32, 64, 96, 160, 320), (1, 2, 2, 2, 1, 2, 1), strict=True)
    ]
    width = draw.choice((0.5, 0.75, 1.0, 1.25, 1.5))
    return torchvision.models.MobileNetV2(width_mult=width, inverted_residual_setting=blocks)


class _Zero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul(0.0)


class Cell(nn.Module):
    """A cell of NAS-Bench-201 (Dong and Yang, ICLR 2020): each node is the sum of an op on every node before it."""

    def __init__(self, ops: Sequence[Callable[[int], nn.Module]], width: int = 16) -> None:
        super().__init__()
        self.edges = nn.ModuleList(op(width) for op in ops)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nodes, edges = [x], iter(self.edges)
        while len(nodes) < 4:
            nodes.append(torch.stack([next(edges)(node) for node in nodes]).sum(0))
        return nodes[-1]


def _conv(kernel: int, width: int) -> nn.Module:
    conv = nn.Conv2d(width, width, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(nn.ReLU(), conv, nn.BatchNorm2d(width))


_OPS: tuple[Callable[[int], nn.Module], ...] = (
    lambda width: _Zero(),
    lambda width: nn.Identity(),
    partial(_conv, 1),
    partial(_conv, 3),
    lambda width: nn.AvgPool2d(3, 1, 1, count_include_pad=False),
)


def _draw_mobile_nets(generator: random.Random, number: int) -> list[Build]:
    return [partial(_mobile_net, generator.random()) for _ in range(number)]


def _draw_cells(generator: random.Random, number: int) -> list[Build]:
    return [partial(Cell, ops) for ops in generator.sample(list(product(_OPS, repeat=6)), number)]


# Name → the input of a candidate, and the function that returns factories of different ones, drawn at random.
SPACES: dict[str, tuple[tuple[int, ...], Callable[[random.Random, int], list[Build]]]] = {
    "MobileNet-like": ((1, 3, 224, 224), _draw_mobile_nets),
    "NAS-Bench-201 cells": ((1, 16, 32, 32), _draw_cells),
}


def time_search(space: str, limits: Limits) -> dict[str, list[float]]:
    """Time building and counting batches of candidates, and running them on the meta device; seconds a candidate."""
    shape, draw = SPACES[space]
    image = torch.zeros(shape)
    options = SourceOptions(inputs=(",".join(map(str, shape)),))
    builders = draw(random.Random(0), _WARM_UP + 2 * _BATCH * limits.rounds)
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
