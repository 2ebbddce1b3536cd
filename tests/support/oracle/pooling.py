"""The pooling programs: windows that slide over the last axes of arrays; and their gradients.

A window that reaches over the edge meets -inf (the largest) or 0 (the mean): it does as much as any other. Positions
and the sizes of windows are known before the data, so that arithmetic on them is not an operation.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from tests.support.oracle.number import Number, Tally, each, indexes
from tests.support.oracle.pointwise import power, sign

Sizes = Sequence[int]
Slices = tuple[slice, ...]


def pooled_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    """Return how many windows there are along a dimension; the last must begin inside, or in the padding before."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (-(-span // stride) if ceil else span // stride) + 1
    return count - 1 if ceil and (count - 1) * stride >= size + padding else count


def windows(sizes, kernel, stride, padding, dilation=None, ceil=False):
    """Return the sizes of the result and each window, as slices of a grid with borders; the inside, and its sizes."""
    steps = dilation or (1,) * len(sizes)
    results = [pooled_size(*each, ceil) for each in zip(sizes, kernel, stride, padding, steps, strict=True)]
    found = [
        tuple(slice(p * s, p * s + d * (k - 1) + 1, d) for p, s, d, k in zip(at, stride, steps, kernel, strict=True))
        for at in indexes(results)
    ]
    wide = [
        max(before + size, (m - 1) * s + d * (k - 1) + 1)
        for before, size, m, s, d, k in zip(padding, sizes, results, stride, steps, kernel, strict=True)
    ]
    inside = tuple(slice(before, before + size) for before, size in zip(padding, sizes, strict=True))
    return tuple(results), found, inside, wide


def gather(grid: Any, results: Sizes, found: Sequence[Slices], program: Callable[[Any], Any]) -> Any:
    """Return what a program makes of the numbers of each window."""
    lead = grid.shape[: grid.ndim - len(results)]
    parts = [program(grid[(..., *window)].reshape(*lead, -1)) for window in found]
    return np.stack(parts, -1).reshape(*lead, *results)


def scatter(grid: Any, found: Sequence[Slices], shares: Any) -> Any:
    """Add a share for each window to all of its numbers."""
    rank = len(found[0])
    shares = shares.reshape(*grid.shape[: grid.ndim - rank], -1)
    for place, window in enumerate(found):
        grid[(..., *window)] = grid[(..., *window)] + shares[(..., place, *[None] * rank)]
    return grid


def bordered(grid: Any, inside: Slices, wide: Sizes, border: float) -> Any:
    result = np.full((*grid.shape[: grid.ndim - len(wide)], *wide), border, dtype=object)
    result[(..., *inside)] = grid
    return result


def max_pool(tally: Tally, grid: Any, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil: bool) -> Any:
    """Return the largest number of each window."""
    sizes = grid.shape[-len(kernel) :]
    results, found, inside, wide = windows(sizes, kernel, stride, padding, dilation, ceil)
    return gather(bordered(grid, inside, wide, -math.inf), results, found, tally.largest)


def max_pool_backward(tally: Tally, gradient: Any, chosen: Any, sizes: Sizes) -> Any:
    """Return zeros to which each gradient was added at the place that its window chose, an index into the space."""
    lead = gradient.shape[: gradient.ndim - len(sizes)]
    result = tally.zeros(math.prod(lead), math.prod(sizes))
    rows = np.arange(len(result))[:, None]
    np.add.at(result, (rows, chosen.reshape(len(result), -1)), gradient.reshape(len(result), -1))
    return result.reshape(*lead, *sizes)


def divisors(sizes, results, kernel, stride, padding, counts_padding, given):
    """Return what the sums over windows are divided by: their numbers within the padding, or within the grid."""
    if given is not None:
        return given
    along = []
    for size, result, k, s, pad in zip(sizes, results, kernel, stride, padding, strict=True):
        start = np.arange(result) * s - pad
        end = np.minimum(start + k, size + pad)
        along.append(end - start if counts_padding else np.minimum(end, size) - np.maximum(start, 0))
    return math.prod(np.ix_(*along))


def avg_pool(tally, grid, kernel, stride, padding, ceil, counts_padding, divisor=None):
    """Return the mean of each window."""
    sizes = grid.shape[-len(kernel) :]
    results, found, inside, wide = windows(sizes, kernel, stride, padding, ceil=ceil)
    sums = gather(bordered(grid, inside, wide, 0.0), results, found, partial(tally.sum, axis=-1))
    return sums / divisors(sizes, results, kernel, stride, padding, counts_padding, divisor)


def avg_pool_backward(tally, gradient, sizes, kernel, stride, padding, ceil, counts_padding, divisor=None):
    """Return zeros to which each gradient over its divisor was added, all over its window."""
    results, found, inside, wide = windows(sizes, kernel, stride, padding, ceil=ceil)
    shares = gradient / divisors(sizes, results, kernel, stride, padding, counts_padding, divisor)
    grid = tally.zeros(*gradient.shape[: gradient.ndim - len(sizes)], *wide)
    return scatter(grid, found, shares)[(..., *inside)]


def adaptive_windows(sizes: Sizes, results: Sizes) -> list[Slices]:
    """Return the window of each of `results` outputs: from floor(i*n/m) to ceil((i + 1)*n/m)."""
    axes = list(zip(sizes, results, strict=True))
    return [
        tuple(slice(p * n // m, -(-(p + 1) * n // m)) for p, (n, m) in zip(at, axes, strict=True))
        for at in indexes(results)
    ]


def adaptive_avg_pool(tally: Tally, grid: Any, results: Sizes) -> Any:
    """Return the mean of each of a given number of windows."""
    found = adaptive_windows(grid.shape[-len(results) :], results)
    return gather(grid, results, found, lambda numbers: tally.sum(numbers, -1) / numbers.shape[-1])


def adaptive_avg_pool_backward(tally: Tally, gradient: Any, sizes: Sizes) -> Any:
    """Return zeros to which each gradient over its window's size was added, all over that window."""
    results = gradient.shape[-len(sizes) :]
    found = adaptive_windows(sizes, results)
    counts = [math.prod(part.stop - part.start for part in window) for window in found]
    grid = tally.zeros(*gradient.shape[: -len(sizes)], *sizes)
    return scatter(grid, found, gradient / np.reshape(counts, results))


def adaptive_max_pool(tally: Tally, grid: Any, results: Sizes) -> Any:
    """Return the largest number of each of a given number of windows."""
    return gather(grid, results, adaptive_windows(grid.shape[-len(results) :], results), tally.largest)


def lp_pool(tally: Tally, grid: Any, order: float, kernel: Sizes, stride: Sizes) -> Any:
    """Return (sum of x^p)^(1/p) of each window, as torch does: the mean of the powers, times the window's size.

    The sign of the mean is kept, and its absolute value taken by a relu, as torch.nn.functional.lp_pool2d does.
    """
    powers = each(lambda x: power(x, order), grid)
    means = avg_pool(tally, powers, kernel, stride, (0,) * len(kernel), False, True)

    def root(mean: Number) -> Number:
        return power(sign(mean) * abs(mean).max(0) * math.prod(kernel), 1 / order)

    return each(root, means)
