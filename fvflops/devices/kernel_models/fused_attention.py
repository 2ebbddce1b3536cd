"""Time of fused attention on a GPU: of prompts and encoders in tiles of queries, of its backward, and of decoding."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import NamedTuple

from fvflops.devices.kernel_models.memory_bound import MemoryFigures, moving_seconds
from fvflops.devices.kernel_models.products import Processor, combine

# Keys of one step of a tile, ways to split the keys among thread blocks, and the seconds of adding the parts.
_STEP = 128
_SPLITS = (2, 4, 8, 16)
_ADDING = 3e-6
# Queries of a group of heads that are decoded: they are in one tile.
DECODED = 64
# Kernels compute heads of a multiple of this size.
_SIZE = 32
# Norm of computing and moving.
OVERLAP = 1.5
_PARTIAL_BYTES = 4  # of an element of a partial result
_RESULT_BYTES = 2
# Backward: five products for the two of the forward, at this share of its efficiency, in three kernels. The share was
# measured of FlashAttention-2 on A100 and FlashAttention-3 on H100, heads of 128 (arXiv:2307.08691, arXiv:2407.08608).
_BACKWARD_PRODUCTS, _BACKWARD_SHARE, _BACKWARD_KERNELS = 2.5, 0.8, 3


class Attention(NamedTuple):
    """`batch` sequences of `queries` new tokens that attend to `keys` tokens, the new ones among them.

    `key_heads` are shared by `heads` in equal groups; each head has `size` elements. `window` is the number of keys
    that a query attends to at most. `key_bytes` is an element's size in keys and values. `appends` says whether the
    kernels also write the new keys and values into a cache. `value_size` are elements of a value, 0 for `size`;
    `latent` values are the first elements of the keys, and not read again. `repeated` says whether the same kernel ran
    just before, as in benchmarks, so that cached tokens may be in the GPU's cache.
    """

    batch: int
    queries: int
    keys: float
    heads: int
    key_heads: int
    size: int
    causal: bool = True
    window: float = inf
    element_bytes: float = 2.0
    key_bytes: float = 2.0
    appends: bool = False
    value_size: int = 0
    latent: bool = False
    repeated: bool = False

    @property
    def is_decoding(self) -> bool:
        """Whether one new token, or a few whose group of heads is in one tile, attend to a cache."""
        few = self.queries == 1 or self.queries * self.heads <= DECODED * self.key_heads
        return self.queries < self.keys and few

    @property
    def values(self) -> int:
        """Elements of a value."""
        return self.value_size or self.size

    @property
    def token_bytes(self) -> float:
        """Bytes of the keys and values of one token."""
        return self.key_heads * (self.size + (0 if self.latent else self.values)) * self.key_bytes

    @property
    def query_bytes(self) -> float:
        """Bytes of all queries and results."""
        return self.batch * self.queries * self.heads * (self.size * self.element_bytes + self.values * _RESULT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFigures(MemoryFigures):
    """Parameters of the time of a prompt's attention besides the GPU's peaks; times are in seconds.

    `rows` are queries of a tile, of up to `packed` heads of a group. `peak` is the fraction of the matrix peak
    with heads of 128 elements, `narrow` and `wide` its factors for heads of up to 64 and from 192. `appending` is the
    time of a kernel that writes to a cache of keys, `tile` a tile's time besides its products, `tail` the share of the
    longest tile that is left when the others are done.
    """

    rows: float
    packed: float
    peak: float
    narrow: float
    wide: float
    appending: float
    tile: float
    tail: float


def attention_seconds(shape: Attention, gpu: Processor, figures: AttentionFigures) -> float:
    """Return the seconds of a prompt's or an encoder's attention.

    >>> hopper = AttentionFigures(
    ...     rows=128, packed=128, peak=0.66, narrow=0.8, wide=1.1, start=6e-6, appending=4e-6, tile=2e-6, tail=0.1,
    ...     bandwidth=0.6, cached=1, cache=30e6,
    ... )
    >>> seconds = attention_seconds(Attention(1, 8192, 8192, 32, 8, 128), Processor(132, 989e12, 3.35e12), hopper)
    >>> round(2 * 8192**2 * 32 * 128 / seconds / 1e12)
    595
    """
    bandwidth = gpu.bandwidth * figures.bandwidth
    moved = shape.query_bytes + shape.batch * shape.keys * shape.token_bytes
    seconds = figures.start + combine(
        _tile_seconds(shape, gpu, figures), moving_seconds(moved, bandwidth, figures.cached, figures.cache), OVERLAP
    )
    if shape.appends:  # reads the new ones and writes them
        appended = 2 * shape.batch * shape.queries * shape.token_bytes
        seconds += figures.appending + moving_seconds(appended, bandwidth, figures.cached, figures.cache)
    return seconds


def _tile_seconds(shape: Attention, gpu: Processor, figures: AttentionFigures) -> float:
    """Return the seconds of all tiles, their keys split among thread blocks where that is faster."""
    group = min(shape.heads / shape.key_heads, figures.packed)
    tiles = ceil(shape.queries * group / figures.rows) * shape.batch * shape.heads / group
    longest, middle = _keys_of_tiles(shape, figures.rows / group)
    size, values = (_SIZE * ceil(size / _SIZE) for size in (shape.size, shape.values))
    rate = gpu.peak / gpu.multiprocessors * figures.peak * _share((size + values) / 2, figures)
    each = 2 * figures.rows * (size + values) / rate  # of a key
    best = inf
    for parts in (1, *_SPLITS):
        if parts > 1 and longest < _STEP * parts:
            break
        last = _STEP * ceil(longest / parts / _STEP) * each + figures.tile
        waves = tiles * parts / gpu.multiprocessors
        seconds = waves * (max(middle / parts, _STEP) * each + figures.tile) + figures.tail * min(1.0, waves) * last
        seconds = max(last, seconds)
        if parts > 1:
            partial = shape.batch * shape.queries * shape.heads * shape.values * parts * _PARTIAL_BYTES
            seconds += _ADDING + 2 * partial / gpu.bandwidth
        best = min(best, seconds)
    return best


def _keys_of_tiles(shape: Attention, tokens: float) -> tuple[float, float]:
    """Return the keys of the longest and of a mean tile of `tokens` queries, steps across the mask included."""
    longest = float(_STEP * ceil(min(shape.keys, shape.window + tokens) / _STEP))
    if not shape.causal:
        return longest, longest
    tokens = min(shape.queries, tokens)
    # A tile's last query attends to all keys before it, until these keys are more than the windows of its queries hold.
    first = max(0, shape.keys - shape.queries) + tokens / 2
    most = shape.window + tokens
    growing = min(shape.queries, max(0.0, most - first))
    mean = growing * (first + growing / 2)
    if growing < shape.queries:
        mean += (shape.queries - growing) * most
    return longest, min(mean / shape.queries + _STEP / 2, longest)


def _share(size: float, figures: AttentionFigures) -> float:
    """Return the factor of the efficiency with heads of a size."""
    if size >= 192:
        return figures.wide
    return figures.narrow + (1 - figures.narrow) * min(1.0, max(0.0, size / 64 - 1))


def attention_backward_seconds(shape: Attention, gpu: Processor, figures: AttentionFigures) -> float:
    """Return the seconds of the backward of a prompt's attention, derived from its forward."""
    forward = attention_seconds(shape._replace(appends=False), gpu, figures) - figures.start
    return _BACKWARD_KERNELS * figures.start + _BACKWARD_PRODUCTS / _BACKWARD_SHARE * forward


# Fewest keys of a part, numbers of parts, and rows of a tile that the matrix units take at once.
_KEYS = 64
_PARTS = (2, 4, 8, 16, 32, 64, 128)
_UNIT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFigures(MemoryFigures):
    """Parameters of decode attention besides the GPU's peaks; times are in seconds.

    `block` is the time of one thread block besides its products, `peak` the fraction of the matrix peak, `split` the
    time of adding parts of the cache, `tail` the relative time of blocks beyond one a
    multiprocessor.
    """

    block: float
    peak: float
    split: float
    tail: float


def decode_seconds(shape: Attention, gpu: Processor, figures: DecodeFigures) -> float:
    """Return the seconds of decode attention (one new token to a cache), split into the fastest parts.

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
