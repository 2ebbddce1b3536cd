"""Time of a fused mixture of experts on a GPU: products of each expert's own tokens, in one kernel for each matrix."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import NormalDist
from typing import NamedTuple

from fvflops.devices.kernel_models.memory_bound import missed_part
from fvflops.devices.kernel_models.products import Processor, Product, ProductFigures, group_seconds

# Bytes of an activation between kernels.
_ACTIVATION = 2.0
# Distinct numbers of rows of experts that tokens choose at random.
_DRAWN = 16
_GROUPS = 5


class Mixture(NamedTuple):
    """The part of a mixture of experts that one rank computes, of `tokens` that each go to `topk` experts of all ranks.

    `rows` are pairs of a number of tokens and how many of the rank's experts get it, as `drawn_rows` returns them.
    Experts have matrices of `hidden` by `inner` elements: two up, one of which is the gate, and one down. Bytes are of
    an element of the weights, and of the activations that are multiplied with them. `is_repeated` says whether the same
    weights were used just before, as in a benchmark, and are in the cache if they fit.
    """

    tokens: int
    topk: int
    rows: tuple[tuple[int, float], ...]
    hidden: int
    inner: int
    weight_bytes: float = 2.0
    element_bytes: float = 2.0
    gated: bool = True
    is_repeated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureFigures(ProductFigures):
    """Parameters of a mixture's time: figures as for products; `start` is the time of all short kernels.

    `moves` is how often the experts' inputs, inner activations and outputs are moved by kernels other than products: to
    sort tokens by expert, for the activation function, and to add the experts' outputs. `elsewhere` is the same for
    the experts of other ranks, for which those kernels have rows too.
    """

    moves: float
    elsewhere: float


def mixture_seconds(mixture: Mixture, gpu: Processor, figures: MixtureFigures) -> float:
    """Return the seconds of routing tokens, both products of all experts, and adding their outputs."""
    rows, hidden, inner = mixture.rows, mixture.hidden, mixture.inner
    columns = (2 if mixture.gated else 1) * inner
    weights = sum(count for height, count in rows if height) * (columns + inner) * hidden * mixture.weight_bytes
    missed = missed_part(weights * mixture.is_repeated, figures.cache)
    each = partial(Product, 0, operand_bytes=mixture.element_bytes, column_bytes=mixture.weight_bytes)
    up = group_seconds(rows, each(columns, hidden), gpu, figures, missed)
    down = group_seconds(rows, each(hidden, inner), gpu, figures, missed)
    own = sum(height * count for height, count in rows)
    others = max(0, mixture.tokens * mixture.topk - own)
    moved = (figures.moves * own + figures.elsewhere * others) * (columns + inner + 2 * hidden)
    moving = _ACTIVATION * moved / (gpu.bandwidth * figures.bandwidth)
    return figures.start + moving + up + down


@lru_cache(maxsize=4096)
def drawn_rows(
    tokens: int, experts: int, topk: int, ranks: int = 1, spread: float = 0.0
) -> tuple[tuple[int, float], ...]:
    """Return pairs of a number of rows and how many of one rank's experts get it, on average, in random routing.

    Experts are not chosen equally often: the logarithms of their probabilities have the standard deviation `spread`.

    >>> [(rows, round(count, 2)) for rows, count in drawn_rows(2, 8, 2)]
    [(0, 4.5), (1, 3.0), (2, 0.5)]
    """
    groups: dict[int, float] = defaultdict(float)
    chances = _chances(experts, topk, spread)
    for chance in chances:
        for rows, probability in zip(*_binomial(tokens, chance), strict=True):
            groups[rows] += experts / ranks / len(chances) * probability
    return tuple(sorted(groups.items()))


def _chances(experts: int, topk: int, spread: float) -> list[float]:
    """Return how likely a token chooses an expert, of equally large groups of experts."""
    if not spread:
        return [topk / experts]
    weights = [math.exp(spread * NormalDist().inv_cdf((index + 0.5) / _GROUPS)) for index in range(_GROUPS)]
    mean = topk / experts * _GROUPS / sum(weights)
    return [min(1.0, mean * weight) for weight in weights]


@lru_cache(maxsize=65536)
def _binomial(tokens: int, chance: float) -> tuple[range, tuple[float, ...]]:
    """Return numbers of chosen tokens and their probabilities; large numbers are put together."""
    if chance >= 1:
        return range(tokens, tokens + 1), (1.0,)
    mean, deviation = tokens * chance, math.sqrt(tokens * chance * (1 - chance))
    low, high = max(0, math.floor(mean - 4 * deviation)), min(tokens, math.ceil(mean + 4 * deviation) + 1)
    width = max(1, (high - low) // _DRAWN)
    groups = range(low + width // 2, high + 1 + width // 2, width)
    found = [0.0] * len(groups)
    every, chosen, others = math.lgamma(tokens + 1), math.log(chance), math.log1p(-chance)
    for rows in range(low, high + 1):
        logarithm = every - math.lgamma(rows + 1) - math.lgamma(tokens - rows + 1)
        found[(rows - low) // width] += math.exp(logarithm + rows * chosen + (tokens - rows) * others)
    total = sum(found)
    return groups, tuple(probability / total for probability in found)
