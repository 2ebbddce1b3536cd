"""The table `exact` against programs: norms, pooling and resampling, forward and backward, on random shapes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.oracle import norms, pooling, reductions, resampling
from tests.support.oracle.claim import check_claim, check_tally, compare_results, drawn
from tests.support.oracle.losses import flat
from tests.support.oracle.number import Tally, values
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


# --- norms ------------------------------------------------------------------------------------------------------------

affine = st.sampled_from(((True, True), (True, False), (False, False)))


@cases
@given(few, st.integers(1, 6), seeds, affine)
def test_layer_norm(m, n, seed, flags):
    x = drawn(seed, m, n)
    chosen, fill = given_or_none((drawn(seed + 1, n), drawn(seed + 2, n)), flags)

    def program(tally, grid, *scales):
        weight, bias = fill(scales)
        return [norms.scale_and_shift(norms.normalise(tally, row, EPS), weight, bias) for row in grid]

    check_claim(program, lambda a, *s: F.layer_norm(a, (n,), *fill(s), eps=EPS), x, *chosen)

    def rms(tally, grid, *scales):
        return [norms.rms_norm(tally, row, fill(scales)[0], EPS) for row in grid]

    chosen, fill = given_or_none((drawn(seed + 1, n),), flags[:1])
    check_claim(rms, lambda a, *s: F.rms_norm(a, (n,), *fill(s), eps=EPS), x, *chosen)


@cases
@given(few, few, few, st.integers(2, 3), seeds, affine)
def test_group_norm(n, groups, per_group, l, seed, flags):
    c = groups * per_group
    x = drawn(seed, n, c, l)
    chosen, fill = given_or_none((drawn(seed + 1, c), drawn(seed + 2, c)), flags)

    def program(tally, batch, *scales):
        weight, bias = fill(scales)
        result = []
        for sample in batch:
            row = []
            for group in range(groups):
                numbers = flat(sample[group * per_group : (group + 1) * per_group])
                row += norms.normalise(tally, numbers, EPS)
            wide = [None if s is None else [w for w in s for _ in range(l)] for s in (weight, bias)]
            result.append(norms.scale_and_shift(row, *wide))
        return result

    check_claim(program, lambda a, *s: F.group_norm(a, groups, *fill(s), eps=EPS), x, *chosen)


@cases
@given(few, few, st.integers(2, 3), seeds, affine)
def test_instance_norm(n, c, l, seed, flags):
    x = drawn(seed, n, c, l)
    chosen, fill = given_or_none((drawn(seed + 1, c), drawn(seed + 2, c)), flags)

    def program(tally, batch, *scales):
        weight, bias = (own or [None] * c for own in fill(scales))
        return [
            [norms.standardise_channel(tally, row, weight[k], bias[k], EPS)[0] for k, row in enumerate(sample)]
            for sample in batch
        ]

    check_claim(program, lambda a, *s: F.instance_norm(a, None, None, *fill(s), eps=EPS), x, *chosen)


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
        weight, bias = fill(scales)
        followed = [], []
        grids = []
        for channel, numbers in enumerate(norms.channels(batch)):
            own = [None if s is None else s[channel] for s in (weight, bias)]
            row, latest, spread = norms.standardise_channel(tally, numbers, *own, EPS)
            if running:
                unbiased = spread * (len(numbers) / (len(numbers) - 1))
                followed[0].append(norms.follow(mean[channel], 0.3, latest))
                followed[1].append(norms.follow(variance[channel], 0.3, unbiased))
            grids.append(row)
        order = [[grids[k][i * l : (i + 1) * l] for k in range(c)] for i in range(n)]
        return (order, *followed) if running else (order,)

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
        places = [range(n)] * m
        pairs = list(zip(mean, inverse, strict=True))
        return norms.groups_backward(tally, g, x, pairs, places, fill(scales)[0], n, mask)

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

    def program(tally, g, x, mean, inverse, *scales):
        rows = [
            [flat(sample[k * per_group : (k + 1) * per_group]) for sample in batch for k in range(groups)]
            for batch in (g, x)
        ]
        places = [
            [k * per_group + i for i in range(per_group) for _ in range(l)] for _ in range(n) for k in range(groups)
        ]
        pairs = list(zip(flat(mean), flat(inverse), strict=True))
        return norms.groups_backward(tally, *rows, pairs, places, fill(scales)[0], c, mask)

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
        weight = fill(scales)[0]
        results = []
        for k, (gradient, channel) in enumerate(zip(norms.channels(g), norms.channels(x), strict=True)):
            own = None if weight is None else weight[k]
            if training:
                results.append(norms.batch_norm_backward(tally, gradient, channel, mean[k], inverse[k], own, mask))
            else:
                results.append(
                    norms.batch_norm_eval_backward(tally, gradient, channel, mean[k], variance[k], own, EPS, mask)
                )
        grids, of_weight, of_bias = zip(*results, strict=True)
        order = [[grids[k][i * l : (i + 1) * l] for k in range(c)] for i in range(n)] if mask[0] else []
        return order, list(of_weight), list(of_bias)

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

    def program(tally, g, x, inverse, *scales):
        weight = fill(scales)[0]
        rows, sums = [], [tally.zero() for _ in range(n)]
        for gradient, row, factor in zip(g, x, inverse, strict=True):
            own, of_weight = norms.rms_norm_backward(tally, gradient, row, factor, weight)
            rows.append(own)
            if weight is not None:
                norms.add_into(sums, range(n), of_weight)
        return rows, sums

    mask = (True, weighted)

    def function(g, x, inverse, *scales):
        return aten._fused_rms_norm_backward(g, x, (n,), inverse[:, None], *fill(scales), mask)

    tally = Tally()
    mine = program(tally, *map(tally.numbers, (g, x, inverse, *chosen)))
    compare_results(wanted(lambda: mine, mask)(), expected_rms_gradients(g, x, n, chosen))
    check_tally(tally, wanted(function, mask), g, x, inverse, *chosen)


def expected_rms_gradients(g, x, n, chosen):
    """Return what autograd makes of rms_norm: its fused backward has no kernel for a CPU."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x, *chosen)]
    F.rms_norm(leaves[0], (n,), *leaves[1:], eps=EPS).backward(g)
    return [leaf.grad for leaf in leaves]


