"""Repeat the items of each layer of a shortened model for the full model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from fvflops.trace.expansion.layer_run import SECOND, LayerRun

T = TypeVar("T")


def repeat_periods(items: Iterable[tuple[str, T]], run: LayerRun) -> Iterator[tuple[str, T]]:
    """Yield (name, item) of the full model from those of the shortened model, in the order of the full model.

    >>> run = LayerRun("layers", 0, 1, 6)
    >>> [name for name, _ in repeat_periods([(f"layers.{index}", None) for index in range(4)], run)]
    ['layers.0', 'layers.1', 'layers.2', 'layers.3', 'layers.4', 'layers.5']
    """
    pairs = list(items)
    for (name, item), periods in with_added(pairs, lambda pair: pair[0], run):
        yield run.rename(name, periods), item


def with_added(items: Iterable[T], name_of: Callable[[T], str], run: LayerRun) -> Iterator[tuple[T, int]]:
    """Yield for each item of the full model its item in the shortened model, and the layer offset."""
    ordered = [(item, run.period_of(name_of(item))) for item in items]
    copied = False
    for item, period in ordered:
        if period == SECOND and not copied:
            for periods in range(run.added):
                yield from ((copy, periods) for copy, other in ordered if other == SECOND)
            copied = True
        yield item, run.place(period, high=period == SECOND)
