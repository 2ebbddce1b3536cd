"""Time of a matrix product on a GPU, from its tiles, waves of multiprocessors, and memory traffic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from fvflops.devices.kernel_models.memory_bound import missed_part

# Rows and columns of a tile of the result, one thread block each; small tiles use the matrix units less well.
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (32, 64), (16, 64), (64, 16))
_HEIGHTS = sorted({height for height, _ in _TILES})
_LARGE, _MEDIUM = 128 * 128, 64 * 64
# Ways to split the inner dimension among thread blocks, where there are fewer tiles than multiprocessors.
_SPLITS = (2, 4, 8, 16)
# The inner dimension is computed in steps of this many elements; a split has at least two.
_STEP = 64
# Exponent of how much slower rows are that are not aligned to 16 bytes. Traces of an H100: 2.2 times with 4 bytes (a
# vocabulary of 30,522), 3.3 times with 2 (attention over 3,137 and 5,185 keys).
_MISALIGNED = 0.57
# Bytes of a partial sum.
_PARTIAL = 4


class Product(NamedTuple):
    """`batch` products of (rows, inner) by (inner, columns), and the bytes of an element of operands and result.

    `alignment` is the largest power of two, up to 16 bytes, of which the rows of all matrices are multiples in memory.
    `column_bytes` are the second operand's where it is stored in another dtype, such as weights in int4. `moved` are
    the bytes from and to memory where the operands are not stored as such, as for a convolution. `is_grouped` are
    products of unequal rows in one kernel, such as experts; `rows` are their mean. `is_repeated` says whether the
    same second operand was used just before, as in benchmarks, and is in the GPU's cache if it fits.
    """

    rows: int
    columns: int
    inner: int
    batch: int = 1
    operand_bytes: float = 2.0
    result_bytes: float = 2.0
    alignment: int = 16
    column_bytes: float = 0.0
    moved: float = 0.0
    is_grouped: bool = False
    is_repeated: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the operands and the result."""
        second = self.columns * (self.column_bytes or self.operand_bytes)
        operands = self.inner * (self.rows * self.operand_bytes + second)
        return int(self.batch * (operands + self.rows * self.columns * self.result_bytes))


class Processor(NamedTuple):
    """A GPU for one dtype: its multiprocessors, peak in FLOP/s, and memory bandwidth in bytes/s."""

    multiprocessors: int
    peak: float
    bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductFigures:
    """Parameters of a product's time besides the GPU's peaks; times are in seconds.

    `large` is the fraction of the peak that tiles of at least 128 x 128 reach, `medium` its factor for tiles from 64 x
    64, `small` one more factor for smaller ones. `start` is the shortest time of a kernel, `tile` the time to fill and
    empty the pipeline of one tile, `split` the time of adding partial sums besides their traffic. `bandwidth` is the
    fraction of the memory bandwidth, `feed` the bytes/s at which one multiprocessor gets operands. `whole_waves` is 1
    where a last wave that is not full takes as long as a full one, 0 where tiles are spread evenly. `overlap` is the
    norm of computing and moving: 1 is one after the other, infinity the longer of both. `cache` is the most bytes of a
    repeated second operand that stay in the GPU's cache, `result_cache` of a result, which are not yet in memory then.
    """

    large: float
    medium: float
    small: float
    start: float
    tile: float
    split: float
    bandwidth: float
    feed: float
    whole_waves: float
    overlap: float
    cache: float = 1.0
    result_cache: float = 1.0


def product_seconds(product: Product, gpu: Processor, figures: ProductFigures) -> float:
    """Return the seconds of a product: the fastest tiles and split of the inner dimension, as a tuned library chooses.

    >>> hopper = ProductFigures(
    ...     large=0.81, medium=1, small=0.35, start=2e-6, tile=1.1e-6, split=2.3e-6, bandwidth=0.83, feed=143e9,
    ...     whole_waves=0.03, overlap=3,
    ... )
    >>> seconds = product_seconds(Product(8192, 8192, 8192), Processor(132, 989e12, 3.35e12), hopper)
    >>> round(2 * 8192**3 / seconds / 1e12)
    789
    """
    column_bytes = product.column_bytes or product.operand_bytes
    repeated = product.batch * product.inner * product.columns * column_bytes * product.is_repeated
    missed = missed_part(repeated, figures.cache)
    return figures.start + group_seconds(((product.rows, product.batch),), product, gpu, figures, missed)


