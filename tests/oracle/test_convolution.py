"""The oracle of convolutions: plain, transposed, backward and deformable, against programs that count their ops."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.oracle import convolution
from tests.support.oracle.claim import check_counts, check_product, check_results, sources
from tests.support.oracle.convolution import Window
from tests.support.oracle.deformable import deform
from tests.support.oracle.number import Tally
from tests.support.random_cases import random_cases

aten = torch.ops.aten

cases = random_cases(8)
small = st.integers(1, 2)
FORWARD = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def draw_window(data, rank, *, transposed=False):
    """Return how a kernel moves, its lengths, and the sizes of an image that it fits on."""
    each = [data.draw(st.tuples(small, st.integers(0, 1), small, st.integers(0, 1))) for _ in range(rank)]
    lengths = tuple(data.draw(st.integers(1, 3 if rank < 3 else 2)) for _ in range(rank))
    stride, padding, dilation, more = zip(*each, strict=True)
    more = tuple(min(extra, max(s, d) - 1) for extra, s, d in zip(more, stride, dilation, strict=True))
    sizes = tuple(data.draw(st.integers(1, 5 if rank < 3 else 3)) for _ in range(rank))
    window = Window(stride, padding, dilation, data.draw(small), more if transposed else (0,) * rank)
    if transposed:
        output = convolution.transposed_sizes(sizes, lengths, window)[1]
    else:
        output = convolution.positions(sizes, lengths, window)
    assume(min(output) > 0)
    return window, lengths, sizes, output


def draw_tensors(data, source, *, transposed=False, rank):
    window, lengths, sizes, output = draw_window(data, rank, transposed=transposed)
    batch, inner, outer = data.draw(small), data.draw(small), data.draw(small)
    image = source(batch, inner * window.groups, *sizes)
    first, second = (inner, outer) if transposed else (outer, inner)
    weight = source(first * window.groups, second, *lengths)
    return window, image, weight, source(batch, outer * window.groups, *output)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@cases
@given(sources, st.data())
def test_convolution(rank, transposed, source, data):
    window, image, weight, grad = draw_tensors(data, source, transposed=transposed, rank=rank)
    bias = [source(grad.shape[1])] if data.draw(st.booleans()) else []
    ours = convolution.transposed_convolution if transposed else convolution.convolution
    options = {name: getattr(window, name) for name in ("stride", "padding", "dilation", "groups")}
    options |= {"output_padding": window.output_padding} if transposed else {}
    check_product(
        lambda tally, x, w, *b: ours(tally, x, w, b[0] if b else None, window),
        lambda x, w, *b: (TRANSPOSED if transposed else FORWARD)[rank](x, w, *b, **options),
        image,
        weight,
        *bias,
    )


masks = st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
@cases
@given(sources, masks, st.data())
def test_convolution_backward(rank, transposed, source, mask, data):
    window, image, weight, grad = draw_tensors(data, source, transposed=transposed, rank=rank)

    def differentiate(grad, x, w):
        return aten.convolution_backward(
            grad,
            x,
            w,
            [grad.shape[1]],
            window.stride,
            window.padding,
            window.dilation,
            transposed,
            window.output_padding,
            window.groups,
            list(mask),
        )

    def expect(grad, x, w):
        gradients = differentiate(grad, x, w)
        return [gradient if wanted else None for gradient, wanted in zip(gradients, mask, strict=True)]

    check_product(
        lambda tally, *tensors: convolution.convolution_backward(tally, *tensors, window, transposed, mask),
        differentiate,
        grad,
        image,
        weight,
        expected=expect,
    )


@cases
@given(sources, st.booleans(), st.data())
def test_complex_convolution(source, biased, data):
    """One op on complex numbers, as a backend that has such a kernel runs it: four real multiply-adds for each."""
    window, lengths, sizes, _ = draw_window(data, 1)
    inner, outer = data.draw(small), data.draw(small)
    tensors = [
        source(1, inner * window.groups, *sizes, dtype=torch.complex128),
        source(outer * window.groups, inner, *lengths, dtype=torch.complex128),
        *([source(outer * window.groups, dtype=torch.complex128)] if biased else []),
    ]

    def convolve(x, w, b=None):
        return aten.convolution(x, w, b, window.stride, window.padding, window.dilation, False, [0], window.groups)

    def expect(x, w, b=None):
        return F.conv1d(x, w, b, window.stride, window.padding, window.dilation, window.groups)

    check_product(
        lambda tally, x, w, b=None: convolution.convolution(tally, x, w, b, window), convolve, *tensors, expected=expect
    )


@cases
@given(sources, st.integers(3, 5), small, small, small, st.integers(1, 3), st.integers(0, 1))
def test_conv_tbc(source, steps, batch, inner, outer, length, padding):
    """A convolution over time whose dimensions are [time, batch, channels], kernels [length, in, out]."""
    window = Window((1,), (padding,), (1,), 1)

    check_product(
        lambda tally, x, w, b: convolution.convolution(tally, x.transpose(1, 2, 0), w.T, b, window).transpose(2, 0, 1),
        lambda x, w, b: torch.conv_tbc(x, w, b, padding),
        source(steps, batch, inner),
        source(length, inner, outer),
        source(outer),
    )


@cases
@given(sources, st.booleans(), st.data())
def test_deformable_convolution(source, masked, data):
    window, lengths, sizes, output = draw_window(data, 2)
    inner, outer, batch, groups = (data.draw(small) for _ in range(4))
    channels = inner * window.groups * groups
    image = source(batch, channels, *sizes)
    weight = source(outer * window.groups, channels // window.groups, *lengths)
    offset = source(batch, 2 * groups * math.prod(lengths), *output)
    mask = source(batch, groups * math.prod(lengths), *output) if masked else source(batch, 0)
    bias = source(outer * window.groups)

    def convolve(image, weight, offset, mask, bias):
        moves = (*window.stride, *window.padding, *window.dilation)
        return torch.ops.torchvision.deform_conv2d(
            image, weight, offset, mask, bias, *moves, window.groups, groups, masked
        )

    # torchvision's kernels may not be there: the same result from grid_sample, and the call by its shapes.
    tensors = (image, weight, offset, mask, bias)
    tally = Tally()
    numbers = [tally.numbers(tensor) for tensor in tensors]
    mine = convolution.deformable_convolution(
        tally, *numbers[:3], numbers[3] if masked else None, numbers[4], window, groups
    )
    check_results(mine, deform(*tensors, window, groups, masked))
    check_counts(tally, convolve, *tensors)
