"""The norm programs: groups of numbers brought to mean 0 and variance 1, and the gradients of that.

A group is a row of n numbers; `weight` and `bias` hold one number for each of them, or are None.
"""

from collections.abc import Sequence

from tests.support.oracle.number import Number, Tally
from tests.support.oracle.pointwise import power
from tests.support.oracle.reductions import mean_of, squares_of

Row = Sequence[Number]
Scales = Sequence[Number] | None


def normalise(tally: Tally, row: Row, eps: float) -> list[Number]:
    """Return a group normalised: 5n + 5 operations."""
    mean = mean_of(tally, row)
    centred = [x - mean for x in row]
    inverse = 1 / (squares_of(tally, centred) / len(row) + eps).sqrt()
    return [x * inverse for x in centred]


def scale_and_shift(row: Row, weight: Scales, bias: Scales) -> list[Number]:
    if weight is not None:
        row = [x * w for x, w in zip(row, weight, strict=True)]
    if bias is not None:
        row = [x + b for x, b in zip(row, bias, strict=True)]
    return list(row)


def rms_norm(tally: Tally, row: Row, weight: Scales, eps: float) -> list[Number]:
    """Return a group over its root mean square: 3n + 4 operations, and n for a weight."""
    inverse = 1 / (squares_of(tally, row) / len(row) + eps).sqrt()
    return scale_and_shift([x * inverse for x in row], weight, None)


def standardise_channel(
    tally: Tally, row: Row, weight: Number | None, bias: Number | None, eps: float
) -> tuple[list[Number], Number, Number]:
    """Return a channel normalised by its own mean and variance, and these; a weight is made part of its factor."""
    mean = mean_of(tally, row)
    centred = [x - mean for x in row]
    variance = squares_of(tally, centred) / len(row)
    factor = 1 / (variance + eps).sqrt()
    if weight is not None:
        factor = factor * weight
    scaled = [x * factor for x in centred]
    return scaled if bias is None else [x + bias for x in scaled], mean, variance


def channels(batch: Sequence[Sequence[Row]]) -> list[list[Number]]:
    """Return the numbers of each channel of N C L lists, over all of the batch."""
    return [[x for sample in batch for x in sample[c]] for c in range(len(batch[0]))]


def batch_norm_eval(
    batch: Sequence[Sequence[Row]], mean: Row, variance: Row, weight: Scales, bias: Scales, eps: float
) -> list[list[list[Number]]]:
    """Return N C L numbers normalised by running statistics: the factor of a channel is made once."""
    factors = [1 / (v + eps).sqrt() for v in variance]
    factors = scale_and_shift(factors, weight, None)
    centred = [[[(x - mean[c]) * factors[c] for x in row] for c, row in enumerate(sample)] for sample in batch]
    if bias is None:
        return centred
    return [[[x + bias[c] for x in row] for c, row in enumerate(sample)] for sample in centred]


def follow(running: Number, momentum: float, latest: Number) -> Number:
    """Return a running statistic: (1 − momentum)*running + momentum*latest."""
    return running * (1 - momentum) + latest * momentum