@cases
@given(few, st.integers(1, 5), few, seeds)
def test_unit_rows(n, c, l, seed):
    x, y = drawn(seed, n, c, l), drawn(seed + 1, n, c, l)

    def lengths(tally, grid):
        rows = [[reductions.unit_row(tally, row, 1e-12) for row in map(list, zip(*s, strict=True))] for s in grid]
        return [list(map(list, zip(*sample, strict=True))) for sample in rows]

    check_claim(lengths, F.normalize, x)

    def cosines(tally, a, b):
        columns = zip(*[[list(map(list, zip(*s, strict=True))) for s in grid] for grid in (a, b)], strict=True)
        return [[reductions.cosine(tally, *pair, 1e-8) for pair in zip(*both, strict=True)] for both in columns]

    check_claim(cosines, F.cosine_similarity, x, y)
    v, length = drawn(seed, n, c), drawn(seed + 1, n, 1, low=0.5)

    def brought(tally, rows, lengths):
        return [norms.weight_norm(tally, row, g[0]) for row, g in zip(rows, lengths, strict=True)]

    check_claim(brought, lambda v, g: torch._weight_norm(v, g, 0), v, length)


@cases
@given(few, st.integers(1, 5), few, st.integers(1, 4), seeds)
def test_local_response_norm(n, c, l, size, seed):
    x = drawn(seed, n, c, l)

    def program(tally, batch):
        return [norms.local_response_norm(tally, sample, size, 0.5, 0.75, 2.0) for sample in batch]

    check_claim(program, lambda a: F.local_response_norm(a, size, 0.5, 0.75, 2.0), x)


# --- pooling ----------------------------------------------------------------------------------------------------------


@st.composite
def pools(draw, *, dilated=False):
    """Return N C and sizes, kernel, stride, padding, dilation and ceil_mode of one, two or three dimensions."""
    d = draw(st.integers(1, 3))
    each_ = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(d))  # noqa: E731
    kernel, stride = each_(1, 3), each_(1, 3)
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    dilation = each_(1, 2) if dilated else (1,) * d
    spans = [step * (k - 1) + 1 - 2 * pad for k, pad, step in zip(kernel, padding, dilation, strict=True)]
    sizes = tuple(max(span, 1) + draw(st.integers(0, 3)) for span in spans)
    lead = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    return lead, sizes, kernel, stride, padding, dilation, draw(st.booleans())


def over_samples(program):
    """Return the program that does the same with each channel of each sample of N C space lists."""
    return lambda tally, *batches: [
        [program(tally, *grids) for grids in zip(*samples, strict=True)] for samples in zip(*batches, strict=True)
    ]


@cases
@given(pools(dilated=True), seeds)
def test_max_pool(case, seed):
    lead, sizes, kernel, stride, padding, dilation, ceil = case
    d = len(sizes)
    x = drawn(seed, *lead, *sizes)
    program = over_samples(lambda tally, grid: pooling.max_pool(tally, grid, kernel, stride, padding, dilation, ceil))
    function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[d - 1]
    check_claim(program, lambda a: function(a, kernel, stride, padding, dilation, ceil), x)
    if d == 1:
        return
    result, chosen = function(x, kernel, stride, padding, dilation, ceil, return_indices=True)
    g = drawn(seed + 1, *result.shape)
    backward = over_samples(lambda tally, g, a, chosen: pooling.max_pool_backward(tally, g, chosen, sizes))
    name = f"max_pool{d}d_with_indices_backward"
    check_claim(
        backward,
        lambda g, a, chosen: getattr(aten, name)(g, a, kernel, stride, padding, dilation, ceil, chosen),
        g,
        x,
        chosen,
    )


