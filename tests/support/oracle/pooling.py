"""The pooling programs: windows that slide over C × space lists, one sample at a time; and their gradients.

A window that reaches over the edge meets -inf (the largest) or 0 (the mean): it does as much as any other. Positions
and the sizes of windows are known before the data, so that arithmetic on them is no operation.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from tests.support.oracle.number import Number, Tally
from tests.support.oracle.pointwise import power
from tests.support.oracle.products import at, indexes, shape_of

Grid = Any  # nested lists of numbers, as deep as the space has dimensions
Position = tuple[int, ...]


def build(sizes: Sequence[int], make: Callable[[Position], Any], before: Position = ()) -> Grid:
    """Return nested lists of what `make` says of each position."""
    if not sizes:
        return make(before)
    return [build(sizes[1:], make, (*before, index)) for index in range(sizes[0])]


def pooled_size(size: int, kernel: int, stride: int, padding: int, dilation: int = 1, ceil: bool = False) -> int:
    """Return how many windows there are along a dimension; the last must begin inside, or in the padding before."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (-(-span // stride) if ceil else span // stride) + 1
    return count - 1 if ceil and (count - 1) * stride >= size + padding else count


def window(
    place: Position, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[Position]:
    """Return the positions that the window of an output position covers, those over the edge too."""
    starts = [p * s - pad for p, s, pad in zip(place, stride, padding, strict=True)]
    return [
        tuple(a + step * d for a, step, d in zip(starts, steps, dilation, strict=True)) for steps in indexes(kernel)
    ]


def inside(position: Position, sizes: Sequence[int]) -> bool:
    """Return whether a position lies in a grid."""
    return all(0 <= index < size for index, size in zip(position, sizes, strict=True))


def pooled_sizes(
    grid: Grid,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil: bool,
) -> list[int]:
    each = zip(shape_of(grid), kernel, stride, padding, dilation, strict=True)
    return [pooled_size(*sizes, ceil) for sizes in each]


def max_pool(
    tally: Tally,
    grid: Grid,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil: bool,
) -> Grid:
    """Return the largest number of each window."""
    sizes = shape_of(grid)

    def largest(place: Position) -> Number:
        top = tally.lowest()
        for position in window(place, kernel, stride, padding, dilation):
            top = top.max(at(grid, position) if inside(position, sizes) else -math.inf)
        return top

    return build(pooled_sizes(grid, kernel, stride, padding, dilation, ceil), largest)


def max_pool_backward(tally: Tally, gradient: Grid, chosen: Grid, sizes: Sequence[int]) -> Grid:
    """Return zeros to which each gradient was added at the place that its window chose, an index into the space."""
    result = [tally.zero() for _ in range(math.prod(sizes))]
    for place in indexes(shape_of(gradient)):
        index = at(chosen, place)
        result[index] = result[index] + at(gradient, place)
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    return build(sizes, lambda place: result[sum(p * s for p, s in zip(place, strides, strict=True))])


def divisor_of(
    place: Position,
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    count_include_pad: bool,
    override: int | None,
) -> int:
    """Return what the sum over a window is divided by: its numbers within the padding, or within the grid."""
    if override is not None:
        return override
    count = 1
    for p, size, k, s, pad in zip(place, sizes, kernel, stride, padding, strict=True):
        start, end = p * s - pad, min(p * s - pad + k, size + pad)
        count *= end - start if count_include_pad else min(end, size) - max(start, 0)
    return count


def avg_pool(
    tally: Tally,
    grid: Grid,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil: bool,
    count_include_pad: bool,
    override: int | None = None,
) -> Grid:
    """Return the mean of each window."""
    sizes, flat = shape_of(grid), (1,) * len(kernel)

    def mean(place: Position) -> Number:
        covered = window(place, kernel, stride, padding, flat)
        total = tally.zero()
        for position in covered:
            total = total + (at(grid, position) if inside(position, sizes) else 0.0)
        return total / divisor_of(place, sizes, kernel, stride, padding, count_include_pad, override)

    return build(pooled_sizes(grid, kernel, stride, padding, flat, ceil), mean)


def avg_pool_backward(
    tally: Tally,
    gradient: Grid,
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    count_include_pad: bool,
    override: int | None = None,
) -> Grid:
    """Return zeros to which each gradient over its divisor was added, all over its window."""
    result = {position: tally.zero() for position in indexes(sizes)}
    for place in indexes(shape_of(gradient)):
        share = at(gradient, place) / divisor_of(place, sizes, kernel, stride, padding, count_include_pad, override)
        for position in window(place, kernel, stride, padding, (1,) * len(kernel)):
            result[position] = result.get(position, tally.zero()) + share
    return build(sizes, lambda place: result[place])


def adaptive_window(place: Position, sizes: Sequence[int], results: Sequence[int]) -> list[Position]:
    """Return the positions of the window of one of `results` outputs: from floor(i*n/m) to ceil((i + 1)*n/m)."""
    each = zip(place, sizes, results, strict=True)
    return list(itertools.product(*(range(p * n // m, -(-(p + 1) * n // m)) for p, n, m in each)))


def adaptive_avg_pool(tally: Tally, grid: Grid, results: Sequence[int]) -> Grid:
    """Return the mean of each of a given number of windows."""
    sizes = shape_of(grid)

    def mean(place: Position) -> Number:
        covered = adaptive_window(place, sizes, results)
        return tally.sum(at(grid, position) for position in covered) / len(covered)

    return build(results, mean)


def adaptive_avg_pool_backward(tally: Tally, gradient: Grid, sizes: Sequence[int]) -> Grid:
    """Return zeros to which each gradient over its window's size was added, all over that window."""
    result = {position: tally.zero() for position in indexes(sizes)}
    results = shape_of(gradient)
    for place in indexes(results):
        covered = adaptive_window(place, sizes, results)
        share = at(gradient, place) / len(covered)
        for position in covered:
            result[position] = result[position] + share
    return build(sizes, lambda place: result[place])


def adaptive_max_pool(tally: Tally, grid: Grid, results: Sequence[int]) -> Grid:
    """Return the largest number of each of a given number of windows."""
    sizes = shape_of(grid)

    def largest(place: Position) -> Number:
        top = tally.lowest()
        for position in adaptive_window(place, sizes, results):
            top = top.max(at(grid, position))
        return top

    return build(results, largest)


def lp_pool(tally: Tally, grid: Grid, order: float, kernel: Sequence[int], stride: Sequence[int]) -> Grid:
    """Return (sum of x^p)^(1/p) of each window, as torch does: the mean of the powers, times the window's size.

    The sign of the mean is kept, and its absolute value taken by a relu, as torch.nn.functional.lp_pool2d does.
    """
    none = (0,) * len(kernel)
    powers = build(shape_of(grid), lambda place: power(at(grid, place), order))
    means = avg_pool(tally, powers, kernel, stride, none, False, True)

    def root(place: Position) -> Number:
        mean = at(means, place)
        sign = mean.call("sign", lambda value: (value > 0) - (value < 0))
        return power(sign * abs(mean).max(0) * math.prod(kernel), 1 / order)

    return build(shape_of(means), root)
