"""A run of equal layers of a model, four periods of it in a shortened model, and their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from fvflops.trace.records import TraceError

T = TypeVar("T")

# Periods in a shortened model: the first, two that must run equally, and the last. The first and last layers may
# differ, by a gathered parameter or a gradient without a predecessor.
KEPT = 4
FIRST, SECOND = 1, 2  # numbers of the periods that must run equally


class UnequalLayersError(TraceError):
    """A trace in which layers that look equal ran differently, so that it cannot be expanded."""


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Equal layers of one module list.

    `path` names the list, `start` is the index of the first layer. `period` successive layers repeat, `count` times in
    the full model and `KEPT` times in the shortened one. `index_attributes` are (name below the layer, attribute) of
    attributes that count the layers. Periods are numbered from 0.

    >>> run = LayerRun("layers", 0, 1, 12)
    >>> run.period_of("layers.2.mlp"), run.period_of("norm"), run.rename("layers.2.mlp", run.added)
    (2, None, 'layers.10.mlp')
    """

    path: str
    start: int
    period: int
    count: int
    index_attributes: frozenset[tuple[str, str]] = frozenset()

    @property
    def added(self) -> int:
        """The number of periods that the shortened model lacks."""
        return self.count - KEPT

    def period_of(self, name: str) -> int | None:
        """Return the period of a module, parameter or buffer by its name, `KEPT` or more behind the run; else None."""
        index = self._index_in(name)
        return None if index is None or index < self.start else (index - self.start) // self.period

    def rename(self, name: str, periods: int) -> str:
        """Return a name with the index of its layer moved by a number of periods; other names are returned as is."""
        index = self._index_in(name)
        if index is None or index < self.start or not periods:
            return name
        begin = len(self.path) + 1 if self.path else 0
        rest = name[begin:].partition(".")
        return f"{name[:begin]}{index + periods * self.period}{rest[1]}{rest[2]}"

    def periods_in(self, text: str) -> list[int | None]:
        """Return the periods of the layers that a text names."""
        return [self.period_of(name) for name in re.findall(self._pattern, text)] if self.path in text else []

    def rename_in(self, text: str, periods: int) -> str:
        """Return a text with the layers that it names moved by a number of periods.

        >>> LayerRun("h", 0, 1, 12).rename_in("FSDP::pre_forward (h.2)", 8)
        'FSDP::pre_forward (h.10)'
        """
        return re.sub(self._pattern, lambda match: self.rename(match[0], periods), text) if self.path in text else text

    @property
    def _pattern(self) -> str:
        # Nothing matches without a path, since any number could be a layer's.
        return rf"(?<![\w.]){re.escape(self.path)}\.\d+(?!\w)" if self.path else r"(?!)"

    def shift(self, period: int | None, *, high: bool) -> int:
        """Return how many periods later a name is in the full model than in the shortened one.

        Periods before the added ones remain, those after them move. `FIRST` and `SECOND` are meant relative to where
        they are named: next to the start of the run or, where that is `high`, to its end.

        >>> run = LayerRun("layers", 0, 1, 12)
        >>> [run.shift(period, high=False) for period in (None, 0, 1, 2, 3)]
        [0, 0, 0, 0, 8]
        >>> [run.shift(period, high=True) for period in (None, 0, 1, 2, 3)]
        [0, 0, 8, 8, 8]
        """
        return self.added if period is not None and period >= (FIRST if high else SECOND + 1) else 0

    def _index_in(self, name: str) -> int | None:
        if self.path:
            if not name.startswith(self.path + "."):
                return None
            name = name[len(self.path) + 1 :]
        index = name.partition(".")[0]
        return int(index) if index.isdecimal() else None


def repeat_periods(named: Iterable[tuple[str, T]], run: LayerRun) -> Iterator[tuple[str, T, int]]:
    """Yield (name, item, layer offset) of the full model from (name, item) of the shortened model, in its order."""
    ordered = [(name, item, run.period_of(name)) for name, item in named]
    copied = False
    for name, item, period in ordered:
        if period == SECOND and not copied:
            for periods in range(run.added):
                yield from ((run.rename(path, periods), copy, periods) for path, copy, at in ordered if at == SECOND)
            copied = True
        periods = run.shift(period, high=period == SECOND)
        yield run.rename(name, periods), item, periods
