"""The resampling programs: grids of numbers read between their points, at places known before, or given by the data.

Where the places are known before, so are the weights: no operation is counted for them. An output is a weighted sum
of k points: k multiplications and k − 1 additions.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.support.oracle.number import Number, Tally, indexes
from tests.support.oracle.pointwise import select

Position = tuple[int, ...]
Sizes = Sequence[int]

# Where one output lies between the points along a dimension: their positions with their weights.
Taps = list[tuple[int, float]]
CUBIC = -0.75


def source(index: int, size: int, result: int, align_corners: bool) -> float:
    """Return where an output lies, in units of the input (scale factors recomputed from sizes)."""
    if align_corners:
        return index * (size - 1) / (result - 1) if result > 1 else 0.0
    return (index + 0.5) * size / result - 0.5


def linear_taps(index: int, size: int, result: int, align_corners: bool) -> Taps:
    """Return the two points around an output."""
    place = max(source(index, size, result, align_corners), 0.0)
    low = min(int(place), size - 1)
    return [(low, 1 - (place - low)), (min(low + 1, size - 1), place - low)]


def cubic_taps(index: int, size: int, result: int, align_corners: bool) -> Taps:
    """Return the four points around an output (R. Keys, 1981, with a = −0.75)."""
    place = source(index, size, result, align_corners)
    low = math.floor(place)
    return [(min(max(low + step, 0), size - 1), cubic_weight(abs(place - low - step))) for step in (-1, 0, 1, 2)]


def cubic_weight(distance: float) -> float:
    d, a = distance, CUBIC
    if d <= 1:
        return ((a + 2) * d - (a + 3)) * d * d + 1
    return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a


def nearest_taps(index: int, size: int, result: int, align_corners: bool) -> Taps:
    """Return the point that an output copies."""
    return [(min(index * size // result, size - 1), 1.0)]


def resample(tally: Tally, grid: Any, results: Sizes, taps: Callable[..., Taps], align_corners: bool) -> Any:
    """Return [batch, channels, *space] of another size; with one tap an output is a copy."""
    result = np.empty((*grid.shape[:2], *results), dtype=object)
    for place in indexes(results):
        points = joint_taps(place, grid.shape[2:], results, taps, align_corners)
        parts = [grid[(..., *at)] if weight is None else grid[(..., *at)] * weight for at, weight in points]
        result[(..., *place)] = np.add.reduce(parts)
    return result


def joint_taps(place, sizes, results, taps, align_corners):
    """Return the points that an output reads with their weights, the products of those along the dimensions."""
    along = [taps(p, size, result, align_corners) for p, size, result in zip(place, sizes, results, strict=True)]
    if all(len(each) == 1 for each in along):
        return [(tuple(each[0][0] for each in along), None)]
    return [
        (tuple(index for index, _ in each), math.prod(weight for _, weight in each))
        for each in itertools.product(*along)
    ]


def resample_backward(tally: Tally, gradient: Any, sizes: Sizes, taps: Callable[..., Taps], align_corners: bool) -> Any:
    """Return zeros to which each gradient was added, times its weight, at the points that its output read."""
    result, results = tally.zeros(*gradient.shape[:2], *sizes), gradient.shape[2:]
    for place in indexes(results):
        g = gradient[(..., *place)]
        for at, weight in joint_taps(place, sizes, results, taps, align_corners):
            result[(..., *at)] = result[(..., *at)] + (g if weight is None else g * weight)
    return result


# --- places that the data gives ---------------------------------------------------------------------------------------


def unnormalise(x: Number, size: int, align_corners: bool) -> Number:
    """Return where −1 to 1 lies, in units of the input: its ends are the corner points, or the edges half a step on."""
    return (x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2


def reflect(x: Number, size: int, align_corners: bool) -> Number:
    """Return a place brought inside by mirrors at both ends: |x − low| modulo 2*span, and back from the far end."""
    low, high = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
    span = high - low
    distance = abs(x - low)
    turns = (distance / span).call("round", math.floor)
    rest = distance - turns * span
    return select(turns.value % 2 == 0, rest.value + low, span - rest + low)


def bring_inside(x: Number, size: int, padding: str, align_corners: bool) -> Number:
    """Return a place as the padding mode has it: left where it is, or brought to the border, mirrored before or not."""
    if padding == "reflection":
        x = reflect(x, size, align_corners)
    return x if padding == "zeros" else x.max(0).min(size - 1)


def sample(tally: Tally, images: Any, places: Any, mode: str, padding: str, align_corners: bool) -> Any:
    """Return [batch, channels, *space] read at places, whose last axis holds x, y (and z) between −1 and 1."""
    sizes, results = images.shape[2:], places.shape[1:-1]
    result = np.empty((*images.shape[:2], *results), dtype=object)
    for b, *place in indexes((len(images), *results)):
        coordinates = read_place(places[(b, *place)], sizes, align_corners)
        if mode == "bicubic":
            axes = zip(coordinates, sizes, strict=True)
            value = cubic(tally, images[b], *(cubic_points(x, size, padding, align_corners) for x, size in axes))
        else:
            axes = zip(coordinates, sizes, strict=True)
            inner = [bring_inside(x, size, padding, align_corners) for x, size in axes]
            value = weighted(tally, images[b], nearest_point(inner) if mode == "nearest" else linear_points(inner))
        result[(b, slice(None), *place)] = value
    return result


def read_place(place: Any, sizes: Sizes, align_corners: bool) -> list[Number]:
    return [unnormalise(x, size, align_corners) for x, size in zip(reversed(place), sizes, strict=True)]


def cubic_points(x: Number, size: int, padding: str, align_corners: bool) -> list[tuple[int | None, Number]]:
    """Return the four points around a place along a dimension, None where they are 0, with their weights.

    The padding mode moves points, which are whole numbers: that is not an operation.
    """
    low = x.call("round", math.floor)
    t = x - low
    weights = outer_cubic(t + 1), inner_cubic(t), inner_cubic(1 - t), outer_cubic(2 - t)
    points = []
    for step, weight in zip((-1, 0, 1, 2), weights, strict=True):
        index = bring_inside(Tally().number(low.value + step), size, padding, align_corners).value
        points.append((int(index) if 0 <= index <= size - 1 else None, weight))
    return points


def inner_cubic(d: Number) -> Number:
    return ((CUBIC + 2) * d - (CUBIC + 3)) * d * d + 1


def outer_cubic(d: Number) -> Number:
    return ((CUBIC * d - 5 * CUBIC) * d + 8 * CUBIC) * d - 4 * CUBIC


def cubic(tally: Tally, channels: Any, rows: Any, columns: Any) -> Any:
    """Return the weighted sum over rows of weighted sums over columns."""
    lines = []
    for row, _ in rows:
        values = [pixel(tally, channels, (row, column)) for column, _ in columns]
        lines.append(blend(values, [weight for _, weight in columns]))
    return blend(lines, [weight for _, weight in rows])


def pixel(tally: Tally, channels: Any, position: Sequence[int | None]) -> Any:
    """Return the numbers of the channels at a position, 0 outside."""
    pairs = zip(position, channels.shape[1:], strict=True)
    inside = all(index is not None and 0 <= index < size for index, size in pairs)
    return channels[(slice(None), *position)] if inside else tally.zeros(len(channels))


def blend(values: Sequence[Any], weights: Sequence[Number]) -> Any:
    """Return a weighted sum: k multiplications, k − 1 additions."""
    return np.add.reduce([value * weight for value, weight in zip(values, weights, strict=True)])


Points = list[tuple[Position, Number | None]]


def weighted(tally: Tally, channels: Any, points: Points) -> Any:
    """Return the weighted sum over points, those outside being 0; a single point is copied."""
    values = [pixel(tally, channels, position) for position, _ in points]
    return values[0] if points[0][1] is None else blend(values, [weight for _, weight in points])


def nearest_point(coordinates: Sequence[Number]) -> Points:
    """Return the point that lies nearest: a rounding along each dimension."""
    return [(tuple(int(x.call("round", round).value) for x in coordinates), None)]


def sides(x: Number) -> list[tuple[int, Number]]:
    """Return the two points around a place along a dimension, with the distances to the opposite ones."""
    low = x.call("round", math.floor)
    upper = x - low
    return [(int(low.value), 1 - upper), (int(low.value) + 1, upper)]


def linear_points(coordinates: Sequence[Number]) -> Points:
    """Return the corners around a place, with their weights: products of the distances to the opposite sides."""
    return corners([sides(x) for x in coordinates])


def corners(along: Sequence[Sequence[tuple[int, Number]]]) -> Points:
    """Return the corners that points along each dimension make, with the products of their weights."""
    return [
        (tuple(index for index, _ in each), np.multiply.reduce([weight for _, weight in each]))
        for each in itertools.product(*along)
    ]


def sample_backward(tally, gradient, images, places, mode, padding, align_corners):
    """Return the gradients of [batch, channels, *space] and of the places at which it was read, nearest or bilinear.

    A corner adds to its pixel the gradient times its weight, and to the place, for each dimension, the gradient times
    its pixel times what its weight has from the other dimensions; at last that goes through the coordinate's scale.
    """
    sizes, of_images, of_places = images.shape[2:], tally.zeros(*images.shape), tally.zeros(*places.shape)
    for b, *place in indexes(places.shape[:-1]):
        g = gradient[(b, slice(None), *place)]
        coordinates = read_place(places[(b, *place)], sizes, align_corners)
        axes = zip(coordinates, sizes, strict=True)
        inner = [bring_inside(x, size, padding, align_corners) for x, size in axes]
        if mode == "nearest":
            target = pixel(tally, of_images[b], nearest_point(inner)[0][0])
            target[:] = target + g
            continue
        along = [sides(x) for x in inner]
        rests = [dict(corners(along[:axis] + along[axis + 1 :])) for axis in range(len(sizes))]
        slopes = [tally.number(0) for _ in sizes]
        for position, weight in corners(along):
            target = pixel(tally, of_images[b], position)
            target[:] = target + g * weight
            value = pixel(tally, images[b], position)
            for axis, rest in enumerate(rests):
                parts = value * rest[position[:axis] + position[axis + 1 :]] * g
                upper = position[axis] == along[axis][1][0]
                slopes[axis] = (np.add if upper else np.subtract).reduce(parts, initial=slopes[axis])
        scales = [through(x, size, padding, align_corners) for x, size in zip(coordinates, sizes, strict=True)]
        of_places[(b, *place)] = [slope * scale for slope, scale in zip(slopes, scales, strict=True)][::-1]
    return of_images, of_places


def through(x: Number, size: int, padding: str, align_corners: bool) -> float:
    """Return how fast a place moves as its coordinate does: a scale, turned round by a mirror, 0 beyond the border."""
    scale = (size - 1) / 2 if align_corners else size / 2
    if padding == "zeros":
        return scale
    step = 1e-6
    shifted = [bring_inside(Tally().number(x.value + d), size, padding, align_corners).value for d in (-step, step)]
    return scale * round((shifted[1] - shifted[0]) / (2 * step))


def roi_align(tally, images, rois, pooled, scale, sampling, aligned):
    """Return [rois, channels, *pooled]: the means over `sampling` squared points in each bin (arXiv 1703.06870)."""
    sizes, result = images.shape[2:], np.empty((len(rois), images.shape[1], *pooled), dtype=object)
    for number, (image, *roi) in enumerate(rois):
        left, top, right, bottom = (x * scale - 0.5 if aligned else x * scale for x in roi)
        axes = []
        for low, high, bins in ((top, bottom, pooled[0]), (left, right, pooled[1])):
            span = high - low if aligned else (high - low).max(1)
            axes.append((low, span / bins))
        for place in indexes(pooled):
            parts = []
            for ks in itertools.product(*(range(p * sampling, (p + 1) * sampling) for p in place)):
                steps = zip(axes, ks, sizes, strict=True)
                at = [(low + step * ((k + 0.5) / sampling)).max(0).min(size - 1) for (low, step), k, size in steps]
                parts.append(weighted(tally, images[int(image.value)], linear_points(at)))
            result[(number, slice(None), *place)] = tally.sum(np.stack(parts), 0) / sampling**2
    return result
