"""Find the polynomial of a count in its sizes by exact interpolation, and verify it at other sizes.

A polynomial whose exponents form a lower set (with each, all that are less) is determined by its values on a grid of
the same form, by Newton's divided differences along one size after the other (Werner 1980; Sauer 2004).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product

from fvflops.comparison.cost_functions import Axis, CostExpression, Sizes
from fvflops.comparison.polynomial import Exponents, Number, Polynomial

# The highest power of one size that is tried.
HIGHEST = 4
# Steps whose multiples are tried where a count is not a polynomial: typical strides, patches and blocks.
PERIODS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 3, 6, 12, 24, 48, 96, 7, 14, 28, 56, 112, 5, 10, 20, 40, 80)
# Indices of sizes in a long range: at its low end, where a run is cheapest, unevenly spaced.
_NODE_INDICES = (0, 1, 3, 7, 12, 20)
# Fractions of a range at which the fit is verified; fractions by the golden ratio rarely hit multiples.
_FRACTIONS = (1.0, 0.5, 0.618034, 0.236068, 0.854102)


def find_fit(cost: CostExpression, count: Callable[[Sizes], int], counted: Mapping[Sizes, int]) -> CostExpression:
    """Return a cost with the domain of its polynomial, and the sizes at which that is fitted and held out.

    The domain is all sizes of the axes, sizes above a minimum, or the multiples of a step. Without a polynomial
    `fitted` is empty, and `without` names the sizes in which there is none, or all of them where there is one in each
    size alone but none in all together. `count` is called with sizes in the order of the axes, and `counted` has its
    results so far: results that are not fitted verify the fit. The degree is raised, up to the fourth in each size,
    until all counts agree.

    >>> counted, axes = {}, (Axis("batch", 1, 9), Axis("seq", 1, 99))
    >>> def count(sizes):
    ...     return counted.setdefault(sizes, sizes[0] * sizes[1] ** 2 + 3)
    >>> fit = find_fit(CostExpression("flops", axes, None, axes), count, counted)
    >>> print(interpolate(fit, counted), len(fit.fitted), len(fit.held_out))
    batch·seq² + 3 6 15
    """
    axes = cost.axes
    domains = [_search_axis(axis_index, axes, count) for axis_index in range(len(axes))]
    without = tuple(axis.name for axis, domain in zip(axes, domains, strict=True) if domain is None)
    if without:
        return replace(cost, without=without)
    domain = tuple(axis for axis in domains if axis is not None)
    # Searched again inside the common domain: sizes outside, such as below a stride, may hide a term.
    found = [_find_factors(axis, _along(index, domain, count)) for index, axis in enumerate(domain)]
    degrees = [len(factors) - 1 for factors in found if factors]
    if len(degrees) < len(domain):
        return replace(cost, without=cost.names)
    for sizes in _spread(domain):
        count(sizes)
    for total in range(max(degrees), sum(degrees) + 1):
        exponents = [key for key in product(*(range(degree + 1) for degree in degrees)) if sum(key) <= total]
        grid = [_nodes(axis) for axis in domain]
        fitted = dict.fromkeys(tuple(map(list.__getitem__, grid, key)) for key in exponents)
        for sizes in fitted:
            count(sizes)
        inside = [sizes for sizes in counted if all(size in axis for size, axis in zip(sizes, domain, strict=True))]
        held_out = tuple(sizes for sizes in inside if sizes not in fitted)
        fit = replace(cost, domain=domain, fitted=tuple(fitted), held_out=held_out)
        if held_out and agrees(fit, interpolate(fit, counted), counted):
            return fit
    return replace(cost, without=cost.names)


def interpolate(fit: CostExpression, counted: Mapping[Sizes, int]) -> Polynomial:
    """Return the polynomial through the counts at the fitted sizes, of which there is one for each term."""
    grid = [_nodes(axis) for axis in fit.domain]
    table: dict[Exponents, Number] = {tuple(map(list.index, grid, sizes)): counted[sizes] for sizes in fit.fitted}
    for axis_index, nodes in enumerate(grid):
        for line in _lines(table, axis_index):
            column = _to_powers(_divide_differences([table[key] for key in line], nodes), nodes)
            table.update(zip(line, column, strict=True))
    return Polynomial.of(fit.names, table)


def agrees(fit: CostExpression, polynomial: Polynomial, counted: Mapping[Sizes, int]) -> bool:
    """Return whether a polynomial gives the counts at all sizes that a fit held out."""
    return all(polynomial.at(sizes) == counted[sizes] for sizes in fit.held_out)


def _search_axis(axis_index: int, axes: Sequence[Axis], count: Callable[[Sizes], int]) -> Axis | None:
    """Return the sizes of one axis in which a count is a polynomial, the others being fixed."""
    count_at = _along(axis_index, axes, count)
    varied = axes[axis_index]
    if _find_factors(varied, count_at):
        return varied
    tail = _find_tail(varied, count_at)
    if tail is not None and 4 * len(tail) >= len(varied):
        return tail
    return next((axis for axis in _multiples(varied) if _find_factors(axis, count_at)), tail)


def _along(axis_index: int, axes: Sequence[Axis], count: Callable[[Sizes], int]) -> Callable[[int], int]:
    """Return a count as a function of one size, the others fixed at their third value: the first may be special."""
    others = tuple(_nodes(axis)[min(2, len(axis) - 1)] for axis in axes)
    return lambda size: count((*others[:axis_index], size, *others[axis_index + 1 :]))


def _find_factors(axis: Axis, count_at: Callable[[int], int]) -> list[Number]:
    """Return the factors of Newton's form of a count, one more than its degree; [] where it is not a polynomial."""
    nodes = _nodes(axis)
    for degree in range(min(HIGHEST, len(nodes) - 2) + 1):
        factors = _divide_differences([count_at(size) for size in nodes[: degree + 1]], nodes)
        others = (nodes[degree + 1], *_verification_sizes(axis))
        if all(_evaluate(factors, nodes, size) == count_at(size) for size in others):
            return factors
    return []


