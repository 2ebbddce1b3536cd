"""The reduction programs: sums, products, largest values, norms, softmax and running sums, over rows of numbers.

A program gets one row, the numbers that are reduced to one result; the test moves the reduced dimensions to the end.
"""

import math
from collections.abc import Callable, Sequence

import torch

from tests.support.oracle.number import Number, Tally
from tests.support.oracle.pointwise import exp, log, power

Row = Sequence[Number]


def rows(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Return a tensor as a matrix whose rows are what is reduced over some dimensions."""
    kept = [dim for dim in range(tensor.ndim) if dim not in dims]
    return tensor.permute(*kept, *dims).reshape(math.prod(tensor.shape[dim] for dim in kept), -1)


def over(function):
    """Return the program that reduces each row of one or several matrices."""
    return lambda tally, *matrices: [function(tally, *each) for each in zip(*matrices, strict=True)]


# --- one result a row -------------------------------------------------------------------------------------------------


def sum_of(tally: Tally, row: Row) -> Number:
    return tally.sum(row)


def mean_of(tally: Tally, row: Row) -> Number:
    """Return the mean: a sum and a division."""
    return tally.sum(row) / len(row)


def product_of(tally: Tally, row: Row) -> Number:
    total = tally.number(1)
    for x in row:
        total = total * x
    return total


def largest_of(tally: Tally, row: Row) -> Number:
    """Return the largest: a compare-select each."""
    top = tally.lowest()
    for x in row:
        top = top.max(x)
    return top


def smallest_of(tally: Tally, row: Row) -> Number:
    """Return the smallest: a compare-select each."""
    low = tally.number(math.inf)
    for x in row:
        low = low.min(x)
    return low


def squares_of(tally: Tally, row: Row) -> Number:
    """Return the sum of squares: a multiply-add each."""
    return tally.sum(x * x for x in row)


def variance_of(tally: Tally, row: Row, correction: int = 0) -> Number:
    """Return the variance: the mean, and the mean square of what is left of each number."""
    return variance_and_mean_of(tally, row, correction)[0]


def variance_and_mean_of(tally: Tally, row: Row, correction: int = 0) -> tuple[Number, Number]:
    """Return both, the mean being taken once."""
    mean = mean_of(tally, row)
    return squares_of(tally, [x - mean for x in row]) / (len(row) - correction), mean


def deviation_of(tally: Tally, row: Row, correction: int = 0) -> Number:
    return variance_of(tally, row, correction).sqrt()


def norm_of(tally: Tally, row: Row, order: float = 2) -> Number:
    """Return a norm: lengths, sums of lengths, largest and smallest, or any other power."""
    if order == 2:
        return squares_of(tally, row).sqrt()
    lengths = [abs(x) for x in row]
    if order == 1:
        return tally.sum(lengths)
    if math.isinf(order):
        return (largest_of if order > 0 else smallest_of)(tally, lengths)
    return power(tally.sum(power(x, order) for x in lengths), 1 / order)


def log_sum_exp(tally: Tally, row: Row) -> Number:
    """Return log(sum(exp(x))), the largest taken out first."""
    top = largest_of(tally, row)
    return log(tally.sum(exp(x - top) for x in row)) + top


# --- as many results as numbers ---------------------------------------------------------------------------------------


def softmax(tally: Tally, row: Row) -> list[Number]:
    """Return exp(x − top)/sum."""
    top = largest_of(tally, row)
    powers = [exp(x - top) for x in row]
    total = tally.sum(powers)
    return [x / total for x in powers]


def log_softmax(tally: Tally, row: Row) -> list[Number]:
    """Return (x − top) − log(sum(exp(x − top)))."""
    top = largest_of(tally, row)
    centred = [x - top for x in row]
    total = log(tally.sum(exp(x) for x in centred))
    return [x - total for x in centred]


def softmax_backward(tally: Tally, gradient: Row, output: Row) -> list[Number]:
    """Return y*(g − sum(g*y))."""
    inner = tally.sum(g * y for g, y in zip(gradient, output, strict=True))
    return [y * (g - inner) for g, y in zip(gradient, output, strict=True)]


def log_softmax_backward(tally: Tally, gradient: Row, output: Row) -> list[Number]:
    """Return g − exp(y)*sum(g)."""
    total = tally.sum(gradient)
    return [g - exp(y) * total for g, y in zip(gradient, output, strict=True)]


def running(step: Callable[[Number, Number], Number], start: float) -> Callable[..., list[Number]]:
    """Return the program of a running sum, product ...: one step for each number."""

    def program(tally: Tally, row: Row) -> list[Number]:
        total, results = tally.number(start), []
        for x in row:
            total = step(total, x)
            results.append(total)
        return results

    return program


def log_add_exp(x: Number, y: Number) -> Number:
    """Return log(exp(x) + exp(y)): top + log(1 + exp(low − top))."""
    top, low = x.max(y), x.min(y)
    return top + log(1 + exp(low - top))


def unit_row(tally: Tally, row: Row, eps: float) -> list[Number]:
    """Return a row over its length, which is at least eps."""
    length = norm_of(tally, row).max(eps)
    return [x / length for x in row]


def cosine(tally: Tally, x: Row, y: Row, eps: float) -> Number:
    return tally.sum(a * b for a, b in zip(unit_row(tally, x, eps), unit_row(tally, y, eps), strict=True))
