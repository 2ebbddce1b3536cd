"""The backward pass in full: what autograd runs for a layer, against programs that count the derivatives they make."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from fvflops.capture.recorder.tensor_specs import describe_call
from tests.support.oracle import attention, convolution, norms, reductions
from tests.support.oracle.claim import Source, check_gradients, check_price, check_results, sources
from tests.support.oracle.convolution import Window
from tests.support.oracle.deformable import deform
from tests.support.oracle.number import Tally, values
from tests.support.oracle.products import linear_backward
from tests.support.random_cases import random_cases

aten = torch.ops.aten

cases = random_cases(4)
small = st.integers(1, 2)
sizes = st.integers(1, 3)


def subset(flags, items):
    return [item for flag, item in zip(flags, items, strict=True) if flag]


def check_signature(tally, op, arguments, results, *, products=False):
    check_price(describe_call(op, arguments, {}, results), tally, products=products)


masks = st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any)


@cases
@given(sources, st.lists(sizes, max_size=2), sizes, sizes, masks)
def test_linear(source, batch, inputs, outputs, mask):
    """Of one row or of a batch of any number of axes; the gradient of the bias is a sum."""
    tensors = source(*batch, inputs), source(outputs, inputs), source(outputs)

    def program(tally, slope):
        rows = tally.numbers(tensors[0].reshape(-1, inputs))
        return subset(mask, linear_backward(tally, rows, slope.reshape(-1, outputs), tally.numbers(tensors[1]), mask))

    check_gradients(program, F.linear, *tensors, wanted=mask)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
@cases
@given(sources, small, st.booleans())
def test_deformable_convolution(groups, masked, source, offset_groups, wide):
    """By its signature, for its kernels may not be there; the gradients are from grid_sample and one product."""
    window = Window((1, 2), (1, 0), (2 if wide else 1, 1), groups)
    channels = 2 * groups * offset_groups
    image, weight = source(2, channels, 4, 5), source(2 * groups, channels // groups, 2, 2)
    sizes = (4 if wide else 5, 2)
    offset = source(2, 2 * offset_groups * 4, *sizes)
    mask = source(2, offset_groups * 4, *sizes) if masked else source(2, 0)
    tensors = [image, weight, offset, mask, source(2 * groups)]
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = deform(*leaves, window, offset_groups, masked)
    slope = source(*out.shape)
    expected = torch.autograd.grad(out, leaves, slope, allow_unused=True)
    tally = Tally()
    numbers = [tally.numbers(tensor) for tensor in (slope, image, weight, offset)]
    mine = convolution.deformable_convolution_backward(
        tally, *numbers, tally.numbers(mask) if masked else None, window, offset_groups
    )
    check_results(mine, [gradient if masked or place != 3 else None for place, gradient in enumerate(expected)])
    op = torch.ops.torchvision._deform_conv2d_backward.default
    moves = (*window.stride, *window.padding, *window.dilation)
    arguments = (slope, *tensors, *moves, groups, offset_groups, masked)
    check_signature(tally, op, arguments, tuple(tensors), products=True)


def weigh(query, key, scale=None, causal=False, mask=None):
    """Return the weights of attention and the logsumexp of their scores; query heads share key heads evenly."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    scores = scores if mask is None else scores + mask
    return scores.softmax(-1), scores.logsumexp(-1)


KINDS = ("plain", "causal", "mask")


def draw_attention(source, kind, b, h, shared, q, k, d, dv=None):
    mask = source(q, k) if kind == "mask" else None
    query, key, value = source(b, h * shared, q, d), source(b, h, k, d), source(b, h, k, d if dv is None else dv)
    return mask, kind == "causal", (query, key, value)


@pytest.mark.parametrize("kind", KINDS)
@cases
@given(sources, small, small, small, sizes, sizes, sizes, st.sampled_from([None, 0.7]))
def test_fused_attention_of_a_cpu(kind, source, b, h, shared, q, k, d, scale):
    """The scores again, and D by the sum of dO * O: under autograd, heads shared in the kernel."""
    mask, causal, tensors = draw_attention(source, kind, b, h, shared, q, k, d)
    weights, logsumexp = weigh(*tensors[:2], scale, causal, mask)
    out = weights @ tensors[2].repeat_interleave(shared, 1)

    def program(tally, slope):
        numbers = [tally.numbers(tensor) for tensor in (*tensors, out, logsumexp)]
        own = None if mask is None else tally.numbers(mask)
        return attention.attention_backward(tally, slope, *numbers, own, causal, scale)

    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=shared > 1)

    check_gradients(program, attend, *tensors)


