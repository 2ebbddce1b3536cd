"""The loss programs: how far predictions are from what was expected, an element or a row at a time; and derivatives."""

from collections.abc import Callable, Sequence
from typing import Any

from tests.support.oracle.number import Number, Tally
from tests.support.oracle.pointwise import each, exp, log, log_sigmoid, scaled, select
from tests.support.oracle.reductions import log_softmax, mean_of, norm_of

REDUCTIONS = ("none", "mean", "sum")  # by torch's numbers 0, 1, 2


def flat(grid: Any) -> list[Number]:
    return [number for part in grid for number in flat(part)] if isinstance(grid, list) else [grid]


def reduce(tally: Tally, losses: Any, reduction: str) -> Any:
    if reduction == "none":
        return losses
    return mean_of(tally, flat(losses)) if reduction == "mean" else tally.sum(flat(losses))


def loss(step: Callable[..., Number], reduction: str) -> Callable[..., Any]:
    """Return the program of a loss that `step` says for each element."""
    return lambda tally, *operands: reduce(tally, each(step, *operands), reduction)


# --- one element ------------------------------------------------------------------------------------------------------


def squared(x: Number, y: Number) -> Number:
    d = x - y
    return d * d


def absolute(x: Number, y: Number) -> Number:
    return abs(x - y)


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


def cross_entropy_of_logit_weighed(x: Number, y: Number, weight: Number) -> Number:
    return (1 - y) * x - ((weight - 1) * y + 1) * log_sigmoid(x)


def divergence(x: Number, y: Number) -> Number:
    """Return y*log(y) − y*x, x being a logarithm."""
    return y * log(y) - y * x


def divergence_of_logs(x: Number, y: Number) -> Number:
    return exp(y) * (y - x)


def poisson_of_log(x: Number, y: Number) -> Number:
    return exp(x) - y * x


def poisson(x: Number, y: Number, eps: float) -> Number:
    return x - y * log(x + eps)


def soft_margin(x: Number, y: Number) -> Number:
    return log(1 + exp(-y * x))


# --- derivatives ------------------------------------------------------------------------------------------------------


def smooth_backward(g: Number, x: Number, y: Number, beta: float, factor: float) -> Number:
    d = x - y
    inner = scaled(factor * d * g, 1 / beta)
    return select(abs(d.value) < beta, inner, (factor if d.value > 0 else -factor) * g.value)


def huber_backward(g: Number, x: Number, y: Number, delta: float, factor: float) -> Number:
    d = x - y
    outer = (factor if d.value > 0 else -factor) * g.value * delta
    return select(abs(d.value) < delta, factor * d * g, outer)


def cross_entropy_of_bit_backward(g: Number, x: Number, y: Number) -> Number:
    return g * (x - y) / ((1 - x) * x).max(1e-12)


def soft_margin_backward(g: Number, x: Number, y: Number, factor: float) -> Number:
    z = exp(-y * x)
    return -y * factor * g * z / (z + 1)


# --- rows of classes --------------------------------------------------------------------------------------------------


def likelihood(
    tally: Tally,
    rows: Sequence[Sequence[Number]],
    targets: Sequence[int],
    weight: Sequence[Number] | None,
    reduction: str,
) -> Any:
    """Return −x[target], times the weight of the target; a mean is over the weights."""
    losses = []
    for row, target in zip(rows, targets, strict=True):
        losses.append(-row[target] if weight is None else -row[target] * weight[target])
    if reduction != "mean" or weight is None:
        return reduce(tally, losses, reduction)
    return tally.sum(losses) / tally.sum(weight[target] for target in targets)


def cross_entropy(
    tally: Tally, rows: Sequence[Sequence[Number]], targets: Sequence[int], smoothing: float, reduction: str
) -> Any:
    """Return the likelihood after log_softmax; smoothed: (1 − s)*that, plus s/classes of the sum over all classes."""
    logs = [log_softmax(tally, row) for row in rows]
    own = likelihood(tally, logs, targets, None, reduction)
    if smoothing == 0:
        return own
    spread = reduce(tally, [-tally.sum(row) for row in logs], reduction)
    share = smoothing / len(rows[0])
    return each(lambda a, b: (1 - smoothing) * a + b * share, own, spread)


def cross_entropy_of_probabilities(
    tally: Tally, rows: Sequence[Sequence[Number]], targets: Sequence[Sequence[Number]], reduction: str
) -> Any:
    """Return −sum(p*log_softmax(x)) over the classes; a mean is over the rows."""
    logs = [log_softmax(tally, row) for row in rows]
    products = [[x * p for x, p in zip(row, target, strict=True)] for row, target in zip(logs, targets, strict=True)]
    if reduction == "none":
        return [-tally.sum(row) for row in products]
    total = -tally.sum(flat(products))
    return total / len(rows) if reduction == "mean" else total


def likelihood_backward(
    tally: Tally, gradient: Any, rows: Sequence[Sequence[Number]], targets: Sequence[int], reduction: str
) -> Any:
    """Return zeros, but −g at each target: over the number of rows for a mean."""
    result = [[tally.zero() for _ in row] for row in rows]
    for place, target in enumerate(targets):
        g = -(gradient[place] if reduction == "none" else gradient)
        result[place][target] = g / len(rows) if reduction == "mean" else g
    return result


def hinge_embedding(x: Number, sign: Number, margin: float) -> Number:
    """Return x for a sign of 1, max(0, margin − x) for −1: as a sum, in which the other is 0."""
    zero = x.tally.zero()
    return select(not sign.equals(1), (margin - x).max(0), zero) + select(not sign.equals(-1), x, zero)


def distance(tally: Tally, x: Sequence[Number], y: Sequence[Number], order: float, eps: float) -> Number:
    """Return the norm of x − y + eps."""
    return norm_of(tally, [a - b + eps for a, b in zip(x, y, strict=True)], order)


def cosine_embedding(tally: Tally, x: Sequence[Number], y: Sequence[Number], sign: Number, margin: float) -> Number:
    """Return 1 − cosine for a sign of 1, max(0, cosine − margin) for −1: as a sum, in which the other is 0."""
    inner = tally.sum(a * b for a, b in zip(x, y, strict=True))
    squares = [tally.sum(a * a for a in row) + 1e-12 for row in (x, y)]
    cosine = inner / (squares[0] * squares[1]).sqrt()
    zero = tally.zero()
    near, far = 1 - cosine, (cosine - margin).max(0)
    return select(sign.equals(1), near, zero) + select(sign.equals(-1), far, zero)


def multi_margin(
    tally: Tally, row: Sequence[Number], target: int, order: int, margin: float, weight: Sequence[Number] | None
) -> Number:
    """Return the mean over the classes of what is left of margin − x[target] + x[class], or of its square."""
    total = tally.zero()
    for place, x in enumerate(row):
        if place == target:
            continue
        left = margin - row[target] + x
        part = left * left if order == 2 else left
        part = part if weight is None else part * weight[target]
        total = total + select(left.value > 0, part, tally.zero())
    return total / len(row)


def triplet(
    tally: Tally, anchor: Sequence[Number], near: Sequence[Number], far: Sequence[Number], margin: float
) -> Number:
    """Return max(0, margin + distance to the near one − that to the far one)."""
    gap = distance(tally, anchor, near, 2, 1e-6) - distance(tally, anchor, far, 2, 1e-6)
    return (margin + gap).max(0)
