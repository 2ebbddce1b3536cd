"""The norm programs: groups of numbers along the last axis brought to mean 0 and variance 1, and their gradients.

A weight or bias that is None does nothing.
"""

from typing import Any

import numpy as np

from tests.support.oracle.number import Tally, each
from tests.support.oracle.pointwise import power
from tests.support.oracle.reductions import mean_of, squares_of

Mask = tuple[bool, bool, bool]


def normalise(tally: Tally, x: Any, eps: float) -> Any:
    """Return groups normalised: 5n + 5 operations each."""
    centred = x - np.expand_dims(mean_of(tally, x), -1)
    inverse = 1 / np.sqrt(squares_of(tally, centred) / x.shape[-1] + eps)
    return centred * np.expand_dims(inverse, -1)


def scale_and_shift(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def rms_norm(tally: Tally, x: Any, weight: Any, eps: float) -> Any:
    """Return groups over their root mean squares: 3n + 4 operations, and n for a weight."""
    inverse = 1 / np.sqrt(squares_of(tally, x) / x.shape[-1] + eps)
    return scale_and_shift(x * np.expand_dims(inverse, -1), weight, None)


def standardise_channels(tally: Tally, x: Any, weight: Any, bias: Any, eps: float) -> tuple[Any, Any, Any]:
    """Return channels normalised by their means and variances, and these; a weight is made part of the factor."""
    mean = mean_of(tally, x)
    centred = x - np.expand_dims(mean, -1)
    variance = squares_of(tally, centred) / x.shape[-1]
    factor = scale_and_shift(1 / np.sqrt(variance + eps), weight, None)
    shift = None if bias is None else np.expand_dims(bias, -1)
    return scale_and_shift(centred, np.expand_dims(factor, -1), shift), mean, variance


def batch_norm_eval(x: Any, mean: Any, variance: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Return channels normalised by running statistics: the factor of a channel is made once."""
    factor = scale_and_shift(1 / np.sqrt(variance + eps), weight, None)
    shift = None if bias is None else bias[:, None]
    return scale_and_shift(x - mean[:, None], factor[:, None], shift)


def follow(running: Any, momentum: float, latest: Any) -> Any:
    """Return a running statistic: (1 − momentum)*running + momentum*latest."""
    return running * (1 - momentum) + latest * momentum


def local_response_norm(tally: Tally, x: Any, size: int, alpha: float, beta: float, k: float) -> Any:
    """Return x/(k + alpha*mean of squares of the channels around)^beta; channels beyond the edge are 0."""
    batch, channels, length = x.shape
    edges = (tally.zeros(batch, more, length) for more in (size // 2, size))
    wide = np.concatenate([next(edges), x * x, next(edges)], 1)
    total = tally.sum([wide[:, first : first + channels] for first in range(size)], 0)
    return x / each(lambda number: power(number, beta), total / size * alpha + k)


# --- gradients --------------------------------------------------------------------------------------------------------


def standardise(x: Any, mean: Any, inverse: Any) -> Any:
    """Return (x − mean)*inverse, by statistics that the forward pass left."""
    return (x - np.expand_dims(mean, -1)) * np.expand_dims(inverse, -1)


def normalise_backward(tally: Tally, gradient: Any, normal: Any, inverse: Any) -> Any:
    """Return (g − mean(g) − normal*mean(g*normal))*inverse: 7n + 2 operations."""
    average, slope = (np.expand_dims(mean_of(tally, x), -1) for x in (gradient, gradient * normal))
    return (gradient - average - normal * slope) * np.expand_dims(inverse, -1)


def groups_backward(tally, gradient, x, mean, inverse, weight, places, mask):
    """Return the gradients of groups, of the weight and of the bias, those that `mask` asks for.

    `places` says which number of the weight each number meets.
    """
    normal = standardise(x, mean, inverse) if mask[0] or mask[1] else None
    own, of_weight, of_bias = None, None, None
    if mask[0]:
        met = gradient if weight is None else gradient * weight[places]
        own = normalise_backward(tally, met, normal, inverse)
    if mask[1]:
        of_weight = add_into(tally, places, gradient * normal)
    if mask[2]:
        of_bias = add_into(tally, places, gradient)
    return own, of_weight, of_bias


def add_into(tally: Tally, places: Any, numbers: Any) -> Any:
    """Return sums, to which numbers were added at their places."""
    sums = tally.zeros(int(np.max(places)) + 1)
    np.add.at(sums, np.broadcast_to(places, numbers.shape), numbers)
    return sums


def rms_norm_backward(tally: Tally, gradient: Any, x: Any, inverse: Any, weight: Any) -> tuple[Any, Any]:
    """Return (g*w − normal*mean(g*w*normal))*inverse, and the gradient of the weight."""
    inverse = np.expand_dims(inverse, -1)
    normal = x * inverse
    of_weight = None if weight is None else tally.sum(gradient * normal, 0)
    own = scale_and_shift(gradient, weight, None)
    return (own - normal * np.expand_dims(mean_of(tally, own * normal), -1)) * inverse, of_weight


def batch_norm_backward(tally, gradient, x, mean, inverse, weight, mask):
    """Return the gradients of channels, of the weight and of the bias; the two sums serve the first too.

    (g − mean(g) − normal*mean(g*normal))*(inverse*weight)
    """
    normal = standardise(x, mean, inverse) if mask[0] or mask[1] else None
    total = tally.sum(gradient, -1) if mask[0] or mask[2] else None
    inner = None if normal is None else tally.sum(gradient * normal, -1)
    if not mask[0]:
        return None, inner, total
    average, slope = (np.expand_dims(part / x.shape[-1], -1) for part in (total, inner))
    factor = np.expand_dims(scale_and_shift(inverse, weight, None), -1)
    return (gradient - average - normal * slope) * factor, inner, total


def batch_norm_eval_backward(tally, gradient, x, mean, variance, weight, eps, mask):
    """Return the gradients of channels that running statistics normalised, of the weight and of the bias."""
    inverse = 1 / np.sqrt(variance + eps) if mask[0] or mask[1] else None
    own = gradient * np.expand_dims(scale_and_shift(inverse, weight, None), -1) if mask[0] else None
    inner = tally.sum(gradient * standardise(x, mean, inverse), -1) if mask[1] else None
    return own, inner, tally.sum(gradient, -1) if mask[2] else None


def weight_norm(tally: Tally, x: Any, length: Any) -> Any:
    """Return rows brought to a length: v*(g/norm(v)) (arXiv 1602.07868)."""
    return x * np.expand_dims(length / np.sqrt(squares_of(tally, x)), -1)