@pytest.mark.parametrize("kind", KINDS)
@cases
@given(sources, small, small, sizes, sizes, sizes, sizes, st.sampled_from([None, 0.7]))
def test_attention_of_single_ops(kind, source, b, h, q, k, d, dv, scale):
    """Four products, the softmax's slope, and the root of the scale for query and key."""
    mask, causal, tensors = draw_attention(source, kind, b, h, 1, q, k, d, dv)
    weights, _ = weigh(*tensors[:2], scale, causal, mask)

    def program(tally, slope):
        return attention.math_attention_backward(tally, slope, *map(tally.numbers, (*tensors, weights)), scale)

    def attend(query, key, value):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale)

    check_gradients(program, attend, *tensors)


# Every fused kernel's backward: its op, and its arguments of (slope, query, key, value, out, logsumexp, mask, causal).
HEADS_FIRST = {
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda g, q, k, v, o, l, m, c, p: (
        (g, q, k, v, o, l, p, c),
        {"attn_mask": m},
    ),
    "_scaled_dot_product_flash_attention_backward": lambda g, q, k, v, o, l, m, c, p: (
        (g, q, k, v, o, l, None, None, 6, 6, p, c, l, l),
        {},
    ),
    "_scaled_dot_product_efficient_attention_backward": lambda g, q, k, v, o, l, m, c, p: (
        (g, q, k, v, m, o, l, l, l, p, [True, True, True, m is not None], c),
        {},
    ),
    "_scaled_dot_product_cudnn_attention_backward": lambda g, q, k, v, o, l, m, c, p: (
        (g, q, k, v, o, l, l, l, m, None, None, 6, 6, p, c),
        {},
    ),
    "_cudnn_attention_backward": lambda g, q, k, v, o, l, m, c, p: (
        (g, q, k, v, o, l, l, l, m, None, None, 6, 6, p, c),
        {},
    ),
    "_scaled_dot_product_fused_attention_overrideable_backward": lambda g, q, k, v, o, l, m, c, p: (
        (g, q, k, v, m, [True, True, True, m is not None], o, l, None, None, 6, 6, p, c, l, l),
        {},
    ),
}
TOKENS_FIRST = {
    "_flash_attention_backward": lambda g, q, k, v, o, l, m, c, p: (
        (g, q, k, v, o, l, None, None, 6, 6, p, c, l, l),
        {},
    ),
    "_efficient_attention_backward": lambda g, q, k, v, o, l, m, c, p: (
        (g, q, k, v, m, o, None, None, 6, 6, l, p, l, l, 1 if c else 0, m is not None),
        {},
    ),
}
NO_MASK = {"_scaled_dot_product_flash_attention_backward", "_flash_attention_backward"}


# Older releases of torch lack some.
@pytest.mark.parametrize("name", [name for name in (*HEADS_FIRST, *TOKENS_FIRST) if hasattr(aten, name)])
@cases
@given(sources, st.sampled_from(KINDS), small, small, small, sizes, sizes, sizes, sizes, st.booleans())
def test_fused_attention_of_any_device(name, source, kind, b, h, shared, q, k, d, dv, dropping):
    """By its signature, against the same program: autograd of the written-out formula says that it is right.

    What a mask that is trained gets are the slopes of the scores before the scale, which are there.
    """
    kind = "plain" if kind == "mask" and name in NO_MASK else kind
    mask, causal, tensors = draw_attention(source, kind, b, h, shared, q, k, d, dv)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    weights, logsumexp = weigh(*leaves[:2], None, causal, mask)
    kept = (source(*weights.shape) > -0.5).double() if dropping else None
    met = weights if kept is None else weights * kept * 2.0
    out = met @ leaves[2].repeat_interleave(shared, 1)
    slope = source(*out.shape)
    expected = torch.autograd.grad(out, leaves, slope)
    tally = Tally()
    numbers = [tally.numbers(tensor.detach()) for tensor in (slope, *leaves, out, logsumexp)]
    own = None if mask is None else tally.numbers(mask)
    dropped = None if kept is None else (kept.numpy(), 2.0)
    check_results(attention.attention_backward(tally, *numbers, own, causal, None, dropped), expected)

    given_ = [tensor.detach() for tensor in (slope, *leaves, out)]
    if name in TOKENS_FIRST:
        given_ = [tensor.transpose(1, 2) for tensor in given_]
    arrange = {**HEADS_FIRST, **TOKENS_FIRST}[name]
    arguments, options = arrange(*given_, logsumexp.detach(), mask, causal, 0.5 if dropping else 0.0)
    check_price(describe_call(getattr(aten, name).default, arguments, options, tuple(given_[1:4])), tally)


