"""The resampling programs: grids of numbers read between their points, at places known before, or given by the data.

Where the places are known before, so are the weights: arithmetic on them is no operation. An output is a weighted sum
of k points: k multiplications and k − 1 additions.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from tests.support.oracle.number import Number, Tally
from tests.support.oracle.pointwise import select
from tests.support.oracle.pooling import Grid, Position, build, inside
from tests.support.oracle.products import at, indexes, shape_of

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


def resample(tally: Tally, grid: Grid, results: Sequence[int], taps: Callable[..., Taps], align_corners: bool) -> Grid:
    """Return a grid of another size; with one tap an output is a copy."""
    sizes = shape_of(grid)

    def read(place: Position) -> Number:
        total = None
        for position, weight in joint_taps(place, sizes, results, taps, align_corners):
            if weight is None:
                return at(grid, position)
            part = at(grid, position) * weight
            total = part if total is None else total + part
        return total

    return build(results, read)


def joint_taps(
    place: Position, sizes: Sequence[int], results: Sequence[int], taps: Callable[..., Taps], align_corners: bool
) -> list[tuple[Position, float | None]]:
    """Return the points that an output reads with their weights, the products of those along the dimensions."""
    along = [taps(p, size, result, align_corners) for p, size, result in zip(place, sizes, results, strict=True)]
    if all(len(each) == 1 for each in along):
        return [(tuple(each[0][0] for each in along), None)]
    return [
        (tuple(index for index, _ in each), math.prod(weight for _, weight in each))
        for each in itertools.product(*along)
    ]


def resample_backward(
    tally: Tally, gradient: Grid, sizes: Sequence[int], taps: Callable[..., Taps], align_corners: bool
) -> Grid:
    """Return zeros to which each gradient was added, times its weight, at the points that its output read."""
    result = {position: tally.zero() for position in indexes(sizes)}
    results = shape_of(gradient)
    for place in indexes(results):
        g = at(gradient, place)
        for position, weight in joint_taps(place, sizes, results, taps, align_corners):
            result[position] = result[position] + (g if weight is None else g * weight)
    return build(sizes, lambda place: result[place])


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


def sample(tally: Tally, image: Grid, places: Grid, mode: str, padding: str, align_corners: bool) -> Grid:
    """Return C x space lists read at places, whose last dimension holds x, y (and z) between −1 and 1."""
    sizes = shape_of(image[0])
    results = shape_of(places)[:-1]
    read = {}
    for place in indexes(results):
        pairs = zip(reversed(at(places, place)), sizes, strict=True)
        coordinates = [unnormalise(x, size, align_corners) for x, size in pairs]
        if mode == "bicubic":
            rows, columns = (
                cubic_points(x, size, padding, align_corners) for x, size in zip(coordinates, sizes, strict=True)
            )
            read[place] = [cubic(tally, channel, rows, columns) for channel in image]
            continue
        inner = [bring_inside(x, size, padding, align_corners) for x, size in zip(coordinates, sizes, strict=True)]
        points = nearest_point(inner) if mode == "nearest" else linear_points(inner)
        read[place] = [weighted(tally, channel, points, sizes) for channel in image]
    return [build(results, lambda place, c=c: read[place][c]) for c in range(len(image))]


def cubic_points(x: Number, size: int, padding: str, align_corners: bool) -> list[tuple[int | None, Number]]:
    """Return the four points around a place along a dimension, None where they are 0, with their weights.

    The padding mode moves points, which are whole numbers: that is no operation.
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


def cubic(tally: Tally, channel: Grid, rows: Any, columns: Any) -> Number:
    """Return the weighted sum over rows of weighted sums over columns."""
    lines = []
    for row, _ in rows:
        values = [channel[row][c] if row is not None and c is not None else tally.zero() for c, _ in columns]
        lines.append(blend(values, [weight for _, weight in columns]))
    return blend(lines, [weight for _, weight in rows])


def blend(values: Sequence[Number], weights: Sequence[Number]) -> Number:
    """Return a weighted sum: k multiplications, k − 1 additions."""
    total = values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = total + value * weight
    return total


Points = list[tuple[Position, Number | None]]


def weighted(tally: Tally, channel: Grid, points: Points, sizes: Sequence[int]) -> Number:
    """Return the weighted sum over points, those outside being 0; a single point is copied."""
    total = None
    for position, weight in points:
        value = at(channel, position) if inside(position, sizes) else tally.zero()
        if weight is None:
            return value
        total = value * weight if total is None else total + value * weight
    assert total is not None
    return total


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
    return [(tuple(index for index, _ in each), product_of(each)) for each in itertools.product(*along)]