def _find_tail(axis: Axis, count_at: Callable[[int], int]) -> Axis | None:
    """Return the axis of the sizes above a minimum if a count is a polynomial only there, as with a sliding window."""
    low, high = 0, max(len(axis) - max(len(axis) // 8, 8), 1)
    if len(axis) - high < 4:
        return None
    tail = Axis(axis.name, axis[high], axis.last, axis.step)
    nodes, factors = _nodes(tail), _find_factors(tail, count_at)
    if not factors:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        is_inside = _evaluate(factors, nodes, axis[middle]) == count_at(axis[middle])
        low, high = (low, middle) if is_inside else (middle, high)
    longer = Axis(axis.name, axis[high], axis.last, axis.step)
    return longer if _find_factors(longer, count_at) else tail


def _multiples(axis: Axis) -> Iterable[Axis]:
    """Yield the axes of multiples of a step that have enough sizes for a fit."""
    if axis.first % axis.step:
        return
    for period in PERIODS:
        step = math.lcm(axis.step, period)
        first = -(-axis.first // step) * step
        if step > axis.step and (axis.last - first) // step >= 3:
            yield Axis(axis.name, first, axis.last, step)


def _nodes(axis: Axis) -> list[int]:
    """Return the sizes for fitting a polynomial of the highest degree."""
    if len(axis) > 2 * _NODE_INDICES[-1]:
        return [axis[index] for index in _NODE_INDICES]
    return [axis[index] for index in range(min(len(axis), HIGHEST + 2))]


def _verification_sizes(axis: Axis) -> list[int]:
    """Return at most three sizes across an axis, the last one first."""
    return list(dict.fromkeys(axis[int((len(axis) - 1) * fraction)] for fraction in _FRACTIONS[:3]))


def _spread(axes: Sequence[Axis]) -> list[Sizes]:
    """Return some sizes across the axes: all at their last, all at their first, and mixed."""

    def pick(number: int, axis: Axis, turn: int) -> int:
        return axis[int((len(axis) - 1) * _FRACTIONS[(turn * (number + 1) + number) % len(_FRACTIONS)])]

    mixed = [tuple(pick(*item, turn) for item in enumerate(axes)) for turn in range(len(_FRACTIONS))]
    return list(dict.fromkeys([tuple(axis.last for axis in axes), tuple(axis.first for axis in axes), *mixed]))


def _lines(exponents: Iterable[Exponents], axis_index: int) -> Iterable[list[Exponents]]:
    """Return the exponents in groups that differ along one axis, in ascending order."""
    lines: dict[Exponents, list[Exponents]] = {}
    for key in sorted(exponents):
        lines.setdefault((*key[:axis_index], *key[axis_index + 1 :]), []).append(key)
    return lines.values()


def _divide_differences(values: Sequence[Number], nodes: Sequence[int]) -> list[Number]:
    """Return the factors of Newton's form: of 1, (x - x0), (x - x0)(x - x1) ..."""
    factors = list(values)
    for order in range(1, len(factors)):
        for index in range(len(factors) - 1, order - 1, -1):
            factors[index] = Fraction(factors[index] - factors[index - 1], nodes[index] - nodes[index - order])
    return factors


def _to_powers(factors: Sequence[Number], nodes: Sequence[int]) -> list[Number]:
    """Return the coefficients of 1, x, x² ... of a polynomial in Newton's form."""
    powers: list[Number] = []
    for index in range(len(factors) - 1, -1, -1):
        # powers * (x - node) + factor
        shifted, same = [Fraction(0), *powers], [*powers, Fraction(0)]
        powers = [higher - nodes[index] * lower for higher, lower in zip(shifted, same, strict=True)]
        powers[0] += factors[index]
    return powers


def _evaluate(factors: Sequence[Number], nodes: Sequence[int], size: int) -> Number:
    value: Number = 0
    for index in range(len(factors) - 1, -1, -1):
        value = value * (size - nodes[index]) + factors[index]
    return value