def local_response_norm(
    tally: Tally, sample: Sequence[Row], size: int, alpha: float, beta: float, k: float
) -> list[list[Number]]:
    """Return x/(k + alpha*mean of squares of the channels around)^beta; channels beyond the edge are 0."""
    squares = [[x * x for x in row] for row in sample]
    results = []
    for c, row in enumerate(sample):
        line = []
        for place, x in enumerate(row):
            total = tally.zero()
            for near in range(c - size // 2, c - size // 2 + size):
                total = total + (squares[near][place] if 0 <= near < len(sample) else 0.0)
            line.append(x / power(total / size * alpha + k, beta))
        results.append(line)
    return results


# --- gradients --------------------------------------------------------------------------------------------------------


def standardise(row: Row, mean: Number, inverse: Number) -> list[Number]:
    """Return (x − mean)*inverse, by statistics that the forward pass left."""
    return [(x - mean) * inverse for x in row]


def normalise_backward(tally: Tally, gradient: Row, normal: Row, inverse: Number) -> list[Number]:
    """Return (g − mean(g) − normal*mean(g*normal))*inverse: 7n + 2 operations."""
    average = mean_of(tally, gradient)
    slope = mean_of(tally, gradient_of_weight(gradient, normal))
    return [(g - average - x * slope) * inverse for g, x in zip(gradient, normal, strict=True)]


def gradient_of_weight(gradient: Row, normal: Row) -> list[Number]:
    """Return what each element adds to the gradient of its weight."""
    return [g * x for g, x in zip(gradient, normal, strict=True)]


def add_into(sums: list[Number], places: Sequence[int], row: Row) -> None:
    """Add the numbers of a row to sums, each to that at its place."""
    for place, x in zip(places, row, strict=True):
        sums[place] = sums[place] + x


def groups_backward(
    tally: Tally,
    gradients: Sequence[Row],
    groups: Sequence[Row],
    statistics: Sequence[tuple[Number, Number]],
    places: Sequence[Sequence[int]],
    weight: Scales,
    scales: int,
    mask: tuple[bool, bool, bool],
) -> tuple[list[list[Number]], list[Number], list[Number]]:
    """Return the gradients of groups, of the weight and of the bias, those that `mask` asks for.

    `statistics` holds the mean and 1/deviation of each group, `places` which of so many `scales` each number meets.
    """
    of_groups = []
    of_weight, of_bias = ([tally.zero() for _ in range(scales)] for _ in range(2))
    for gradient, group, (mean, inverse), where in zip(gradients, groups, statistics, places, strict=True):
        normal = standardise(group, mean, inverse) if mask[0] or mask[1] else []
        if mask[0]:
            own = gradient if weight is None else [g * weight[place] for g, place in zip(gradient, where, strict=True)]
            of_groups.append(normalise_backward(tally, own, normal, inverse))
        if mask[1]:
            add_into(of_weight, where, gradient_of_weight(gradient, normal))
        if mask[2]:
            add_into(of_bias, where, gradient)
    return of_groups, of_weight, of_bias


def rms_norm_backward(
    tally: Tally, gradient: Row, row: Row, inverse: Number, weight: Scales
) -> tuple[list[Number], list[Number]]:
    """Return (g*w − normal*mean(g*w*normal))*inverse, and what each element adds to the gradient of its weight."""
    normal = [x * inverse for x in row]
    of_weight = gradient_of_weight(gradient, normal) if weight is not None else []
    own = scale_and_shift(gradient, weight, None)
    slope = mean_of(tally, gradient_of_weight(own, normal))
    return [(g - x * slope) * inverse for g, x in zip(own, normal, strict=True)], of_weight


def batch_norm_backward(
    tally: Tally,
    gradient: Row,
    channel: Row,
    mean: Number,
    inverse: Number,
    weight: Number | None,
    mask: tuple[bool, bool, bool],
) -> tuple[list[Number], Number, Number]:
    """Return the gradients of a channel, of its weight and of its bias; the two sums serve the first too.

    (g − mean(g) − normal*mean(g*normal))*(inverse*weight)
    """
    normal = standardise(channel, mean, inverse) if mask[0] or mask[1] else []
    total = tally.sum(gradient) if mask[0] or mask[2] else tally.zero()
    inner = tally.sum(gradient_of_weight(gradient, normal)) if normal else tally.zero()
    if not mask[0]:
        return [], inner, total
    average, slope = total / len(channel), inner / len(channel)
    factor = inverse if weight is None else inverse * weight
    return [(g - average - x * slope) * factor for g, x in zip(gradient, normal, strict=True)], inner, total


def batch_norm_eval_backward(
    tally: Tally,
    gradient: Row,
    channel: Row,
    mean: Number,
    variance: Number,
    weight: Number | None,
    eps: float,
    mask: tuple[bool, bool, bool],
) -> tuple[list[Number], Number, Number]:
    """Return the gradients of a channel that running statistics normalised, of its weight and of its bias."""
    inverse = 1 / (variance + eps).sqrt() if mask[0] or mask[1] else tally.zero()
    own = []
    inner = total = tally.zero()
    if mask[0]:
        factor = inverse if weight is None else inverse * weight
        own = [g * factor for g in gradient]
    if mask[1]:
        inner = tally.sum(gradient_of_weight(gradient, standardise(channel, mean, inverse)))
    if mask[2]:
        total = tally.sum(gradient)
    return own, inner, total


def weight_norm(tally: Tally, row: Row, length: Number) -> list[Number]:
    """Return a row brought to a length: v*(g/norm(v)) (arXiv 1602.07868)."""
    factor = length / squares_of(tally, row).sqrt()
    return [v * factor for v in row]