@cases
@given(pools(), seeds, st.booleans(), st.sampled_from((None, 3)))
def test_avg_pool(case, seed, include, override):
    lead, sizes, kernel, stride, padding, _, ceil = case
    d = len(sizes)
    x = drawn(seed, *lead, *sizes)
    override = override if d > 1 else None
    more = (override,) if d > 1 else ()
    function = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[d - 1]
    program = over_samples(
        lambda tally, grid: pooling.avg_pool(tally, grid, kernel, stride, padding, ceil, include, override)
    )
    check_claim(program, lambda a: function(a, kernel, stride, padding, ceil, include, *more), x)
    if d == 1:
        return
    g = drawn(seed + 1, *function(x, kernel, stride, padding, ceil, include).shape)
    backward = over_samples(
        lambda tally, g, a: pooling.avg_pool_backward(tally, g, sizes, kernel, stride, padding, include, override)
    )
    name = f"avg_pool{d}d_backward"
    check_claim(
        backward, lambda g, a: getattr(aten, name)(g, a, kernel, stride, padding, ceil, include, override), g, x
    )


@cases
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3), seeds)
def test_adaptive_pools(axes, seed):
    sizes, results = zip(*axes, strict=True)
    d = len(axes)
    x, g = drawn(seed, 2, 1, *sizes), drawn(seed + 1, 2, 1, *results)
    mean = over_samples(lambda tally, grid: pooling.adaptive_avg_pool(tally, grid, results))
    largest = over_samples(lambda tally, grid: pooling.adaptive_max_pool(tally, grid, results))
    name = f"adaptive_%s_pool{d}d"
    check_claim(mean, lambda a: getattr(F, name % "avg")(a, results), x)
    check_claim(largest, lambda a: getattr(F, name % "max")(a, results), x)
    if d == 1:
        return
    backward = over_samples(lambda tally, g, a: pooling.adaptive_avg_pool_backward(tally, g, sizes))
    check_claim(backward, lambda g, a: getattr(aten, f"_adaptive_avg_pool{d}d_backward")(g, a), g, x)
    chosen = getattr(F, name % "max")(x, results, return_indices=True)[1]
    backward = over_samples(lambda tally, g, a, chosen: pooling.max_pool_backward(tally, g, chosen, sizes))
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
    program = over_samples(lambda tally, grid: pooling.lp_pool(tally, grid, 4.0, kernel, stride))
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
        numbered = torch.arange(x[0, 0].numel(), dtype=torch.float64).reshape(1, 1, *sizes)
        origins = flat(F.pad(numbered, pads, mode)[0, 0].to(torch.int64).tolist())

        def program(tally, gradients, _, origins=origins):
            results = []
            for gradient in gradients:
                sums = [tally.zero() for _ in range(max(origins) + 1)]
                norms.add_into(sums, origins, flat(gradient))
                results.append(sums)
            return results

        function = getattr(aten, f"{name}_pad{d}d_backward")
        check_claim(program, lambda g, a, function=function: function(g, a, pads), g, x)
        check_claim(lambda tally, a: None, lambda a, mode=mode: F.pad(a, pads, mode), x, compare=False)


# --- resampling -------------------------------------------------------------------------------------------------------


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
    program = over_samples(lambda tally, grid: resampling.resample(tally, grid, results, taps, align))
    options = {"align_corners": align} if corners else {}
    check_claim(program, lambda a: F.interpolate(a, results, mode=mode, **options), x)
    backward = over_samples(lambda tally, g: resampling.resample_backward(tally, g, sizes, taps, align))
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

    def program(tally, images, grids):
        pairs = zip(images, grids, strict=True)
        return [resampling.sample(tally, image, places, mode, padding, align) for image, places in pairs]

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

    def program(tally, gradients, images, grids):
        of_images, of_grids = resampling.sample_backward(tally, gradients[0], images[0], grids[0], mode, padding, align)
        return [of_images], [of_grids]

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

    def program(tally, images, rois):
        return [
            resampling.roi_align(tally, images[int(roi[0].value)], roi[1:], pooled, scale, sampling, aligned)
            for roi in rois
        ]

    tally = Tally()
    mine = torch.tensor(values(program(tally, tally.numbers(x), tally.numbers(rois))), dtype=x.dtype)
    torch.testing.assert_close(mine, align_again(x, rois, pooled, scale, sampling, aligned))
    roi_align = torch.ops.torchvision.roi_align
    check_tally(tally, lambda a, b: roi_align(a, b, scale, *pooled, sampling, aligned), x, rois)


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