def sample_backward(
    tally: Tally, gradient: Grid, image: Grid, places: Grid, mode: str, padding: str, align_corners: bool
) -> tuple[Grid, Grid]:
    """Return the gradients of C x space lists and of the places at which they were read, nearest or bilinear.

    A corner adds to its pixel the gradient times its weight, and to the place, for each dimension, the gradient times
    its pixel times what its weight has from the other dimensions; at last that goes through the coordinate's scale.
    """
    sizes, results = shape_of(image[0]), shape_of(places)[:-1]
    of_image = [{position: tally.zero() for position in indexes(sizes)} for _ in image]
    of_places = {}
    for place in indexes(results):
        given = list(zip(reversed(at(places, place)), sizes, strict=True))
        coordinates = [unnormalise(x, size, align_corners) for x, size in given]
        inner = [bring_inside(x, size, padding, align_corners) for x, size in zip(coordinates, sizes, strict=True)]
        slopes = [tally.zero() for _ in sizes]
        if mode == "nearest":
            position = nearest_point(inner)[0][0]
            for sums, grid in zip(of_image, gradient, strict=True):
                sums[position] = sums.get(position, tally.zero()) + at(grid, place)
        else:
            along = [sides(x) for x in inner]
            pieces = corners(along)
            rests = [dict(corners(along[:axis] + along[axis + 1 :])) for axis in range(len(sizes))]
            for sums, grid, channel in zip(of_image, gradient, image, strict=True):
                g = at(grid, place)
                for position, weight in pieces:
                    sums[position] = sums.get(position, tally.zero()) + g * weight
                    value = at(channel, position) if inside(position, sizes) else tally.zero()
                    for axis, rest in enumerate(rests):
                        part = value * rest[position[:axis] + position[axis + 1 :]] * g
                        upper = position[axis] == along[axis][1][0]
                        slopes[axis] = slopes[axis] + part if upper else slopes[axis] - part
            slopes = [
                slope * through(x, size, padding, align_corners)
                for slope, x, size in zip(slopes, coordinates, sizes, strict=True)
            ]
        of_places[place] = slopes[::-1]
    return (
        [build(sizes, lambda place, sums=sums: sums[place]) for sums in of_image],
        build(results, lambda place: of_places[place]),
    )


def through(x: Number, size: int, padding: str, align_corners: bool) -> float:
    """Return how fast a place moves as its coordinate does: a scale, turned round by a mirror, 0 beyond the border."""
    scale = (size - 1) / 2 if align_corners else size / 2
    if padding == "zeros":
        return scale
    step = 1e-6
    shifted = [bring_inside(Tally().number(x.value + d), size, padding, align_corners).value for d in (-step, step)]
    return scale * round((shifted[1] - shifted[0]) / (2 * step))


def product_of(taps: Sequence[tuple[int, Number]]) -> Number:
    """Return the product of the weights along the dimensions."""
    product = taps[0][1]
    for _, weight in taps[1:]:
        product = product * weight
    return product


def roi_align(
    tally: Tally,
    image: Grid,
    roi: Sequence[Number],
    pooled: tuple[int, int],
    scale: float,
    sampling: int,
    aligned: bool,
) -> Grid:
    """Return C x pooled lists: the means over `sampling` squared points in each bin of a region (arXiv 1703.06870)."""
    sizes = shape_of(image[0])
    left, top, right, bottom = (x * scale - 0.5 if aligned else x * scale for x in roi)
    axes = []
    for low, high, bins in ((top, bottom, pooled[0]), (left, right, pooled[1])):
        span = high - low if aligned else (high - low).max(1)
        axes.append((low, span / bins))

    def coordinate(axis: int, k: int) -> Number:
        low, step = axes[axis]
        return (low + step * ((k + 0.5) / sampling)).max(0).min(sizes[axis] - 1)

    def bin_points(place: Position) -> list[Points]:
        each = itertools.product(*(range(p * sampling, (p + 1) * sampling) for p in place))
        return [linear_points([coordinate(axis, k) for axis, k in enumerate(ks)]) for ks in each]

    read = {place: bin_points(place) for place in indexes(pooled)}

    def mean(channel: Grid, place: Position) -> Number:
        return tally.sum(weighted(tally, channel, points, sizes) for points in read[place]) / sampling**2

    return [build(pooled, lambda place, channel=channel: mean(channel, place)) for channel in image]
