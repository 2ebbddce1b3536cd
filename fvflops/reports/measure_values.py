"""Sums of a measure by module, submodules included, and formatting of its values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fvflops.trace.module_tree import modules_above
from fvflops.units import format_seconds, format_short
from fvflops.views.breakdown import Cell, Measure


def sum_measures(values: Mapping[Cell, int]) -> Counter[str]:
    """Return module name → sum of the values, submodules included; "" is the model.

    >>> sum_measures({Cell("a.b"): 2, Cell("a"): 3})["a"]
    5
    """
    sums: Counter[str] = Counter()
    for cell, value in values.items():
        for name in (*modules_above(cell.module), cell.module):
            sums[name] += value
    return sums


def format_value(measure: Measure, value: int) -> str:
    """Return a value with its unit, rounded to three digits.

    >>> format_value(Measure("Bytes", {}, unit="B"), 1024)
    '1.02KB'
    """
    if measure.unit == "ns":
        return format_seconds(value / 1e9)
    return format_short(value) + measure.unit
