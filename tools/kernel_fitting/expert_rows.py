"""Rows of the experts of a mixture in measured runs, whose loads follow a power law."""

from __future__ import annotations

import random
from collections import Counter
from functools import lru_cache

# A power law with an exponent of 1 is the limit of exponents near it.
_NEAR_ONE = 1e-6
# How often experts are dealt to ranks to find a typical busiest one.
_DEALS = 9


@lru_cache(maxsize=1024)
def expert_rows(tokens: int, experts: int, topk: int, ranks: int = 1, skew: float = 0.0) -> tuple[tuple[int, int], ...]:
    """Return pairs of a number of rows and how many experts of the busiest of `ranks` ranks get it.

    Each token goes to `topk` experts; `skew` is the exponent of a power law of experts' loads, 0 for equal ones. The
    heaviest load is 0.8 of the tokens before loads are scaled to their sum, as in NVIDIA's AIConfigurator.

    >>> expert_rows(64, 8, 2), expert_rows(64, 8, 2, ranks=8), expert_rows(1, 8, 2)
    (((16, 8),), ((16, 1),), ((0, 6), (1, 2)))
    >>> expert_rows(64, 8, 2, ranks=4, skew=1.2)
    ((4, 1), (57, 1))
    """
    total = tokens * topk
    own = experts // ranks
    low, high = (1.0, 0.8 * tokens) if total > experts else (0.01, 2.0)
    loads = [_quantile(low, high, (index + 0.5) / experts, skew) for index in range(experts)]
    loads = _scaled(sorted(loads, reverse=True), total, tokens)
    deals = [_busiest(loads, own, seed) for seed in range(_DEALS if skew else 1)]
    chosen = sorted(deals, key=sum)[len(deals) // 2]
    return tuple(sorted(Counter(_rounded(chosen)).items()))


def _quantile(low: float, high: float, share: float, skew: float) -> float:
    """Return the value below which a share of a power law's values are; of a law without skew all are equal."""
    if not skew:
        return 1.0
    if abs(1 - skew) < _NEAR_ONE:
        return low * float((high / low) ** share)
    first, last = (end ** (1 - skew) for end in (low, high))
    return float((first + (last - first) * share) ** (1 / (1 - skew)))


def _scaled(loads: list[float], total: float, most: float) -> list[float]:
    """Return falling loads that are scaled to a sum, of which none is above `most`."""
    for capped in range(len(loads)):
        scale = (total - capped * most) / sum(loads[capped:])
        if loads[capped] * scale <= most:
            return [most] * capped + [load * scale for load in loads[capped:]]
    return [most] * len(loads)


def _busiest(loads: list[float], own: int, seed: int) -> list[float]:
    """Return the loads of a rank's experts, of the rank that has most when experts are dealt at random."""
    dealt = random.Random(seed).sample(loads, len(loads))
    return max((dealt[start : start + own] for start in range(0, len(dealt), own)), key=sum)


def _rounded(loads: list[float]) -> list[int]:
    """Return integers with the sum of loads, by carrying the rounding error from the heaviest to the lightest."""
    found, carried = [], 0.0
    for load in sorted(loads, reverse=True):
        rows = round(load + carried)
        carried += load - rows
        found.append(rows)
    return found