def group_seconds(
    counts: tuple[tuple[int, float], ...], each: Product, gpu: Processor, figures: ProductFigures, missed: float = 1.0
) -> float:
    """Return the seconds of products in one kernel besides its start, with the fastest tiles and split.

    `counts` are pairs (rows, number of products with them); all else is as in `each`. `missed` is the part of the
    second operands that is not in the cache.
    """
    _, columns, inner, _, row_bytes, result_bytes, alignment, column_bytes, moved, *_ = each
    column_bytes = column_bytes or row_bytes
    rows, matrices, rows_of_tiles = _add_up(counts)
    result = rows * columns
    if not result * inner:
        return 0.0
    bandwidth = gpu.bandwidth * figures.bandwidth
    operands = inner * (rows * row_bytes + matrices * columns * column_bytes * missed)
    written = result * result_bytes
    moving = (moved or operands + written * missed_part(written, figures.result_cache)) / bandwidth
    best = float("inf")
    for height, width, step in _tile_steps(gpu, figures, row_bytes, column_bytes, alignment):
        tiles = rows_of_tiles[height] * ceil(columns / width)
        computing = _waves(tiles, gpu, figures) * (ceil(inner / _STEP) * step + figures.tile)
        if computing < best:
            best = min(best, combine(computing, moving, figures.overlap))
        for parts in _SPLITS:
            if inner < 2 * _STEP * parts or tiles * parts > 2 * gpu.multiprocessors:
                break
            steps = ceil(ceil(inner / parts) / _STEP)
            adding = figures.split + _PARTIAL * result * parts / bandwidth
            computing = _waves(tiles * parts, gpu, figures) * (steps * step + figures.tile)
            if computing + adding < best:
                best = min(best, combine(computing, moving, figures.overlap) + adding)
    return best


@lru_cache(maxsize=256)
def _tile_steps(
    gpu: Processor, figures: ProductFigures, row_bytes: float, column_bytes: float, alignment: int
) -> list[tuple[int, int, float]]:
    """Return rows and columns of each tile, and the seconds of one step of its inner dimension."""
    rate = gpu.peak / gpu.multiprocessors * figures.large
    slower = (16 / alignment) ** _MISALIGNED
    found = []
    for height, width in _TILES:
        area = height * width
        share = 1.0 if area >= _LARGE else figures.medium if area >= _MEDIUM else figures.medium * figures.small
        feeding = (height * row_bytes + width * column_bytes) / figures.feed
        found.append((height, width, slower * _STEP * max(2 * area / (rate * share), feeding)))
    return found


@lru_cache(maxsize=4096)
def _add_up(counts: tuple[tuple[int, float], ...]) -> tuple[float, float, dict[int, float]]:
    """Return the rows of all products, how many have some, and height of a tile → tiles in a column."""
    rows = sum(height * count for height, count in counts)
    tiles = {height: sum(ceil(rows / height) * count for rows, count in counts) for height in _HEIGHTS}
    return rows, sum(count for height, count in counts if height), tiles


def _waves(blocks: float, gpu: Processor, figures: ProductFigures) -> float:
    """Return how many times a multiprocessor's blocks follow each other."""
    waves = blocks / gpu.multiprocessors
    return 1.0 if waves <= 1 else figures.whole_waves * ceil(waves) + (1 - figures.whole_waves) * waves


def combine(computing: float, moving: float, overlap: float) -> float:
    """Return the seconds of computing and moving: their norm, 1 one after the other, infinity the longer of both."""
    larger, smaller = (computing, moving) if computing > moving else (moving, computing)
    factor: float = (1 + (smaller / larger) ** overlap) ** (1 / overlap)
    return larger * factor
