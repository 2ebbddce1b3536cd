"""The reduction programs: sums, products, largest values, norms, softmax and running sums along the last axis."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests.support.oracle.number import Number, Tally, each
from tests.support.oracle.pointwise import exp, log, power


def mean_of(tally: Tally, x: Any) -> Any:
    """Return means: a sum and a division."""
    return tally.sum(x, -1) / x.shape[-1]


def product_of(tally: Tally, x: Any) -> Any:
    return np.multiply.reduce(x, -1, initial=tally.number(1))


def largest_of(tally: Tally, x: Any) -> Any:
    """Return the largest: a compare-select each."""
    return tally.largest(x)


def smallest_of(tally: Tally, x: Any) -> Any:
    """Return the smallest: a compare-select each."""
    return np.frompyfunc(Number.min, 2, 1).reduce(x, -1, initial=tally.number(math.inf))


def squares_of(tally: Tally, x: Any) -> Any:
    """Return sums of squares: a multiplication and an addition each, since this is not a matrix product."""
    return tally.sum(x * x, -1)


def variance_of(tally: Tally, x: Any, correction: int = 0) -> Any:
    """Return the variance: the mean, and the mean square of what is left of each number."""
    return variance_and_mean_of(tally, x, correction)[0]


def variance_and_mean_of(tally: Tally, x: Any, correction: int = 0) -> tuple[Any, Any]:
    """Return both, the mean being taken once."""
    mean = mean_of(tally, x)
    return squares_of(tally, x - np.expand_dims(mean, -1)) / (x.shape[-1] - correction), mean


def deviation_of(tally: Tally, x: Any, correction: int = 0) -> Any:
    return np.sqrt(variance_of(tally, x, correction))


def norm_of(tally: Tally, x: Any, order: float = 2) -> Any:
    """Return norms: lengths, sums of lengths, largest and smallest, or any other power."""
    if order == 2:
        return np.sqrt(squares_of(tally, x))
    if order == 1:
        return tally.sum(abs(x), -1)
    if math.isinf(order):
        return (largest_of if order > 0 else smallest_of)(tally, abs(x))
    powers = each(partial(power, exponent=order), abs(x))
    return each(partial(power, exponent=1 / order), tally.sum(powers, -1))


def log_sum_exp(tally: Tally, x: Any) -> Any:
    """Return log(sum(exp(x))), the largest taken out first."""
    top = tally.largest(x)
    return log(tally.sum(exp(x - np.expand_dims(top, -1)), -1)) + top


# --- as many results as numbers ---------------------------------------------------------------------------------------


def softmax(tally: Tally, x: Any) -> Any:
    """Return exp(x − top)/sum."""
    powers = exp(x - np.expand_dims(tally.largest(x), -1))
    return powers / np.expand_dims(tally.sum(powers, -1), -1)


def log_softmax(tally: Tally, x: Any) -> Any:
    """Return (x − top) − log(sum(exp(x − top)))."""
    centred = x - np.expand_dims(tally.largest(x), -1)
    return centred - np.expand_dims(log(tally.sum(exp(centred), -1)), -1)


def softmax_backward(tally: Tally, gradient: Any, output: Any) -> Any:
    """Return y*(g − sum(g*y))."""
    return output * (gradient - np.expand_dims(tally.sum(gradient * output, -1), -1))


def log_softmax_backward(tally: Tally, gradient: Any, output: Any) -> Any:
    """Return g − exp(y)*sum(g)."""
    return gradient - exp(output) * np.expand_dims(tally.sum(gradient, -1), -1)


def running(step: Callable[[Number, Number], Number], start: float) -> Callable[..., Any]:
    """Return the program of a running sum, product ...: one step for each number."""

    def program(tally: Tally, x: Any) -> Any:
        total, results = tally.number(start), []
        for part in np.moveaxis(x, -1, 0):
            total = each(step, total, part)
            results.append(total)
        return np.stack(results, -1)

    return program


def log_add_exp(x: Number, y: Number) -> Number:
    """Return log(exp(x) + exp(y)): top + log(1 + exp(low − top))."""
    top, low = x.max(y), x.min(y)
    return top + log(1 + exp(low - top))


def unit_row(tally: Tally, x: Any, eps: float) -> Any:
    """Return rows over their lengths, which are at least eps."""
    return x / np.expand_dims(each(lambda length: length.max(eps), norm_of(tally, x)), -1)


def cosine(tally: Tally, x: Any, y: Any, eps: float) -> Any:
    return tally.sum(unit_row(tally, x, eps) * unit_row(tally, y, eps), -1)
