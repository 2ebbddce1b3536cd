"""The convolution programs: plain, transposed, backward and deformable, as loops over counting numbers."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.support.oracle.number import Complex, Number, Tally, indexes

Places = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """How a kernel moves: one number for each spatial dimension, and the groups of channels."""

    stride: Places
    padding: Places
    dilation: Places
    groups: int
    output_padding: Places = ()

    def meet(self, position: Places, offset: Places) -> Places:
        """Return where an offset of the kernel lies on the padded image when the kernel stands at a position."""
        return tuple(
            p * stride + k * dilation
            for p, k, stride, dilation in zip(position, offset, self.stride, self.dilation, strict=True)
        )


def widen(tally: Tally, images: Any, padding: Places, sizes: Sequence[int]) -> Any:
    """Return images as the part of zeros, of some sizes, that begins at `padding`."""
    zero, lead = tally.number(0), images.shape[: -len(sizes)]
    zero = Complex(zero, zero) if isinstance(images.flat[0], Complex) else zero
    wide = np.full((*lead, *sizes), zero, dtype=object)
    crop(wide, padding, images.shape[len(lead) :])[...] = images
    return wide


def pad(tally: Tally, images: Any, padding: Places) -> Any:
    sizes = [size + 2 * more for size, more in zip(images.shape[-len(padding) :], padding, strict=True)]
    return widen(tally, images, padding, sizes)


def crop(images: Any, padding: Sequence[int], sizes: Sequence[int]) -> Any:
    """Return the middle, of some sizes, that begins at `padding`."""
    return images[(..., *(slice(more, more + size) for more, size in zip(padding, sizes, strict=True)))]


def positions(image: Places, kernel: Places, window: Window) -> Places:
    return tuple(
        (size + 2 * padding - dilation * (length - 1) - 1) // stride + 1
        for size, length, padding, dilation, stride in zip(
            image, kernel, window.padding, window.dilation, window.stride, strict=True
        )
    )


def windows(images: Any, kernel: Places, steps: Places, window: Window) -> Any:
    """Return what a kernel meets on padded images: [batch, groups, channels of one, steps, places of the kernel]."""
    grouped = images.reshape(len(images), window.groups, -1, *images.shape[2:])
    met = [[grouped[(..., *window.meet(p, k))] for k in indexes(kernel)] for p in indexes(steps)]
    return np.moveaxis(np.array(met, dtype=object), (0, 1), (3, 4))


def multiply(tally: Tally, met: Any, weight: Any) -> Any:
    """Return [batch, out, steps]: every weight times what its kernel meets, summed over channels and places."""
    batch, groups, _, steps, _ = met.shape
    rows = np.moveaxis(met, 2, 3).reshape(batch, groups, 1, steps, -1)
    return tally.dot(rows, weight.reshape(groups, -1, 1, rows.shape[-1])).reshape(batch, -1, steps)


def weight_gradient(tally: Tally, still: Any, met: Any) -> Any:
    """Return the gradient of a weight, from what its first channels hold at each step, and what the kernel met."""
    batch, groups, channels, steps, places = met.shape
    own = np.moveaxis(still.reshape(batch, groups, -1, 1, 1, steps), 0, -2)
    seen = met.transpose(1, 2, 4, 0, 3).reshape(groups, 1, channels, places, -1)
    return tally.dot(own.reshape(*own.shape[:4], -1), seen)


def write(tally: Tally, images: Any, weight: Any, sizes: Sequence[int], window: Window) -> Any:
    """Return [batch, out, *sizes]: what every weight makes of every position of images, added up where it comes to."""
    grouped = images.reshape(len(images), window.groups, 1, -1, *images.shape[2:])
    filters = np.swapaxes(weight.reshape(window.groups, -1, *weight.shape[1:]), 1, 2)
    written = np.full((len(images), *filters.shape[:2], *sizes), tally.number(0), dtype=object)
    for p, k in itertools.product(indexes(images.shape[2:]), indexes(weight.shape[2:])):
        place = (..., *window.meet(p, k))
        written[place] = tally.dot(grouped[(..., *p)], filters[(..., *k)], written[place])
    return written.reshape(len(images), -1, *sizes)


def add_bias(result: Any, bias: Any) -> Any:
    return result if bias is None else result + bias.reshape(-1, *[1] * (result.ndim - 2))


def convolution(tally: Tally, images: Any, weight: Any, bias: Any, window: Window) -> Any:
    """Return [batch, out, *spatial]: every weight meets every position of the output, zeros of the padding included."""
    steps = positions(images.shape[2:], weight.shape[2:], window)
    met = windows(pad(tally, images, window.padding), weight.shape[2:], steps, window)
    return add_bias(multiply(tally, met, weight).reshape(len(images), -1, *steps), bias)


def transposed_sizes(image: Places, kernel: Places, window: Window) -> tuple[Places, Places]:
    """Return the sizes of what a transposed convolution writes before it is cropped, and of its output."""
    full, output = [], []
    for axis, (size, length) in enumerate(zip(image, kernel, strict=True)):
        reach = (size - 1) * window.stride[axis] + window.dilation[axis] * (length - 1) + 1
        full.append(reach + window.output_padding[axis])
        output.append(reach + window.output_padding[axis] - 2 * window.padding[axis])
    return tuple(full), tuple(output)


def transposed_convolution(tally: Tally, images: Any, weight: Any, bias: Any, window: Window) -> Any:
    """Return [batch, out, *spatial]: every weight meets every position of the input, what is cropped included."""
    full, sizes = transposed_sizes(images.shape[2:], weight.shape[2:], window)
    return add_bias(crop(write(tally, images, weight, full, window), window.padding, sizes), bias)


def convolution_backward(tally, grad, images, weight, window, transposed, mask):
    """Return the gradients of a convolution's input, weight and bias, where `mask` asks for them.

    Each pair of the forward run is met again, once for the input and once for the weight; the bias's gradient is a sum.
    """
    spatial, kernel, of_images, of_weight = images.shape[2:], weight.shape[2:], None, None
    if transposed:
        # What the transposed convolution wrote beyond its output has no gradient.
        wide = widen(tally, grad, window.padding, transposed_sizes(spatial, kernel, window)[0])
        met, still = windows(wide, kernel, spatial, window), images
        if mask[0]:
            of_images = multiply(tally, met, weight).reshape(images.shape)
    else:
        wide = pad(tally, images, window.padding)
        met, still = windows(wide, kernel, grad.shape[2:], window), grad
        if mask[0]:
            of_images = crop(write(tally, grad, weight, wide.shape[2:], window), window.padding, spatial)
    if mask[1]:
        of_weight = weight_gradient(tally, still, met).reshape(weight.shape)
    return of_images, of_weight, tally.sum(grad, (0, *range(2, grad.ndim))) if mask[2] else None


Corner = tuple[int, int, Number]


def sampled(offsets: Any, sizes: Places, kernel: Places, window: Window, offset_groups: int) -> Iterator[Any]:
    """Yield (sample, offset group, number of the output position, place of the kernel), and the coordinates."""
    ranges = range(len(offsets)), range(offset_groups), enumerate(indexes(sizes)), enumerate(indexes(kernel))
    for b, g, (n, p), (i, k) in itertools.product(*ranges):
        first = 2 * (g * math.prod(kernel) + i)
        starts = zip(window.meet(p, k), window.padding, strict=True)
        yield (b, g, n, i), [offsets[(b, first + axis, *p)] + (at - more) for axis, (at, more) in enumerate(starts)]


def deformable_convolution(tally, images, weight, offsets, masks, bias, window, offset_groups):
    """Return a convolution over values that are interpolated where the offsets say, times the mask.

    For each position, kernel place and offset group: two coordinates, their whole parts, the distances from these and
    to the next, four weights; for each channel four multiplications and three additions; a multiplication by the mask.
    """
    sizes, kernel = offsets.shape[2:], weight.shape[2:]
    grouped = images.reshape(len(images), offset_groups, -1, *images.shape[2:])
    columns = np.empty((*grouped.shape[:3], math.prod(sizes), math.prod(kernel)), dtype=object)
    factors = None if masks is None else masks.reshape(len(images), offset_groups, math.prod(kernel), -1)
    for (b, g, n, i), coordinates in sampled(offsets, sizes, kernel, window, offset_groups):
        value = _interpolate(tally, grouped[b, g], _corners(*coordinates))
        columns[b, g, :, n, i] = value if factors is None else value * factors[b, g, i, n]
    met = columns.reshape(len(images), window.groups, -1, *columns.shape[3:])
    return add_bias(multiply(tally, met, weight).reshape(len(images), -1, *sizes), bias)


def _corners(y: Number, x: Number) -> list[Corner]:
    top, left = (number.call("floor", math.floor) for number in (y, x))
    below, right = y - top, x - left
    above, before = 1 - below, 1 - right
    row, column = int(top.value), int(left.value)
    return [
        (row, column, above * before),
        (row, column + 1, above * right),
        (row + 1, column, below * before),
        (row + 1, column + 1, below * right),
    ]


def _pixel(tally: Tally, channels: Any, row: int, column: int) -> Any:
    inside = 0 <= row < channels.shape[1] and 0 <= column < channels.shape[2]
    return channels[:, row, column] if inside else tally.zeros(len(channels))


def _interpolate(tally: Tally, channels: Any, corners: list[Corner]) -> Any:
    parts = [weight * _pixel(tally, channels, row, column) for row, column, weight in corners]
    return parts[0] + parts[1] + parts[2] + parts[3]


def deformable_convolution_backward(tally, grad, images, weight, offsets, masks, window, offset_groups):
    """Return the gradients of a deformable convolution's input, weight, offsets, mask (or None) and bias.

    Two products, of the columns and of the weight, for which the values are interpolated again. Each column's gradient
    goes by the mask, which gets it times the value, to four corners, a multiplication and an addition each, and by the
    slope along either axis (two differences, two products, a sum, and one product and addition more) to the offsets.
    """
    batch, groups, sizes, kernel = len(images), window.groups, grad.shape[2:], weight.shape[2:]
    volume = math.prod(kernel)
    grouped = images.reshape(batch, offset_groups, -1, *images.shape[2:])
    slopes = tally.dot(
        np.moveaxis(grad.reshape(batch, groups, -1, 1, math.prod(sizes), 1), 2, -1),
        np.moveaxis(weight.reshape(groups, -1, weight.shape[1], 1, volume), 1, -1),
    ).reshape(*grouped.shape[:3], -1, volume)
    columns, of_images = np.empty(slopes.shape, dtype=object), tally.zeros(*grouped.shape)
    of_offsets = np.empty((batch, offset_groups, volume, 2, math.prod(sizes)), dtype=object)
    factors = None if masks is None else masks.reshape(batch, offset_groups, volume, -1)
    of_masks = None if masks is None else np.empty(factors.shape, dtype=object)
    for (b, g, n, i), (y, x) in sampled(offsets, sizes, kernel, window, offset_groups):
        corners, slope = _corners(y, x), slopes[b, g, :, n, i]
        value = columns[b, g, :, n, i] = _interpolate(tally, grouped[b, g], corners)
        if masks is not None:
            columns[b, g, :, n, i] = value * factors[b, g, i, n]
            of_masks[b, g, i, n] = tally.sum(slope * value)
            slope = slope * factors[b, g, i, n]
        for row, across, share in corners:
            reached = _pixel(tally, of_images[b, g], row, across)
            reached[:] = reached + slope * share
        # The distances to both sides are there already: the weights were made of them.
        below, right = (tally.number(number.value % 1) for number in (y, x))
        above, before = (tally.number(1 - number.value) for number in (below, right))
        near = [_pixel(tally, grouped[b, g], row, across) for row, across, _ in corners]
        along = (
            (near[2] - near[0]) * before + (near[3] - near[1]) * right,
            (near[1] - near[0]) * above + (near[3] - near[2]) * below,
        )
        of_offsets[b, g, i, :, n] = [tally.sum(change * slope) for change in along]
    of_weight = weight_gradient(tally, grad, columns.reshape(batch, groups, -1, *columns.shape[3:]))
    of_bias = tally.sum(grad, (0, 2, 3))
    return of_images, of_weight, of_offsets, of_masks, of_bias
