"""The figure: one measured quantity with its spread, and the aim that it is held against."""

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
        """Return whether a measured value keeps the bound."""
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
