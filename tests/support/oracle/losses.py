"""The loss programs: how far predictions are from what was expected, an element or a row at a time; and derivatives."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support.oracle.number import Number, Tally, each, scaled
from tests.support.oracle.pointwise import log, log_sigmoid, select
from tests.support.oracle.reductions import log_softmax, norm_of

REDUCTIONS = ("none", "mean", "sum")  # by torch's numbers 0, 1, 2


def reduce(tally: Tally, losses: Any, reduction: str) -> Any:
    if reduction == "none":
        return losses
    return tally.sum(losses) / np.size(losses) if reduction == "mean" else tally.sum(losses)


def loss(step: Callable[..., Number], reduction: str) -> Callable[..., Any]:
    """Return the program of a loss that `step` says for each element."""
    return lambda tally, *operands: reduce(tally, each(step, *operands), reduction)


# --- one element ------------------------------------------------------------------------------------------------------


def squared(x: Number, y: Number) -> Number:
    d = x - y
    return d * d


def smooth(x: Number, y: Number, beta: float) -> Number:
    d = abs(x - y)
    return select(d.value < beta, scaled(0.5 * d * d, 1 / beta), d.value - 0.5 * beta)


def huber(x: Number, y: Number, delta: float) -> Number:
    d = abs(x - y)
    return select(d.value < delta, 0.5 * d * d, delta * (d.value - 0.5 * delta))


def cross_entropy_of_bit(x: Number, y: Number) -> Number:
    """Return −y*log(x) − (1 − y)*log(1 − x), no logarithm below −100."""
    return (y - 1) * log(1 - x).max(-100) - y * log(x).max(-100)


def cross_entropy_of_logit(x: Number, y: Number) -> Number:
    """Return the cross entropy of sigmoid(x): (1 − y)*x − log(sigmoid(x))."""
    return (1 - y) * x - log_sigmoid(x)


# --- derivatives ------------------------------------------------------------------------------------------------------


def smooth_backward(g: Number, x: Number, y: Number, beta: float, factor: float) -> Number:
    d = x - y
    inner = scaled(factor * d * g, 1 / beta)
    return select(abs(d.value) < beta, inner, (factor if d.value > 0 else -factor) * g.value)


def huber_backward(g: Number, x: Number, y: Number, delta: float, factor: float) -> Number:
    d = x - y
    outer = (factor if d.value > 0 else -factor) * g.value * delta
    return select(abs(d.value) < delta, factor * d * g, outer)


# --- rows of classes --------------------------------------------------------------------------------------------------


def likelihood(tally: Tally, rows: Any, targets: Any, weight: Any, reduction: str) -> Any:
    """Return −x[target], times the weight of the target; a mean is over the weights."""
    losses = -rows[np.arange(len(rows)), targets]
    if weight is None:
        return reduce(tally, losses, reduction)
    losses = losses * weight[targets]
    return tally.sum(losses) / tally.sum(weight[targets]) if reduction == "mean" else reduce(tally, losses, reduction)


def cross_entropy(tally: Tally, rows: Any, targets: Any, smoothing: float, reduction: str) -> Any:
    """Return the likelihood after log_softmax; smoothed: (1 − s)*that, plus s/classes of the sum over all classes."""
    logs = log_softmax(tally, rows)
    own = likelihood(tally, logs, targets, None, reduction)
    if smoothing == 0:
        return own
    spread = reduce(tally, -tally.sum(logs, 1), reduction)
    return own * (1 - smoothing) + spread * (smoothing / rows.shape[1])


def cross_entropy_of_probabilities(tally: Tally, rows: Any, targets: Any, reduction: str) -> Any:
    """Return −sum(p*log_softmax(x)) over the classes; a mean is over the rows."""
    products = log_softmax(tally, rows) * targets
    if reduction == "none":
        return -tally.sum(products, 1)
    total = -tally.sum(products)
    return total / len(rows) if reduction == "mean" else total


def likelihood_backward(tally: Tally, gradient: Any, rows: Any, targets: Any, reduction: str) -> Any:
    """Return zeros, but −g at each target: over the number of rows for a mean."""
    result = tally.zeros(*rows.shape)
    slopes = -np.broadcast_to(gradient, len(rows))
    result[np.arange(len(rows)), targets] = slopes / len(rows) if reduction == "mean" else slopes
    return result


def hinge_embedding(x: Number, sign: Number, margin: float) -> Number:
    """Return x for a sign of 1, max(0, margin − x) for −1: as a sum, in which the other is 0."""
    zero = x.tally.number(0)
    return select(sign != 1, (margin - x).max(0), zero) + select(sign != -1, x, zero)


def distance(tally: Tally, x: Any, y: Any, order: float, eps: float) -> Any:
    """Return the norms of x − y + eps."""
    return norm_of(tally, x - y + eps, order)


def cosine_embedding(tally: Tally, x: Any, y: Any, sign: Any, margin: float) -> Any:
    """Return 1 − cosine for a sign of 1, max(0, cosine − margin) for −1: as a sum, in which the other is 0."""
    inner = tally.sum(x * y, 1)
    squares = [tally.sum(rows * rows, 1) + 1e-12 for rows in (x, y)]

    def embed(cosine: Number, sign: Number) -> Number:
        zero = tally.number(0)
        near, far = 1 - cosine, (cosine - margin).max(0)
        return select(sign == 1, near, zero) + select(sign == -1, far, zero)

    return each(embed, inner / np.sqrt(squares[0] * squares[1]), sign)


def multi_margin(tally: Tally, row: Any, target: int, order: int, margin: float, weight: Any) -> Number:
    """Return the mean over the classes of what is left of margin − x[target] + x[class], or of its square."""
    others = np.delete(row, target)
    left = margin - row[np.full(len(others), target)] + others
    parts = left * left if order == 2 else left
    parts = parts if weight is None else parts * weight[target]
    zero = tally.number(0)
    return tally.sum(each(lambda number, part: select(number.value > 0, part, zero), left, parts)) / len(row)


def triplet(tally: Tally, anchor: Any, near: Any, far: Any, margin: float) -> Any:
    """Return max(0, margin + distance to the near one − that to the far one)."""
    gap = distance(tally, anchor, near, 2, 1e-6) - distance(tally, anchor, far, 2, 1e-6)
    return each(lambda number: number.max(0), margin + gap)
