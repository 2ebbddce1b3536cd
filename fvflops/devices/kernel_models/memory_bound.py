"""Time of a kernel that is bound by memory: element by element, normalisation, softmax, copies."""

from __future__ import annotations

from dataclasses import dataclass

# How sharply the cache stops to help as the bytes of a kernel exceed it.
_SHARPNESS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """What the time of a kernel bound by memory depends on besides the GPU's bandwidth.

    `start` is the shortest time in seconds, `bandwidth` the fraction of the memory bandwidth, `cached` the factor of it
    for bytes in the cache, `share` the part of the cache that holds them.
    """

    start: float
    bandwidth: float
    cached: float
    share: float


def memory_seconds(nbytes: float, bandwidth: float, cache: float, figures: MemoryFigures) -> float:
    """Return the seconds of reading and writing `nbytes` at a GPU's `bandwidth`, with a cache of `cache` bytes.

    What the kernel before wrote is still in the cache if it fits, as activations of small models are.

    >>> hopper = MemoryFigures(start=1.4e-6, bandwidth=0.91, cached=1.6, share=0.8)
    >>> [round(memory_seconds(nbytes, 3.35e12, 50e6, hopper) * 1e6, 1) for nbytes in (1e4, 1e7, 1e9)]
    [1.4, 3.5, 329.4]
    """
    if not nbytes:
        return figures.start
    missed = 1 / (1 + (figures.share * cache / nbytes) ** _SHARPNESS)
    return figures.start + nbytes / (bandwidth * figures.bandwidth) * (missed + (1 - missed) / figures.cached)