@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention(causal):
    """Its op by autograd; a score function is not counted, and here leaves the scores as they are."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    source, q, k = Source(3), 4, 5
    seen = (lambda b, h, i, j: i >= j) if causal else (lambda b, h, i, j: i >= 0)
    blocks = flex.create_block_mask(seen, None, None, q, k, device="cpu", BLOCK_SIZE=16).as_tuple()
    tensors = source(2, 4, q, 3), source(2, 2, k, 3), source(2, 2, k, 3)
    weights, logsumexp = weigh(*tensors[:2], 0.3, causal)
    out = weights @ tensors[2].repeat_interleave(2, 1)

    def program(tally, slope):
        numbers = [tally.numbers(tensor) for tensor in (*tensors, out, logsumexp)]
        return attention.attention_backward(tally, slope, *numbers, None, causal, 0.3)

    def attend(query, key, value):
        return torch.ops.higher_order.flex_attention(query, key, value, lambda score, *at: score, blocks, 0.3, {})[0]

    check_gradients(program, attend, *tensors)


EPS = 0.1


def statistics_of(rows):
    return rows.mean(1), (rows.var(1, correction=0) + EPS).rsqrt()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("image", [False, True])
def test_cross_entropy(image, reduction, weighted):
    """Zeros but for the target: a sign, a factor if classes have weights, a division for a mean; then log_softmax."""
    source, n, classes = Source(8), 3, 4
    x, weight = source(n, classes), source(classes).square() + 0.1 if weighted else None
    targets = torch.tensor([1, 3, 0])
    total = n if weight is None else float(weight[targets].sum())

    def program(tally, slope):
        g = -np.broadcast_to(slope.ravel() if reduction == "none" else slope, n)
        g = g if weight is None else g * tally.numbers(weight)[targets.numpy()]
        rows = tally.zeros(n, classes)
        rows[range(n), targets.numpy()] = g / total if reduction == "mean" else g
        return [reductions.log_softmax_backward(tally, rows, tally.numbers(x.log_softmax(-1)))]

    def function(x):
        # An image of n pixels, its classes in the second dimension.
        given_ = (x.T[None, :, :, None], targets[None, :, None]) if image else (x, targets)
        return F.cross_entropy(*given_, weight, reduction=reduction)

    check_gradients(program, function, x, products=False)


@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weights"])
def test_embedding_bag(mode):
    """Each number of a bag goes to all of its rows, of a maximum to one."""
    table, factors = Source(10)(6, 3), Source(11)(5)
    index, ends = torch.tensor([1, 2, 4, 4, 0]), [0, 3, 5]
    bags = [list(range(*pair)) for pair in itertools.pairwise(ends)]
    weighted = mode == "weights"

    def program(tally, slope):
        grid, own = tally.zeros(6, 3), tally.numbers(factors)
        for bag, row in zip(bags, slope, strict=True):
            largest = table[index[bag]].argmax(0)
            for place in bag:
                part = row / len(bag) if mode == "mean" else row * own[place] if weighted else row
                met = (largest + bag[0] == place).numpy() if mode == "max" else slice(None)
                grid[index[place], met] = grid[index[place], met] + part[met]
        if not weighted:
            return [grid]
        return grid, tally.dot(np.repeat(slope, [len(bag) for bag in bags], 0), tally.numbers(table)[index.numpy()])

    def function(table, *weights):
        options = {"mode": "sum" if weighted else mode}
        if weights:
            options["per_sample_weights"] = weights[0]
        return F.embedding_bag(index, table, torch.tensor(ends[:-1]), **options)

    check_gradients(program, function, table, *([factors] if weighted else []), products=False)


@pytest.mark.parametrize("weighted", [False, True])
def test_batch_norm_of_other_devices(weighted):
    """cuDNN's and MIOpen's ops compute all gradients; SyncBatchNorm's two share the work of one."""
    source, c = Source(12), 3
    x, slope, weight = source(2, c, 4), source(2, c, 4), source(c)
    mean, inverse = statistics_of(x.transpose(0, 1).reshape(c, -1))

    def channels(tally):
        return (tally.numbers(tensor.transpose(0, 1).reshape(c, -1)) for tensor in (slope, x))

    if weighted:
        tally = Tally()
        norms.batch_norm_backward(
            tally, *channels(tally), *map(tally.numbers, (mean, inverse, weight)), (True, True, True)
        )
        check_signature(
            tally,
            aten.cudnn_batch_norm_backward.default,
            (x, slope, weight, mean, mean, mean, inverse, EPS, x),
            (x, mean, mean),
        )
        check_signature(
            tally,
            aten.miopen_batch_norm_backward.default,
            (x, slope, weight, mean, mean, mean, inverse, EPS),
            (x, mean, mean),
        )
        if hasattr(aten, "batch_norm_backward"):
            arguments = (slope, x, weight, mean, mean, mean, inverse, True, EPS, [True] * 3, x)
            check_signature(tally, aten.batch_norm_backward.default, arguments, (x, mean, mean))

    # The sums of the gradients, and of these times x - mean; the weight's gradient is that times 1/deviation.
    tally = Tally()
    g, rows = channels(tally)
    sums = tally.sum(g, 1), tally.sum(g * (rows - tally.numbers(mean)[:, None]), 1)
    if weighted:
        sums[1] * tally.numbers(inverse)
    flags = (True, weighted, weighted)
    arguments = (slope, x, mean, inverse, weight if weighted else None, *flags)
    check_signature(tally, aten.batch_norm_backward_reduce.default, arguments, (mean,) * 4)
    # (g - mean(g) - (x - mean)*(mean(g*(x - mean))/variance))*(weight/deviation).
    tally, n = Tally(), x.numel() // c
    g, rows = channels(tally)
    average, factor = (tally.numbers(tensor)[:, None] for tensor in (mean, inverse))
    total, inner = (tally.numbers(torch.tensor(values(part)))[:, None] for part in sums)
    shift, slant = total / n, inner / n * factor * factor
    last = factor * tally.numbers(weight)[:, None] if weighted else factor
    found = (g - shift - (rows - average) * slant) * last
    leaf = x.clone().requires_grad_()
    F.batch_norm(leaf, None, None, weight if weighted else None, None, True, 0.1, EPS).backward(slope)
    check_results(found, leaf.grad.transpose(0, 1).reshape(c, -1))
    arguments = (slope, x, mean, inverse, weight if weighted else None, mean, mean, torch.ones(1, dtype=torch.int32))
    check_signature(tally, aten.batch_norm_backward_elemt.default, arguments, x)


