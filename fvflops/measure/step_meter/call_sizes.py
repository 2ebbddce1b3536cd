"""Cost of calls that differ in one size, such as the sequence length: interpolated where a polynomial is verified."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import islice
from math import inf, isclose, isnan, nan
from typing import NamedTuple

from fvflops.measure.step_meter.step_figures import UNKNOWN_COST, StepCost

# A quadratic is determined by three counts; it is accepted if it predicts two or more other counts.
_LEAST = 5
# Above this number of counts a polynomial is not verified further.
_ENOUGH = 12
# Sets of positions that vary together, of calls that are otherwise equal.
_MOST_AXES = 16
_RECENT = 20


class _Member(NamedTuple):
    """A call in a family: its size there, and size → call of the whole family."""

    size: int
    family: dict[int, int]


class SizeFamilies:
    """Families of calls that differ in one size alone, at one or several positions of their shapes.

    Calls are numbers here. The cost of a call that is not counted is interpolated between the counted sizes of its
    family by a quadratic, if that gives the counts of all others exactly. Attention is quadratic in the sequence
    length, other ops are linear. Where the cost jumps, as with padding to a multiple, the counts show it: such a call
    has no cost until it is counted. Sets of counted calls passed to these methods may only grow.
    """

    def __init__(self) -> None:
        self._sizes: dict[Hashable, dict[int, tuple[int, ...]]] = {}  # template → call → its sizes
        self._axes: dict[Hashable, list[tuple[int, ...]]] = {}
        self._families: dict[Hashable, dict[int, int]] = {}
        self._members: dict[int, list[_Member]] = {}
        self._fits: dict[int, tuple[int, _Fit | None]] = {}  # id of a family → number of all counts, and its fit

    def __contains__(self, call: int) -> bool:
        return call in self._members

    def add(self, call: int, kind: Hashable, description: Hashable) -> None:
        """Add a call of a kind with a description: nested tuples in which each integer is a size."""
        found: list[int] = []
        template = kind, _split(description, found)
        sizes = tuple(found)
        known, axes = self._sizes.setdefault(template, {}), self._axes.setdefault(template, [])
        recent = list(islice(reversed(known.values()), _RECENT))
        known[call] = sizes
        self._members[call] = []
        for axis in axes:
            self._join(call, template, axis, sizes)
        for other in recent:
            axis = tuple(index for index, (a, b) in enumerate(zip(sizes, other, strict=True)) if a != b)
            if axis in axes or len(axes) >= _MOST_AXES or not (_is_one(sizes, axis) and _is_one(other, axis)):
                continue
            axes.append(axis)
            for member, values in known.items():
                self._join(member, template, axis, values)

    def cost(self, call: int, counted: Mapping[int, StepCost]) -> StepCost | None:
        """Return the interpolated cost of a call, None where its family has no verified polynomial there."""
        for size, family in self._members.get(call, ()):
            fit = self._fit(family, counted)
            if fit is not None and fit.first <= size <= fit.last:
                return fit.at(size)
        return None

    def gaps(self, calls: Iterable[int], counted: Mapping[int, StepCost]) -> dict[int, float]:
        """Return how far the next counted size is in the families of calls; 0 if counting a call adds nothing."""
        counted_sizes: dict[int, list[int]] = {}

        def gap(size: int, family: dict[int, int]) -> float:
            if id(family) not in counted_sizes:
                counted_sizes[id(family)] = [other for other, member in family.items() if member in counted]
            sizes = counted_sizes[id(family)]
            if len(sizes) >= _ENOUGH and min(sizes) <= size <= max(sizes) and self._fit(family, counted) is not None:
                return 0
            return min((abs(size - other) for other in sizes), default=inf)

        return {call: min((gap(*member) for member in self._members[call]), default=inf) for call in calls}

    def _join(self, call: int, template: Hashable, axis: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        if _is_one(sizes, axis):
            others = tuple(size for index, size in enumerate(sizes) if index not in axis)
            family = self._families.setdefault((template, axis, others), {})
            family[sizes[axis[0]]] = call
            self._members[call].append(_Member(sizes[axis[0]], family))

    def _fit(self, family: dict[int, int], counted: Mapping[int, StepCost]) -> _Fit | None:
        number, fit = self._fits.get(id(family), (-1, None))
        if number != len(counted):
            fit = _find_fit({size: counted[call] for size, call in family.items() if call in counted})
            self._fits[id(family)] = len(counted), fit
        return fit


def _split(value: Hashable, sizes: list[int]) -> Hashable:
    """Return a description without its integers, which are appended to `sizes`."""
    if isinstance(value, tuple):
        return tuple([_split(item, sizes) for item in value])
    if isinstance(value, int) and not isinstance(value, bool):
        sizes.append(value)
        return int
    return value


def _is_one(sizes: tuple[int, ...], axis: tuple[int, ...]) -> bool:
    """Return whether there is one size at all positions of an axis."""
    return len({sizes[index] for index in axis}) == 1


class _Fit(NamedTuple):
    """A quadratic for each part of a cost, by its values at three sizes, from the first to the last counted size."""

    first: int
    last: int
    nodes: tuple[tuple[int, StepCost], ...]

    def at(self, size: int) -> StepCost:
        """Return the cost at a size."""
        weights = list(self._weights(size))
        parts: list[float] = []
        for index in range(len(UNKNOWN_COST)):
            values = [cost[index] for _, cost in self.nodes]
            if any(isnan(value) for value in values):
                parts.append(nan)
                continue
            exact = sum((weight * Fraction(value) for weight, value in zip(weights, values, strict=True)), Fraction())
            parts.append(exact.numerator if exact.denominator == 1 else float(exact))
        return StepCost(*parts)

    def _weights(self, size: int) -> Iterator[Fraction]:
        for node, _ in self.nodes:
            weight = Fraction(1)
            for other, _ in self.nodes:
                if other != node:
                    weight *= Fraction(size - other, node - other)
            yield weight

    def gives(self, size: int, cost: StepCost) -> bool:
        """Return whether a cost matches the fit: FLOPs exactly, seconds but for rounding."""
        return all(
            (isnan(a) and isnan(b)) or a == b or (isinstance(b, float) and isclose(a, b, rel_tol=1e-9))
            for a, b in zip(self.at(size), cost, strict=True)
        )


def _find_fit(costs: Mapping[int, StepCost]) -> _Fit | None:
    """Return the quadratic through the costs at all sizes, None if there is none or they are too few."""
    if len(costs) < _LEAST or UNKNOWN_COST in costs.values():
        return None
    sizes = sorted(costs)
    nodes = tuple((size, costs[size]) for size in (sizes[0], sizes[len(sizes) // 2], sizes[-1]))
    fit = _Fit(sizes[0], sizes[-1], nodes)
    return fit if all(fit.gives(size, cost) for size, cost in costs.items()) else None
