"""The convolution programs: plain, transposed, backward and deformable, as loops over counting numbers."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.oracle.number import Complex, Number, Tally
from tests.support.oracle.products import at, build, indexes, shape_of

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


def pad(tally: Tally, image: Any, padding: Places) -> Any:
    return widen(tally, image, padding, [size + 2 * more for size, more in zip(shape_of(image), padding, strict=True)])


def widen(tally: Tally, image: Any, padding: Places, sizes: Sequence[int]) -> Any:
    """Return one channel as the part of zeros, of some sizes, that begins at `padding`."""
    own = shape_of(image)
    first = at(image, (0,) * len(own))
    zero = Complex(tally.zero(), tally.zero()) if isinstance(first, Complex) else tally.zero()

    def pick(*index: int) -> Any:
        inner = [place - more for place, more in zip(index, padding, strict=True)]
        inside = all(0 <= place < size for place, size in zip(inner, own, strict=True))
        return at(image, inner) if inside else zero

    return build(sizes, pick)


def crop(image: Any, padding: Places, sizes: Places) -> Any:
    """Return the middle of one channel, of some sizes, that begins at `padding`."""
    return build(sizes, lambda *index: at(image, [place + more for place, more in zip(index, padding, strict=True)]))


def positions(image: Places, kernel: Places, window: Window) -> Places:
    return tuple(
        (size + 2 * padding - dilation * (length - 1) - 1) // stride + 1
        for size, length, padding, dilation, stride in zip(
            image, kernel, window.padding, window.dilation, window.stride, strict=True
        )
    )


def convolution(tally: Tally, images: Any, weight: Any, bias: Any, window: Window) -> Any:
    """Return [batch, out, *spatial]: every weight meets every position of the output, zeros of the padding included."""
    _, channels, *kernel = shape_of(weight)
    sizes = positions(shape_of(images)[2:], tuple(kernel), window)
    out_of_group = len(weight) // window.groups
    results = []
    for image in images:
        padded = [pad(tally, channel, window.padding) for channel in image]
        result = []
        for o, filters in enumerate(weight):
            first = o // out_of_group * channels

            def element(
                *position: int, filters: Any = filters, first: int = first, o: int = o, padded: Any = padded
            ) -> Any:
                total = tally.zero()
                for c in range(channels):
                    for k in indexes(kernel):
                        total = total.plus_product(at(padded[first + c], window.meet(position, k)), at(filters[c], k))
                return total if bias is None else total + bias[o]

            result.append(build(sizes, element))
        results.append(result)
    return results


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
    channels, out_of_group, *kernel = shape_of(weight)
    spatial = shape_of(images)[2:]
    full, sizes = transposed_sizes(spatial, tuple(kernel), window)
    in_of_group = channels // window.groups
    results = []
    for image in images:
        written = [dict.fromkeys(indexes(full), tally.zero()) for _ in range(out_of_group * window.groups)]
        for c, o, p, k in itertools.product(range(channels), range(out_of_group), indexes(spatial), indexes(kernel)):
            target = written[c // in_of_group * out_of_group + o]
            place = window.meet(p, k)
            target[place] = target[place].plus_product(at(image[c], p), at(weight[c][o], k))
        results.append(
            [
                build(sizes, lambda *index, channel=channel, o=o: _finish(channel, index, window, bias, o))
                for o, channel in enumerate(written)
            ]
        )
    return results


def _finish(channel: dict[Places, Any], index: Places, window: Window, bias: Any, o: int) -> Any:
    number = channel[tuple(place + more for place, more in zip(index, window.padding, strict=True))]
    return number if bias is None else number + bias[o]


def convolution_backward(
    tally: Tally, grad: Any, images: Any, weight: Any, window: Window, transposed: bool, mask: Sequence[bool]
) -> tuple[Any, Any, Any]:
    """Return the gradients of a convolution's input, weight and bias, where `mask` asks for them.

    Each pair of the forward run is met again, once for the input and once for the weight; the bias's gradient is a sum.
    """
    spatial, kernel = shape_of(images)[2:], shape_of(weight)[2:]
    batch, first, second = len(images), len(weight), len(weight[0])
    if transposed:
        # What the transposed convolution wrote beyond its output has no gradient.
        full, sizes = transposed_sizes(spatial, kernel, window)
        grad = [[widen(tally, channel, window.padding, full) for channel in sample] for sample in grad]
        met, still = grad, images
        steps = spatial
    else:
        met = [[pad(tally, channel, window.padding) for channel in sample] for sample in images]
        still, steps = grad, shape_of(grad)[2:]
    wanted_images = [
        [{p: tally.zero() for p in indexes(shape_of(c))} for c in sample] for sample in (images if transposed else met)
    ]
    wanted_weight = {place: tally.zero() for place in indexes(shape_of(weight))}
    # `still` are the channels that the kernel's first dimension names, `met` the second's, one group at a time.
    per_group = first // window.groups
    for b, f, s, p, k in itertools.product(range(batch), range(first), range(second), indexes(steps), indexes(kernel)):
        channel = f // per_group * second + s
        place = window.meet(p, k)
        one, other = at(still[b][f], p), at(met[b][channel], place)
        if mask[0] and transposed:
            wanted_images[b][f][p] = wanted_images[b][f][p].plus_product(other, at(weight[f][s], k))
        elif mask[0]:
            target = wanted_images[b][channel]
            target[place] = target[place].plus_product(one, at(weight[f][s], k))
        if mask[1]:
            wanted_weight[(f, s, *k)] = wanted_weight[(f, s, *k)].plus_product(one, other)
    edge = (0,) * len(kernel) if transposed else window.padding

    def picked(b: int, c: int, *index: int) -> Any:
        return wanted_images[b][c][tuple(place + more for place, more in zip(index, edge, strict=True))]

    bias = None
    if mask[2]:
        outputs = range(second * window.groups if transposed else first)
        inner = [[crop(c, window.padding, sizes) for c in sample] for sample in grad] if transposed else grad
        bias = [tally.sum(at(sample[o], p) for sample in inner for p in indexes(shape_of(sample[o]))) for o in outputs]
    return (
        build(shape_of(images), picked) if mask[0] else None,
        build(shape_of(weight), lambda *index: wanted_weight[index]) if mask[1] else None,
        bias,
    )


def deformable_convolution(
    tally: Tally, images: Any, weight: Any, offsets: Any, masks: Any, bias: Any, window: Window, offset_groups: int
) -> Any:
    """Return a convolution over values that are interpolated where the offsets say, times the mask.

    For each position, kernel place and offset group: two coordinates, their whole parts, the distances from these and
    to the next, four weights; for each channel four multiplications and three additions; a multiplication by the mask.
    """
    _, channels, *kernel = shape_of(weight)
    sizes = positions(shape_of(images)[2:], tuple(kernel), window)
    out_of_group = len(weight) // window.groups
    results = []
    for b, image in enumerate(images):
        columns = {}
        per_offset = len(image) // offset_groups
        for g, p, (i, k) in itertools.product(range(offset_groups), indexes(sizes), enumerate(indexes(kernel))):
            start = window.meet(p, k)
            first = 2 * (g * math.prod(kernel) + i)
            y = at(offsets[b][first], p) + (start[0] - window.padding[0])
            x = at(offsets[b][first + 1], p) + (start[1] - window.padding[1])
            corners = _corners(y, x)
            for c in range(g * per_offset, (g + 1) * per_offset):
                value = _interpolate(tally, image[c], corners)
                if masks is not None:
                    value = value * at(masks[b][g * math.prod(kernel) + i], p)
                columns[c, p, k] = value
        result = []
        for o, filters in enumerate(weight):
            start_channel = o // out_of_group * channels

            def element(
                *position: int, filters: Any = filters, start: int = start_channel, o: int = o, columns: Any = columns
            ) -> Any:
                total = tally.zero()
                for c in range(channels):
                    for k in indexes(kernel):
                        total = total.plus_product(columns[start + c, position, k], at(filters[c], k))
                return total if bias is None else total + bias[o]

            result.append(build(sizes, element))
        results.append(result)
    return results


def _corners(y: Number, x: Number) -> list[tuple[int, int, Number]]:
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


def _interpolate(tally: Tally, channel: Any, corners: list[tuple[int, int, Number]]) -> Number:
    height, width = shape_of(channel)
    parts = [
        weight * (channel[row][column] if 0 <= row < height and 0 <= column < width else tally.zero())
        for row, column, weight in corners
    ]
    return parts[0] + parts[1] + parts[2] + parts[3]


def deformable_convolution_backward(
    tally: Tally, grad: Any, images: Any, weight: Any, offsets: Any, masks: Any, window: Window, offset_groups: int
) -> tuple[Any, Any, Any, Any, Any]:
    """Return the gradients of a deformable convolution's input, weight, offsets, mask (or None) and bias.

    Two products, of the columns and of the weight, for which the values are interpolated again. Each column's gradient
    goes by the mask, which gets it times the value, to four corners, a multiplication and an addition each, and by the
    slope along either axis (two differences, two products, a sum, and one product and addition more) to the offsets.
    """
    _, channels, *kernel = shape_of(weight)
    sizes, volume = shape_of(grad)[2:], math.prod(kernel)
    out_of_group, per_offset = len(weight) // window.groups, len(images[0]) // offset_groups
    zeros = [{place: tally.zero() for place in indexes(shape_of(tensor))} for tensor in (images, weight, offsets)]
    of_images, of_weight, of_offsets = zeros
    of_masks = {} if masks is None else {place: tally.zero() for place in indexes(shape_of(masks))}
    for b, g, p, (i, k) in itertools.product(
        range(len(images)), range(offset_groups), indexes(sizes), enumerate(indexes(kernel))
    ):
        start, first = window.meet(p, k), 2 * (g * volume + i)
        y, x = (at(offsets[b][first + axis], p) + (start[axis] - window.padding[axis]) for axis in range(2))
        corners = _corners(y, x)
        # The distances to both sides are there already: the weights were made of them.
        below, right = (Number(number.value % 1, tally) for number in (y, x))
        above, before = (Number(1 - number.value, tally) for number in (below, right))
        for c in range(g * per_offset, (g + 1) * per_offset):
            group, own = divmod(c, channels)
            outputs = range(group * out_of_group, (group + 1) * out_of_group)
            slope = tally.dot([at(grad[b][o], p) for o in outputs], [at(weight[o][own], k) for o in outputs])
            value = column = _interpolate(tally, images[b][c], corners)
            if masks is not None:
                place = (b, g * volume + i, *p)
                column = value * at(masks, place)
                of_masks[place] = of_masks[place] + slope * value
                slope = slope * at(masks, place)
            for o in outputs:
                place = (o, own, *k)
                of_weight[place] = of_weight[place].plus_product(at(grad[b][o], p), column)
            near = []
            for row, across, share in corners:
                inside = (b, c, row, across) in of_images
                near.append(images[b][c][row][across] if inside else tally.zero())
                reached = of_images.get((b, c, row, across), tally.zero()) + slope * share
                if inside:
                    of_images[b, c, row, across] = reached
            along = (
                (near[2] - near[0]) * before + (near[3] - near[1]) * right,
                (near[1] - near[0]) * above + (near[3] - near[2]) * below,
            )
            for axis, change in enumerate(along):
                place = (b, first + axis, *p)
                of_offsets[place] = of_offsets[place] + change * slope
    bias = [tally.sum(at(sample[o], p) for sample in grad for p in indexes(sizes)) for o in range(len(weight))]
    pairs = ((images, of_images), (weight, of_weight), (offsets, of_offsets), (masks, of_masks))
    built = [
        None if tensor is None else build(shape_of(tensor), lambda *index, found=found: found[index])
        for tensor, found in pairs
    ]
    return (*built, bias)