def test_weight_norm():
    """Of v and g, by the sums of the gradient times v: g/norm, norm squared, two divisions for each row."""
    v, g = Source(13)(3, 4), Source(14)(3, 1)
    lengths = v.norm(dim=1, keepdim=True)

    def program(tally, slope):
        rows, size, length = map(tally.numbers, (v, g, lengths))
        inner = tally.sum(rows * slope, 1)[:, None]
        return (size / length) * (slope - rows * (inner / (length * length))), inner / length

    check_gradients(program, lambda v, g: torch._weight_norm(v, g, 0), v, g, products=False)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("order", [1, 2])
def test_multi_margin_loss(order, weighted):
    """Of each class but the target margin - x[target] + x[class], what the target loses by it, and a factor at last."""
    source, n, classes = Source(15), 3, 4
    x, weight = source(n, classes), source(classes).square() if weighted else None
    targets = torch.tensor([1, 3, 0])

    def program(tally, slope):
        factors = None if weight is None else tally.numbers(weight)
        found = tally.zeros(n, classes)
        for row, target, grads in zip(tally.numbers(x), targets.tolist(), found, strict=True):
            for place in {*range(classes)} - {target}:
                left = 1.0 - row[target] + row[place]
                step = left * 2.0 * (1 / (n * classes)) if order == 2 else tally.number(1 / (n * classes))
                step = step if factors is None else step * factors[target]
                less = grads[target] - step
                if left.value > 0:
                    grads[target], grads[place] = less, step
        return [found * slope]

    def function(x):
        return F.multi_margin_loss(x, targets, p=order, weight=weight)

    check_gradients(program, function, x, products=False)
