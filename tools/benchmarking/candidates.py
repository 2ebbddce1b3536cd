"""Architecture search: candidates of MobileNet-like networks and NAS-Bench-201, and the rate of counting new ones."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TypeVar

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarking.rounds import Limits, Rounds
from fvflops import FlopCountAnalysis, count_many
from fvflops.sources import SourceOptions
from fvflops.sources.meta import build_on_meta

_WIDTHS = (16, 24, 32, 64, 96, 160, 320)
_STRIDES = (1, 2, 2, 2, 1, 2, 1)

# The ops of NAS-Bench-201 (Dong and Yang, ICLR 2020), one for each edge of a cell: 5^6 = 15,625 cells.
OPS = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")
EDGES = tuple((node, source) for node in range(1, 4) for source in range(node))
_CELLS_IN_STAGE = 5
_CELL_WIDTHS = (16, 32, 64)


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expansion, depthwise convolution, projection."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers += _conv(inputs, hidden, 1)
        layers += _conv(hidden, hidden, kernel, stride, groups=hidden)
        layers += [nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.layers = nn.Sequential(*layers)
        self.has_skip = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, outputs, height / stride, width / stride]."""
        return x + self.layers(x) if self.has_skip else self.layers(x)


class MobileNet(nn.Module):
    """A MobileNetV2 whose widths, depths, kernels and expansions are drawn by a generator."""

    def __init__(self, generator: random.Random) -> None:
        super().__init__()
        multiplier = generator.choice((0.5, 0.75, 1.0, 1.25, 1.5))
        width = _round(32 * multiplier)
        layers = _conv(3, width, 3, 2)
        for base, stride in zip(_WIDTHS, _STRIDES, strict=True):
            outputs = _round(base * multiplier * generator.choice((0.75, 1.0, 1.25)))
            for index in range(generator.randint(1, 4)):
                kernel, expansion = generator.choice((3, 5, 7)), generator.choice((1, 3, 4, 6))
                layers.append(InvertedResidual(width, outputs, kernel, stride if index == 0 else 1, expansion))
                width = outputs
        layers += _conv(width, 1280, 1)
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, 1000] logits of [batch, 3, 224, 224] images."""
        return self.classifier(self.features(x).mean([2, 3]))


class _Zero(nn.Module):
    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, :: self.stride, :: self.stride].mul(0.0)


class Cell(nn.Module):
    """A cell: each node is the sum of an op on every node before it."""

    def __init__(self, ops: tuple[str, ...], width: int) -> None:
        super().__init__()
        self.edges = nn.ModuleList(_make_op(op, width) for op in ops)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last node, of the input's shape."""
        nodes = [x]
        edges = iter(self.edges)
        for node in range(1, 4):
            total = next(edges)(nodes[0])
            for source in range(1, node):
                total = total + next(edges)(nodes[source])
            nodes.append(total)
        return nodes[-1]


class _ReduceBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv_a = _relu_conv(inputs, outputs, 3, 2)
        self.conv_b = _relu_conv(outputs, outputs, 3)
        self.downsample = nn.Sequential(nn.AvgPool2d(2, 2), nn.Conv2d(inputs, outputs, 1, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.downsample(x) + self.conv_b(self.conv_a(x))


class CellNetwork(nn.Module):
    """The network in which NAS-Bench-201 evaluates a cell: three stages of five cells for 32 x 32 images."""

    def __init__(self, ops: tuple[str, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16))]
        width = 16
        for outputs in _CELL_WIDTHS:
            if outputs != width:
                layers.append(_ReduceBlock(width, outputs))
            layers += [Cell(ops, outputs) for _ in range(_CELLS_IN_STAGE)]
            width = outputs
        self.cells = nn.Sequential(*layers)
        self.last = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.classifier = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, 10] logits of [batch, 3, 32, 32] images."""
        x = self.last(self.cells(x))
        return self.classifier(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


def _make_op(name: str, width: int) -> nn.Module:
    if name == "none":
        return _Zero(1)
    if name == "skip_connect":
        return nn.Identity()
    if name == "avg_pool_3x3":
        return nn.AvgPool2d(3, 1, 1, count_include_pad=False)
    return _relu_conv(width, width, 1 if name == "nor_conv_1x1" else 3)


def _relu_conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(nn.ReLU(), conv, nn.BatchNorm2d(outputs))


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU6(inplace=True)]


def _round(width: float) -> int:
    return max(8, int(width + 4) // 8 * 8)


@dataclass(frozen=True, slots=True)
class Space:
    """A space of architectures: `builders` returns factories of different ones, drawn at random."""

    shape: tuple[int, ...]
    builders: Callable[[random.Random, int], list[Callable[[], nn.Module]]]


def _draw_mobile_nets(generator: random.Random, number: int) -> list[Callable[[], nn.Module]]:
    return [partial(MobileNet, random.Random(generator.random())) for _ in range(number)]


def _draw_cells(
    build: Callable[[tuple[str, ...]], nn.Module], generator: random.Random, number: int
) -> list[Callable[[], nn.Module]]:
    return [partial(build, ops) for ops in generator.sample(list(product(OPS, repeat=len(EDGES))), number)]


SPACES: dict[str, Space] = {
    "MobileNet-like": Space((1, 3, 224, 224), _draw_mobile_nets),
    "NAS-Bench-201 cells": Space((1, 16, 32, 32), partial(_draw_cells, partial(Cell, width=16))),
    "NAS-Bench-201 networks": Space((1, 3, 32, 32), partial(_draw_cells, CellNetwork)),
}


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
        FlopCountAnalysis(build_on_meta(build).eval(), image, warn=False).total()
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
        counted.append(FlopCountAnalysis(model, image, warn=False).total())


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
