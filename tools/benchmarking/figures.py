"""The figures of a section, the aims that they should keep, and the report."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Unit = Literal["ratio", "s", "MB", "count", "a second"]


@dataclass(frozen=True, slots=True)
class Aim:
    """A bound that a figure should keep: `at` is "≤", "≥" or "=".

    >>> Aim("≤", 0.12).is_met(0.1)
    True
    """

    at: Literal["≤", "≥", "="]
    bound: float

    def is_met(self, value: float) -> bool:
        return {"≤": value <= self.bound, "≥": value >= self.bound, "=": value == self.bound}[self.at]


@dataclass(frozen=True, slots=True)
class Figure:
    """A quantity of one section: the median of `samples` values, and their quartiles.

    >>> summarise_values("toy, forward", "warm / bare", "ratio", [3.0, 1.0, 2.0])
    Figure(section='toy, forward', name='warm / bare', unit='ratio', value=2.0, low=1.5, high=2.5, samples=3)
    """

    section: str
    name: str
    unit: Unit
    value: float
    low: float
    high: float
    samples: int


def summarise_values(section: str, name: str, unit: Unit, values: Sequence[float]) -> Figure:
    """Return the median of some values, with the quartiles that lie among them."""
    if len(values) == 1:
        return Figure(section, name, unit, values[0], values[0], values[0], 1)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Figure(section, name, unit, middle, low, high, len(values))


def summarise_ratios(section: str, name: str, above: Sequence[float], below: Sequence[float]) -> Figure:
    """Return the median of the ratios of two columns, row by row: both values of a row met the same noise."""
    return summarise_values(section, name, "ratio", [a / b for a, b in zip(above, below, strict=True)])


AIMS: dict[tuple[str, str], Aim] = {
    **{
        (f"{case}, {step}", figure): aim
        for case in ("resnet50", "vit_b_16")
        for step, figure, aim in (
            ("forward", "fvflops warm / bare", Aim("≤", 0.12)),
            ("forward", "fvflops cold / bare", Aim("≤", 0.6)),
            ("forward", "FlopCounterMode on meta / fvflops warm", Aim("≥", 12)),
            ("forward", "fvcore on weights / fvflops warm on weights", Aim("≥", 30)),
            ("forward+backward", "fvflops warm / bare", Aim("≤", 0.25)),
            ("forward, in a new process", "first fvflops / first bare", Aim("≤", 0.6)),
        )
    },
    ("llama3_405b, forward", "fvflops cold"): Aim("≤", 0.2),
    ("llama3_405b, forward", "macs less the closed form"): Aim("=", 0),
    ("llama3_405b, forward+backward", "fvflops cold"): Aim("≤", 1.5),
    ("llama3_405b, forward, in a new process", "first fvflops"): Aim("≤", 0.2),
    ("llama3_405b, forward, in a new process", "peak growth of memory"): Aim("≤", 150),
    ("llama3_405b, forward+backward, in a new process", "first fvflops"): Aim("≤", 1.5),
    ("llama3_405b, forward+backward, in a new process", "peak growth of memory"): Aim("≤", 150),
    ("resnet50, batch 8, real training step", "recorded / no-op mode"): Aim("≤", 1.03),
    ("small GPT, real training step", "recorded / no-op mode"): Aim("≤", 1.05),
    ("resnet50, batch 8, real training step", "metered / plain"): Aim("≤", 1.01),
    ("small GPT, real training step", "metered / plain"): Aim("≤", 1.01),
    ("resnet50, batch 8, measured forward", "time / plain"): Aim("≤", 1.05),
    ("resnet50, batch 8, measured forward", "time and memory / plain"): Aim("≤", 1.10),
    ("first count", "import fvflops / import torch"): Aim("≤", 0.1),
    ("first count", "import fvflops and count / import torch"): Aim("≤", 0.25),
    ("first count", "heavy modules asked for"): Aim("=", 0),
    ("growth with layers", "512 / 8, fvflops warm"): Aim("≤", 64),
    ("growth with layers", "512 / 8, fvflops cold"): Aim("≤", 64),
    ("growth with batch", "4096 / 1, fvflops warm"): Aim("≤", 1.2),
    ("growth with sequence length", "131072 / 128, fvflops warm"): Aim("≤", 1.2),
    ("candidates: MobileNet-like", "count, candidates"): Aim("≥", 100),
    ("candidates: MobileNet-like", "build and count, candidates"): Aim("≥", 25),
    ("candidates: NAS-Bench-201 cells", "count, candidates"): Aim("≥", 300),
    **{
        (f"repeated: {name}", figure): aim
        for name in ("LeNet-5", "LeNet-5, forward+backward", "LeNet-5, each time another model", "ResNet-50")
        for figure, aim in (
            ("last tenth / first tenth", Aim("≤", 1.2)),
            ("growth of Python's objects", Aim("≤", 100)),
            ("growth of memory", Aim("≤", 5)),
        )
    },
}


def find_aim(figure: Figure) -> Aim | None:
    """Return the aim of a figure; first counts have the same for every model."""
    section = "first count" if figure.section.startswith("first count: ") else figure.section
    return AIMS.get((section, figure.name))
