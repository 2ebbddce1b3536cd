"""Time of fused attention on a GPU: of prompts, in tiles of queries, and of one new token, in parts of the cache."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

from fvflops.devices.kernel_models.products import Processor, combine

# Keys of one step, and the fewest keys of a part of the cache.
_KEYS = 64
_PARTS = (1, 2, 4, 8, 16, 32, 64)
# Queries of a group of heads that are decoded: they are in one tile.
_DECODED = 64


class Attention(NamedTuple):
    """`batch` sequences of `queries` new tokens that attend to `keys` tokens, the new ones among them.

    `key_heads` are shared by `heads` in equal groups; each head has `size` elements. `window` is the number of keys that
    a query attends to at most. `key_bytes` are those of an element of keys and values. `appends` says whether the
    kernels also write the new keys and values into a cache.
    """

    batch: int
    queries: int
    keys: int
    heads: int
    key_heads: int
    size: int
    causal: bool = True
    window: float = inf
    element_bytes: float = 2.0
    key_bytes: float = 2.0
    appends: bool = False

    @property
    def is_decoding(self) -> bool:
        """Whether a few new tokens attend to a cache, so that the queries of a group of heads are in one tile."""
        return self.queries < self.keys and self.queries * self.heads <= _DECODED * self.key_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFigures:
    """What the time of a prompt's attention depends on besides the GPU's peaks; times are in seconds.

    `peak` is the fraction of the matrix peak with heads of 128 elements, `narrow` and `wide` its factors for heads of
    up to 64 and from 192. `start` is the shortest time, `tile` the time that one tile of `rows` queries takes besides
    its products, `tail` the share of the longest tile that is left when the others are done, `bandwidth` the fraction of
    the memory bandwidth, `overlap` the norm of computing and moving, `cache` how often the bytes of new keys and values
    are moved where they are appended to a cache.
    """

    rows: int
    peak: float
    narrow: float
    wide: float
    start: float
    tile: float
    tail: float
    bandwidth: float
    overlap: float
    cache: float


def attention_seconds(shape: Attention, gpu: Processor, figures: AttentionFigures) -> float:
    """Return the seconds of a prompt's attention.

    Queries of the heads that share a key head may be in one tile. Tiles of a causal mask have different lengths.
    """
    tokens = shape.batch * shape.size
    queries = 2 * shape.element_bytes * tokens * shape.queries * shape.heads
    times = figures.cache if shape.appends else 1.0
    moved = queries + 2 * shape.key_bytes * tokens * shape.key_heads * (
        shape.keys - shape.queries + times * shape.queries
    )
    group = shape.heads // shape.key_heads
    computing = min(_tiles(shape, 1, gpu, figures), _tiles(shape, group, gpu, figures))
    return figures.start + combine(computing, moved / (gpu.bandwidth * figures.bandwidth), figures.overlap)


def _tiles(shape: Attention, group: int, gpu: Processor, figures: AttentionFigures) -> float:
    """Return the seconds of the tiles, each of queries of `group` heads."""
    tiles = ceil(shape.queries * group / figures.rows)
    tokens = figures.rows / group  # of one tile
    most = min(shape.keys, shape.window + ceil(tokens)) if shape.causal else shape.keys
    mean = most
    if shape.causal and shape.window >= shape.keys:
        mean = shape.keys - (shape.queries - min(shape.queries, tokens)) / 2
    share = figures.narrow if shape.size <= 64 else figures.wide if shape.size >= 192 else 1.0
    each = 4 * figures.rows * shape.size / (gpu.peak / gpu.multiprocessors * figures.peak * share)
    longest, middle = (_KEYS * ceil(keys / _KEYS) * each + figures.tile for keys in (most, mean))
    waves = tiles * shape.batch * shape.heads / group / gpu.multiprocessors
    return max(longest, waves * middle + figures.tail * min(1.0, waves) * longest)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFigures:
    """What the attention of one new token to a cache depends on besides the GPU's peaks; times are in seconds.

    `start` is the shortest time, `block` the time of one thread block besides reading its keys and values, `feed` the
    bytes/s at which one multiprocessor reads them, `split` the time of combining parts of the cache, `tail` how long
    blocks beyond two a multiprocessor take in proportion, `bandwidth` and `overlap` as of prompts.
    """

    start: float
    block: float
    feed: float
    split: float
    tail: float
    bandwidth: float
    overlap: float


def decode_seconds(shape: Attention, gpu: Processor, figures: DecodeFigures) -> float:
    """Return the seconds of the attention of one new token to the tokens in a cache, split into the fastest parts."""
    keys = min(shape.keys, shape.window)
    each = 2 * shape.size * shape.key_bytes  # of a key and its value
    blocks = shape.batch * shape.key_heads * ceil(shape.heads / shape.key_heads / _KEYS)
    moved = shape.batch * (shape.key_heads * keys * each + 2 * shape.heads * shape.size * shape.element_bytes)
    moving = moved / (gpu.bandwidth * figures.bandwidth)
    best = inf
    for parts in _PARTS:
        if parts > 1 and keys < _KEYS * parts:
            break
        seconds = ceil(keys / parts) * each / figures.feed + figures.block
        waves = blocks * parts / gpu.multiprocessors / 2
        waves += figures.tail * (waves > 1)
        best = min(best, max(1.0, waves) * seconds + figures.split * (parts > 1))
    return figures.start + combine(best, moving, figures.overlap)


def attention_backward_seconds(shape: Attention, gpu: Processor, figures: AttentionFigures) -> float:
    """Return the seconds of the backward of a prompt's attention: five products for the two of the forward."""
    return 2.5 / 0.8 * attention_seconds(shape, gpu, figures)
