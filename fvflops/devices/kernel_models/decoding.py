"""Time of the attention of one new token to a cache on a GPU, in parts of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from fvflops.devices.kernel_models.fused_attention import DECODED, OVERLAP, Attention
from fvflops.devices.kernel_models.memory_bound import moving_seconds
from fvflops.devices.kernel_models.products import Processor, combine

# Fewest keys of a part, numbers of parts, and rows of a tile that the matrix units take at once.
_KEYS = 64
_PARTS = (2, 4, 8, 16, 32, 64, 128)
_UNIT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFigures:
    """What the attention of one new token to a cache depends on besides the GPU's peaks; times are in seconds.

    `start` is the shortest time, `block` what one thread block takes besides its products, `peak` the fraction of the
    matrix peak, `split` the time of adding parts of the cache, `tail` what blocks beyond one a multiprocessor take in
    proportion; `bandwidth`, `cached` and `cache` as of prompts.
    """

    start: float
    block: float
    peak: float
    split: float
    tail: float
    bandwidth: float
    cached: float
    cache: float


def decode_seconds(shape: Attention, gpu: Processor, figures: DecodeFigures) -> float:
    """Return the seconds of the attention of one new token to the tokens in a cache, split into the fastest parts.

    >>> hopper = DecodeFigures(
    ...     start=8.7e-6, block=3.6e-6, peak=0.35, split=1.6e-6, tail=0.7, bandwidth=0.9, cached=1.2, cache=40e6
    ... )
    >>> shape = Attention(32, 1, 8192, 32, 8, 128)
    >>> seconds = decode_seconds(shape, Processor(132, 989e12, 3.35e12), hopper)
    >>> round(32 * 8192 * shape.token_bytes / seconds / 1e12, 2)
    2.76
    """
    keys = min(shape.keys, shape.window)
    group = shape.queries * shape.heads / shape.key_heads
    rows = _UNIT * ceil(min(group, DECODED) / _UNIT)
    each = 2 * rows * (shape.size + shape.values) / (gpu.peak / gpu.multiprocessors * figures.peak)  # of a key
    blocks = shape.batch * shape.key_heads * ceil(group / DECODED)
    moved = shape.query_bytes + shape.batch * keys * shape.token_bytes
    cached = figures.cached if shape.repeated else 1.0
    moving = moving_seconds(moved, gpu.bandwidth * figures.bandwidth, cached, figures.cache)
    best = inf
    for parts in (1, *_PARTS):
        if parts > 1 and keys < _KEYS * parts:
            break
        waves = blocks * parts / gpu.multiprocessors
        waves += figures.tail * (waves > 1)
        seconds = max(1.0, waves) * (ceil(keys / parts) * each + figures.block)
        best = min(best, seconds + figures.split * (parts > 1))
    return figures.start + combine(best, moving, OVERLAP)
