"""The table `exact` against programs: norms, pooling and resampling, forward and backward, on random shapes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.oracle import norms, pooling, reductions, resampling
from tests.support.oracle.claim import check_claim, drawn
from tests.support.random_cases import random_cases

F = torch.nn.functional
aten = torch.ops.aten

cases = random_cases(20)

seeds = st.integers(0, 10**6)
few = st.integers(1, 3)
EPS = 0.1


def given_or_none(tensors, flags):
    """Return the tensors whose flags are set, and a function that puts None in place of the others."""
    chosen = [tensor for tensor, flag in zip(tensors, flags, strict=True) if flag]

    def fill(items):
        rest = list(items)
        return [rest.pop(0) if flag else None for flag in flags]

    return chosen, fill


affine = st.sampled_from(((True, True), (True, False), (False, False)))


@cases
@given(few, st.integers(1, 6), seeds, affine)
def test_layer_norm(m, n, seed, flags):
    x = drawn(seed, m, n)
    chosen, fill = given_or_none((drawn(seed + 1, n), drawn(seed + 2, n)), flags)

    def program(tally, grid, *scales):
        return norms.scale_and_shift(norms.normalise(tally, grid, EPS), *fill(scales))

    check_claim(program, lambda a, *s: F.layer_norm(a, (n,), *fill(s), eps=EPS), x, *chosen)

    def rms(tally, grid, *scales):
        return norms.rms_norm(tally, grid, *fill(scales), EPS)

    chosen, fill = given_or_none((drawn(seed + 1, n),), flags[:1])
    check_claim(rms, lambda a, *s: F.rms_norm(a, (n,), *fill(s), eps=EPS), x, *chosen)


@cases
@given(few, few, few, st.integers(2, 3), seeds, affine)
def test_group_norm(n, groups, per_group, l, seed, flags):
    c = groups * per_group
    x = drawn(seed, n, c, l)
    chosen, fill = given_or_none((drawn(seed + 1, c), drawn(seed + 2, c)), flags)

    def program(tally, batch, *scales):
        normal = norms.normalise(tally, batch.reshape(n, groups, -1), EPS).reshape(n, c, l)
        return norms.scale_and_shift(normal, *(None if s is None else s[:, None] for s in fill(scales)))

    check_claim(program, lambda a, *s: F.group_norm(a, groups, *fill(s), eps=EPS), x, *chosen)


@cases
@given(few, few, st.integers(2, 3), seeds, affine)
def test_instance_norm(n, c, l, seed, flags):
    x = drawn(seed, n, c, l)
    chosen, fill = given_or_none((drawn(seed + 1, c), drawn(seed + 2, c)), flags)

    def program(tally, batch, *scales):
        return norms.standardise_channels(tally, batch, *fill(scales), EPS)[0]

    check_claim(program, lambda a, *s: F.instance_norm(a, None, None, *fill(s), eps=EPS), x, *chosen)


def channels_of(batch):
    """Return the numbers of each channel over the batch."""
    return np.swapaxes(batch, 0, 1).reshape(batch.shape[1], -1)


def batch_of(channels, n):
    return np.swapaxes(channels.reshape(len(channels), n, -1), 0, 1)


@cases
@given(few, few, few, seeds, affine, st.booleans())
def test_batch_norm(n, c, l, seed, flags, running):
    n += 1
    x, mean, variance = drawn(seed, n, c, l), drawn(seed + 1, c), drawn(seed + 2, c, low=0.5)
    chosen, fill = given_or_none((drawn(seed + 3, c), drawn(seed + 4, c)), flags)

    def evaluated(tally, batch, mean, variance, *scales):
        return norms.batch_norm_eval(batch, mean, variance, *fill(scales), EPS)

    check_claim(evaluated, lambda a, m, v, *s: F.batch_norm(a, m, v, *fill(s), eps=EPS), x, mean, variance, *chosen)

    def trained(tally, batch, mean, variance, *scales):
        rows, latest, spread = norms.standardise_channels(tally, channels_of(batch), *fill(scales), EPS)
        if not running:
            return (batch_of(rows, n),)
        unbiased = spread * (n * l / (n * l - 1))
        return batch_of(rows, n), norms.follow(mean, 0.3, latest), norms.follow(variance, 0.3, unbiased)

    def train(a, m, v, *s):
        if not running:
            return (F.batch_norm(a, None, None, *fill(s), training=True, eps=EPS),)
        return F.batch_norm(a, m, v, *fill(s), training=True, momentum=0.3, eps=EPS), m, v

    check_claim(trained, train, x, mean, variance, *chosen)


masks = st.sampled_from(((True, True, True), (True, False, False), (False, True, True), (False, False, True)))


def wanted(function, mask):
    """Return the function that leaves out the results that a mask does not ask for."""
    return lambda *tensors: [result for result, flag in zip(function(*tensors), mask, strict=True) if flag]


def statistics_of(groups):
    return groups.mean(1), (groups.var(1, correction=0) + EPS).rsqrt()


@cases
@given(few, st.integers(1, 6), seeds, st.booleans(), masks)
def test_layer_norm_backward(m, n, seed, weighted, mask):
    mask = mask if weighted else (True, False, False)
    g, x = drawn(seed, m, n), drawn(seed + 1, m, n)
    mean, inverse = statistics_of(x)
    chosen, fill = given_or_none((drawn(seed + 2, n), drawn(seed + 3, n)), (weighted, weighted))

    def program(tally, g, x, mean, inverse, *scales):
        return norms.groups_backward(tally, g, x, mean, inverse, fill(scales)[0], np.arange(n), mask)

    def function(g, x, mean, inverse, *scales):
        return aten.native_layer_norm_backward(g, x, (n,), mean[:, None], inverse[:, None], *fill(scales), mask)

    check_claim(wanted(program, mask), wanted(function, mask), g, x, mean, inverse, *chosen)


@cases
@given(few, few, few, few, seeds, st.booleans(), masks)
def test_group_norm_backward(n, groups, per_group, l, seed, weighted, mask):
    c = groups * per_group
    mask = mask if weighted else (True, False, False)
    g, x = drawn(seed, n, c, l), drawn(seed + 1, n, c, l)
    mean, inverse = statistics_of(x.reshape(n * groups, -1))
    chosen, fill = given_or_none((drawn(seed + 2, c),), (weighted,))
    places = np.arange(c).repeat(l).reshape(groups, -1)

    def program(tally, g, x, mean, inverse, *scales):
        rows = (batch.reshape(n, groups, -1) for batch in (g, x))
        return norms.groups_backward(tally, *rows, mean, inverse, fill(scales)[0], places, mask)

    def function(g, x, mean, inverse, *scales):
        return aten.native_group_norm_backward(g, x, mean, inverse, *fill(scales), n, c, l, groups, mask)

    tensors = g, x, mean.reshape(n, groups), inverse.reshape(n, groups)
    check_claim(wanted(program, mask), wanted(function, mask), *tensors, *chosen)


@cases
@given(few, few, few, seeds, st.booleans(), st.booleans(), masks)
def test_batch_norm_backward(n, c, l, seed, training, weighted, mask):
    mask = mask if weighted else (True, False, False)
    n += 1
    g, x = drawn(seed, n, c, l), drawn(seed + 1, n, c, l)
    mean, inverse = statistics_of(x.transpose(0, 1).reshape(c, -1))
    variance = drawn(seed + 2, c, low=0.5)
    chosen, fill = given_or_none((drawn(seed + 3, c),), (weighted,))

    def program(tally, g, x, mean, variance, inverse, *scales):
        rows, (weight,) = map(channels_of, (g, x)), fill(scales)
        if training:
            own, *rest = norms.batch_norm_backward(tally, *rows, mean, inverse, weight, mask)
        else:
            own, *rest = norms.batch_norm_eval_backward(tally, *rows, mean, variance, weight, EPS, mask)
        return None if own is None else batch_of(own, n), *rest

    def function(g, x, mean, variance, inverse, *scales):
        # In training torch takes the saved statistics, in evaluation the running ones.
        return aten.native_batch_norm_backward(g, x, *fill(scales), mean, variance, mean, inverse, training, EPS, mask)

    check_claim(wanted(program, mask), wanted(function, mask), g, x, mean, variance, inverse, *chosen)


@pytest.mark.skipif(not hasattr(aten, "_fused_rms_norm_backward"), reason="this torch has no such op")
@cases
@given(few, st.integers(1, 6), seeds, st.booleans())
def test_rms_norm_backward(m, n, seed, weighted):
    g, x = drawn(seed, m, n), drawn(seed + 1, m, n)
    inverse = (x.square().mean(1) + EPS).rsqrt()
    chosen, fill = given_or_none((drawn(seed + 2, n),), (weighted,))
    mask = (True, weighted)

    def program(tally, g, x, inverse, *scales):
        return norms.rms_norm_backward(tally, g, x, inverse, *fill(scales))

    def function(g, x, inverse, *scales):
        return aten._fused_rms_norm_backward(g, x, (n,), inverse[:, None], *fill(scales), mask)

    def expect(g, x, inverse, *scales):
        """Return what autograd makes of rms_norm: its fused backward has no kernel for a CPU."""
        leaves = [tensor.requires_grad_() for tensor in (x, *scales)]
        return torch.autograd.grad(F.rms_norm(leaves[0], (n,), *leaves[1:], eps=EPS), leaves, g)

    check_claim(wanted(program, mask), wanted(function, mask), g, x, inverse, *chosen, expected=expect)


@cases
@given(few, st.integers(1, 5), few, seeds)
def test_unit_rows(n, c, l, seed):
    x, y = drawn(seed, n, c, l), drawn(seed + 1, n, c, l)

    def lengths(tally, grid):
        return np.swapaxes(reductions.unit_row(tally, np.swapaxes(grid, 1, 2), 1e-12), 1, 2)

    check_claim(lengths, F.normalize, x)

    def cosines(tally, *grids):
        return reductions.cosine(tally, *(np.swapaxes(grid, 1, 2) for grid in grids), 1e-8)

    check_claim(cosines, F.cosine_similarity, x, y)
    v, length = drawn(seed, n, c), drawn(seed + 1, n, 1, low=0.5)
    brought = lambda tally, v, g: norms.weight_norm(tally, v, g[:, 0])  # noqa: E731
    check_claim(brought, lambda v, g: torch._weight_norm(v, g, 0), v, length)


@cases
@given(few, st.integers(1, 5), few, st.integers(1, 4), seeds)
def test_local_response_norm(n, c, l, size, seed):
    x = drawn(seed, n, c, l)
    program = lambda tally, batch: norms.local_response_norm(tally, batch, size, 0.5, 0.75, 2.0)  # noqa: E731
    check_claim(program, lambda a: F.local_response_norm(a, size, 0.5, 0.75, 2.0), x)


@st.composite
def pools(draw, *, dilated=False):
    """Return N C and sizes, kernel, stride, padding, dilation and ceil_mode of one, two or three dimensions."""
    d = draw(st.integers(1, 3))
    each_ = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(d))  # noqa: E731
    kernel, stride = each_(1, 3), each_(1, 3)
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    dilation = each_(1, 2) if dilated else (1,) * d
    spans = [step * (k - 1) + 1 - 2 * pad for k, pad, step in zip(kernel, padding, dilation, strict=True)]
    # Between dilated places of a kernel an image of 1 would be missed.
    sizes = tuple(max(span, 1 + dilated) + draw(st.integers(0, 3)) for span in spans)
    lead = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    return lead, sizes, kernel, stride, padding, dilation, draw(st.booleans())


@cases
@given(pools(dilated=True), seeds)
def test_max_pool(case, seed):
    lead, sizes, *options = case
    d = len(sizes)
    x = drawn(seed, *lead, *sizes)
    function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[d - 1]
    check_claim(lambda tally, grid: pooling.max_pool(tally, grid, *options), lambda a: function(a, *options), x)
    if d == 1:
        return
    result, chosen = function(x, *options, return_indices=True)
    op = getattr(aten, f"max_pool{d}d_with_indices_backward")
    check_claim(
        lambda tally, g, a, chosen: pooling.max_pool_backward(tally, g, chosen, sizes),
        lambda g, a, chosen: op(g, a, *options, chosen),
        drawn(seed + 1, *result.shape),
        x,
        chosen,
    )


@cases
@given(pools(), seeds, st.booleans(), st.sampled_from((None, 3)))
def test_avg_pool(case, seed, include, override):
    lead, sizes, kernel, stride, padding, _, ceil = case
    d = len(sizes)
    sizes = tuple(map(max, sizes, kernel)) if d == 3 else sizes  # torch refuses a smaller one, whatever its padding
    x = drawn(seed, *lead, *sizes)
    options = (kernel, stride, padding, ceil, include, *((override,) if d > 1 else ()))
    function = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[d - 1]
    check_claim(lambda tally, grid: pooling.avg_pool(tally, grid, *options), lambda a: function(a, *options), x)
    if d == 1:
        return
    op = getattr(aten, f"avg_pool{d}d_backward")
    check_claim(
        lambda tally, g, a: pooling.avg_pool_backward(tally, g, sizes, *options),
        lambda g, a: op(g, a, *options),
        drawn(seed + 1, *function(x, *options).shape),
        x,
    )


@cases
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3), seeds)
def test_adaptive_pools(axes, seed):
    sizes, results = zip(*axes, strict=True)
    d = len(axes)
    x, g = drawn(seed, 2, 1, *sizes), drawn(seed + 1, 2, 1, *results)
    name = f"adaptive_%s_pool{d}d"
    for kind in ("avg", "max"):
        program = getattr(pooling, f"adaptive_{kind}_pool")
        function = getattr(F, name % kind)
        check_claim(lambda t, grid, p=program: p(t, grid, results), lambda a, f=function: f(a, results), x)
    if d == 1:
        return
    backward = lambda tally, g, a: pooling.adaptive_avg_pool_backward(tally, g, sizes)  # noqa: E731
    check_claim(backward, lambda g, a: getattr(aten, f"_adaptive_avg_pool{d}d_backward")(g, a), g, x)
    chosen = getattr(F, name % "max")(x, results, return_indices=True)[1]
    backward = lambda tally, g, a, chosen: pooling.max_pool_backward(tally, g, chosen, sizes)  # noqa: E731
    check_claim(backward, lambda g, a, chosen: getattr(aten, f"{name % 'max'}_backward")(g, a, chosen), g, x, chosen)


@cases
@given(pools(), seeds)
def test_lp_pool(case, seed):
    lead, sizes, kernel, stride, *_ = case
    if len(sizes) == 3 or any(k > size for k, size in zip(kernel, sizes, strict=True)):
        sizes, kernel, stride = (4, 3)[: min(len(sizes), 2)], (2, 2)[: min(len(sizes), 2)], (1, 2)[: min(len(sizes), 2)]
    x = drawn(seed, *lead, *sizes)
    function = (F.lp_pool1d, F.lp_pool2d)[len(sizes) - 1]
    size, step = (kernel, stride) if len(sizes) > 1 else (kernel[0], stride[0])
    program = lambda tally, grid: pooling.lp_pool(tally, grid, 4.0, kernel, stride)  # noqa: E731
    check_claim(program, lambda a: function(a, 4.0, size, step), x)


@cases
@given(few, st.lists(st.integers(2, 4), min_size=1, max_size=3), st.data(), seeds)
def test_padding_backward(n, sizes, data, seed):
    # Padding copies, so its gradient adds every element to that which it was copied from.
    d = len(sizes)
    pads = [data.draw(st.integers(0, 1)) for _ in range(2 * d)]
    wide = tuple(size + pads[2 * i] + pads[2 * i + 1] for i, size in enumerate(reversed(sizes)))[::-1]
    x, g = drawn(seed, n, 1, *sizes), drawn(seed + 1, n, 1, *wide)
    for mode, name in (("reflect", "reflection"), ("replicate", "replication")):
        numbered = torch.arange(x.numel(), dtype=torch.float64).reshape(x.shape)
        origins = F.pad(numbered, pads, mode).to(torch.int64).numpy()
        program = lambda tally, gradient, _, origins=origins: norms.add_into(tally, origins, gradient)  # noqa: E731
        function = getattr(aten, f"{name}_pad{d}d_backward")
        check_claim(program, lambda g, a, function=function: function(g, a, pads), g, x)
        check_claim(lambda tally, a: None, lambda a, mode=mode: F.pad(a, pads, mode), x, compare=False)


@st.composite
def resizings(draw, dimensions):
    """Return the sizes before and after, and align_corners."""
    d = draw(st.sampled_from(dimensions))
    axes = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=d, max_size=d))
    return tuple(a for a, _ in axes), tuple(b for _, b in axes), draw(st.booleans())


def check_resampling(case, seed, taps, mode, corners):
    sizes, results, align = case
    d = len(sizes)
    x, g = drawn(seed, 1, 2, *sizes), drawn(seed + 1, 1, 2, *results)
    align = align and corners
    program = lambda tally, grid: resampling.resample(tally, grid, results, taps, align)  # noqa: E731
    options = {"align_corners": align} if corners else {}
    check_claim(program, lambda a: F.interpolate(a, results, mode=mode, **options), x)
    backward = lambda tally, g: resampling.resample_backward(tally, g, sizes, taps, align)  # noqa: E731
    name = {"linear": "upsample_linear1d", "bicubic": "upsample_bicubic2d"}.get(mode, f"upsample_{mode}{d}d")
    function = getattr(aten, f"{name}_backward")
    more = (align,) if corners else ()
    check_claim(backward, lambda g: function(g, results, (1, 2, *sizes), *more), g)


@cases
@given(resizings((1, 2, 3)), seeds)
def test_nearest_resampling(case, seed):
    check_resampling(case, seed, resampling.nearest_taps, "nearest", False)


@cases
@given(resizings((1, 2, 3)), seeds)
def test_linear_resampling(case, seed):
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(case[0])]
    check_resampling(case, seed, resampling.linear_taps, mode, True)


@random_cases(8)  # torch takes half a second for the shape of each result
@given(resizings((2,)), seeds)
def test_cubic_resampling(case, seed):
    check_resampling(case, seed, resampling.cubic_taps, "bicubic", True)


@st.composite
def samplings(draw):
    """Return the sizes of an image in two or three dimensions, and of the samples from it."""
    d = draw(st.integers(2, 3))
    return tuple(tuple(draw(st.lists(st.integers(low, 4), min_size=d, max_size=d))) for low in (2, 1))


@cases
@given(
    samplings(),
    seeds,
    st.sampled_from(("bilinear", "nearest", "bicubic")),
    st.sampled_from(("zeros", "border", "reflection")),
    st.booleans(),
)
def test_grid_sample(case, seed, mode, padding, align):
    sizes, results = case
    mode = "bilinear" if mode == "bicubic" and len(sizes) == 3 else mode
    x = drawn(seed, 2, 2, *sizes)
    grid = drawn(seed + 1, 2, *results, len(sizes), low=-1.5, high=1.5)
    program = lambda tally, *arrays: resampling.sample(tally, *arrays, mode, padding, align)  # noqa: E731
    check_claim(program, lambda a, g: F.grid_sample(a, g, mode, padding, align), x, grid)


@cases
@given(
    samplings(),
    seeds,
    st.sampled_from(("bilinear", "nearest")),
    st.sampled_from(("zeros", "border", "reflection")),
    st.booleans(),
)
def test_grid_sample_backward(case, seed, mode, padding, align):
    sizes, results = case
    x, g = drawn(seed, 1, 2, *sizes), drawn(seed + 2, 1, 2, *results)
    grid = drawn(seed + 1, 1, *results, len(sizes), low=-1.5, high=1.5)
    numbers = ("bilinear", "nearest").index(mode), ("zeros", "border", "reflection").index(padding)
    program = lambda tally, *arrays: resampling.sample_backward(tally, *arrays, mode, padding, align)  # noqa: E731
    backward = getattr(aten, f"grid_sampler_{len(sizes)}d_backward")
    check_claim(program, lambda g, a, b: backward(g, a, b, *numbers, align, (True, True)), g, x, grid)


@cases
@given(few, few, st.tuples(few, few), st.integers(1, 2), st.booleans(), seeds)
def test_roi_align(channels, boxes, pooled, sampling, aligned, seed):
    # torchvision's op has a schema here, but no kernel: a second definition, with tensors, stands for its result.
    x = drawn(seed, 2, channels, 5, 6)
    corners = drawn(seed + 1, boxes, 2, low=0, high=4)
    rois = torch.cat((torch.arange(boxes)[:, None] % 2, corners, corners + drawn(seed + 2, boxes, 2, low=1)), 1)
    scale = 0.5
    options = pooled, scale, sampling, aligned
    roi_align = torch.ops.torchvision.roi_align
    check_claim(
        lambda tally, *arrays: resampling.roi_align(tally, *arrays, *options),
        lambda a, b: roi_align(a, b, scale, *pooled, sampling, aligned),
        x,
        rois,
        expected=lambda a, b: align_again(a, b, *options),
    )


def align_again(x, rois, pooled, scale, sampling, aligned):
    """Return roi_align by grid_sample: the mean over `sampling` points each way in each bin."""
    height, width = x.shape[2:]
    results = []
    for roi in rois:
        left, top, right, bottom = (roi[1:] * scale - (0.5 if aligned else 0.0)).tolist()
        tall, wide = bottom - top, right - left
        if not aligned:
            tall, wide = max(tall, 1.0), max(wide, 1.0)
        rows = top + (torch.arange(pooled[0] * sampling, dtype=x.dtype) + 0.5) * tall / (pooled[0] * sampling)
        columns = left + (torch.arange(pooled[1] * sampling, dtype=x.dtype) + 0.5) * wide / (pooled[1] * sampling)
        rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
        grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1)
        grid = grid * 2 / torch.tensor([width - 1, height - 1], dtype=x.dtype) - 1
        samples = F.grid_sample(x[int(roi[0])][None], grid[None], align_corners=True)
        results.append(F.avg_pool2d(samples, sampling)[0])
    return torch.stack(results)
