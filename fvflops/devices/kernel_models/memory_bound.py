"""Time of a memory-bound kernel: element by element, normalisation, softmax, copies."""

from __future__ import annotations

from dataclasses import dataclass

# How sharply the cache's benefit falls as bytes exceed it.
_SHARPNESS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """Parameters of the time of a memory-bound kernel besides the GPU's bandwidth.

    `start` is the shortest time in seconds, `bandwidth` the fraction of the memory bandwidth, `cached` its factor
    for bytes that the previous kernel left in the cache, `cache` the most bytes for which that applies.
    """

    start: float
    bandwidth: float
    cached: float
    cache: float


def memory_seconds(nbytes: float, bandwidth: float, figures: MemoryFigures) -> float:
    """Return the seconds of reading and writing `nbytes` on a GPU of `bandwidth` bytes/s.

    >>> hopper = MemoryFigures(start=1.4e-6, bandwidth=0.91, cached=1.6, cache=40e6)
    >>> [round(memory_seconds(nbytes, 3.35e12, hopper) * 1e6, 1) for nbytes in (1e4, 1e7, 1e9)]
    [1.4, 3.5, 329.4]
    """
    return figures.start + moving_seconds(nbytes, bandwidth * figures.bandwidth, figures.cached, figures.cache)


def moving_seconds(nbytes: float, bandwidth: float, cached: float, cache: float) -> float:
    """Return the seconds of moving bytes at an attained bandwidth, `cached` times it for up to `cache` bytes."""
    missed = missed_part(nbytes, cache)
    return nbytes / bandwidth * (missed + (1 - missed) / cached)


def missed_part(nbytes: float, cache: float) -> float:
    """Return the part of a number of bytes that a cache does not hold."""
    return 1 / (1 + (cache / nbytes) ** _SHARPNESS) if nbytes else 1.0
