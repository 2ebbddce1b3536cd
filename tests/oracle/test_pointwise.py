"""The table `exact` against programs: pointwise ops, reductions, losses and optimizers, on random shapes."""

import math
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.oracle import losses, optimizers, pointwise, reductions
from tests.support.oracle.claim import check_all, check_claim, check_each, drawn
from tests.support.oracle.losses import REDUCTIONS, loss
from tests.support.oracle.number import each, scaled
from tests.support.oracle.pointwise import (
    clamp,
    exp,
    leaky_relu,
    log,
    logit,
    scalar,
    select,
    sigmoid,
    softplus,
    softshrink,
)
from tests.support.random_cases import random_cases

F = torch.nn.functional
aten = torch.ops.aten

cases = random_cases(10)

few = st.integers(1, 3)
sizes = st.lists(st.integers(1, 3), min_size=0, max_size=3).map(tuple)
seeds = st.integers(0, 10**6)
coefficients = st.sampled_from((1.0, 0.5, 2.0))


@st.composite
def broadcast_shapes(draw, count):
    """Return shapes that broadcast together: sizes become 1, or leading ones go."""
    full = draw(sizes)
    shapes = []
    for _ in range(count):
        kept = tuple(1 if draw(st.booleans()) else size for size in full)
        shapes.append(kept[draw(st.integers(0, len(kept))) :] if draw(st.booleans()) else full)
    return shapes


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda a: exp(a) * 1.5, "not close"),  # another result
        (lambda a: exp(a) * 1, "the program did"),  # an operation too many
        (lambda a: a.call("log", math.exp), "at other prices"),  # the price of another function
    ],
)
def test_a_wrong_program_is_seen(step, message):
    check_each(exp, torch.exp, drawn(0, 2, 3))
    with pytest.raises(AssertionError, match=message):
        check_each(step, torch.exp, drawn(0, 2, 3))


def test_an_op_that_the_table_does_not_know_is_seen():
    library = torch.library.Library("oracle", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    with pytest.raises(AssertionError, match=r"exact leaves out {'oracle::twice': 1}"):
        check_claim(lambda tally, x: x, torch.ops.oracle.twice, drawn(0, 2), compare=False)


@cases
@given(broadcast_shapes(3), seeds, coefficients)
def test_arithmetic(shapes, seed, factor):
    x, y, z = (drawn(seed + place, *shape) for place, shape in enumerate(shapes))
    two = {
        partial(torch.add, alpha=factor): lambda a, b: a + scaled(b, factor),
        partial(torch.sub, alpha=factor): lambda a, b: a - scaled(b, factor),
        partial(torch.rsub, alpha=factor): lambda a, b: b - scaled(a, factor),
        torch.mul: lambda a, b: a * b,
        torch.div: lambda a, b: a / b,
        torch.maximum: lambda a, b: a.max(b),
        torch.minimum: lambda a, b: a.min(b),
        torch.fmax: lambda a, b: a.max(b),
        torch.fmin: lambda a, b: a.min(b),
    }
    check_all(two, x, y)
    check_each(lambda a: a + factor, lambda a: a + factor, x)
    check_each(lambda a: factor * a, lambda a: factor * a, x)
    check_each(lambda a: 1 / a * factor, lambda a: factor / a, x)
    three = {
        partial(torch.addcmul, value=factor): lambda a, b, c: a + scaled(b, factor) * c,
        partial(torch.addcdiv, value=factor): lambda a, b, c: a + scaled(b, factor) / c,
        torch.lerp: lambda a, b, weight: a + (b - a) * weight,
    }
    check_all(three, x, y, z)
    check_each(lambda a, b: a + (b - a) * 0.3, lambda a, b: torch.lerp(a, b, 0.3), x, y)


@cases
@given(broadcast_shapes(2), seeds)
def test_quotients_and_lengths(shapes, seed):
    x, y = (drawn(seed + place, *shape, low=0.1) for place, shape in enumerate(shapes))
    claims = {
        torch.floor_divide: lambda a, b: pointwise.rounded(math.floor)(a / b),
        torch.remainder: pointwise.remainder,
        torch.fmod: pointwise.remainder,
        torch.hypot: lambda a, b: (a * a + b * b).sqrt(),
        torch.xlogy: lambda a, b: a * log(b),
    }
    check_all(claims, x, y)
    check_each(lambda a: a - pointwise.rounded(math.trunc)(a), torch.frac, x)
    check_each(lambda a: a * (math.pi / 180), torch.deg2rad, x)
    check_each(lambda a: -a * log(a), torch.special.entr, x)


@cases
@given(few, st.integers(2, 4), seeds)
def test_sums_of_neighbours(n, m, seed):
    x, y = drawn(seed, n, m), drawn(seed + 1, n, m)
    check_claim(lambda tally, a: np.diff(a), torch.diff, x)
    check_claim(lambda tally, a: tally.sum(a.diagonal()), lambda a: a.trace(), x)
    check_claim(lambda tally, a, b: reductions.norm_of(tally, (a - b).ravel()), torch.dist, x, y)
    three = drawn(seed, n, 3), drawn(seed + 1, n, 3)
    check_claim(lambda tally, a, b: pointwise.cross(a, b), torch.linalg.cross, *three)


@cases
@given(sizes, seeds)
def test_arithmetic_of_one_number(shape, seed):
    x = drawn(seed, *shape)
    one = {
        torch.neg: lambda a: -a,
        torch.abs: abs,
        torch.square: lambda a: a * a,
        torch.reciprocal: lambda a: 1 / a,
        torch.sign: pointwise.sign,
        torch.floor: pointwise.rounded(math.floor),
        torch.ceil: pointwise.rounded(math.ceil),
        torch.trunc: pointwise.rounded(math.trunc),
        torch.round: pointwise.rounded(round),
    }
    check_all(one, x)
    check_all({torch.sqrt: lambda a: a.sqrt(), torch.rsqrt: lambda a: 1 / a.sqrt()}, x.abs())
    for low, high in ((-1.0, None), (None, 1.0), (-1.0, 1.0)):
        check_each(partial(clamp, low=low, high=high), partial(torch.clamp, min=low, max=high), x)
    check_each(lambda a: a.max(0.5), lambda a: torch.clamp_min(a, 0.5), x)
    check_each(lambda a: a.min(0.5), lambda a: torch.clamp_max(a, 0.5), x)


ELEMENTARY = {
    "exp": math.exp,
    "exp2": lambda value: 2**value,
    "expm1": math.expm1,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "log1p": math.log1p,
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "asin": math.asin,
    "acos": math.acos,
    "atan": math.atan,
    "sinh": math.sinh,
    "cosh": math.cosh,
    "tanh": math.tanh,
    "asinh": math.asinh,
    "acosh": math.acosh,
    "atanh": math.atanh,
    "erf": math.erf,
    "erfc": math.erfc,
    "erfinv": scalar(torch.erfinv),
    "lgamma": math.lgamma,
    "digamma": scalar(torch.digamma),
    "i0": scalar(torch.i0),
    "sinc": scalar(torch.sinc),
}


@cases
@given(sizes, seeds)
def test_elementary_functions(shape, seed):
    x = drawn(seed, *shape, low=0.1, high=0.9)
    for name, function in ELEMENTARY.items():
        argument = x + 1 if name == "acosh" else x
        kind = "log" if name == "log2" else name  # to the tables log2 is a function, not a price
        check_each(lambda a, k=kind, f=function: a.call(k, f), getattr(torch, name), argument)


@cases
@given(broadcast_shapes(2), seeds)
def test_powers(shapes, seed):
    x, y = (drawn(seed + place, *shape, low=0.1) for place, shape in enumerate(shapes))
    check_each(pointwise.power, torch.pow, x, y)
    check_each(lambda a: pointwise.power(a, 2.7), lambda a: a**2.7, x)
    check_each(lambda a: a.call("pow", lambda e: 2.5**e), lambda a: torch.pow(2.5, a), y)
    check_each(lambda a, b: a.call("atan2", lambda value: math.atan2(value, b.value)), torch.atan2, x, y)
    check_each(reductions.log_add_exp, torch.logaddexp, x, y)


@cases
@given(sizes, seeds, st.sampled_from((1.0, 0.5)))
def test_activations(shape, seed, factor):
    x = drawn(seed, *shape, low=-5, high=5)
    claims = {
        F.relu: lambda x: x.max(0),
        F.relu6: lambda a: clamp(a, 0, 6),
        partial(F.hardtanh, min_val=-2.0, max_val=3.0): lambda a: clamp(a, -2, 3),
        partial(F.leaky_relu, negative_slope=factor): partial(leaky_relu, slope=factor),
        partial(F.elu, alpha=factor): lambda x: select(x.value > 0, x, scaled(exp(x) - 1, factor)),
        partial(F.celu, alpha=factor): lambda x: select(x.value > 0, x, scaled(exp(scaled(x, 1 / factor)) - 1, factor)),
        F.selu: pointwise.selu,
        F.sigmoid: sigmoid,
        F.silu: lambda x: x * sigmoid(x),
        F.gelu: lambda x: x * (1 + pointwise.erf(x * math.sqrt(0.5))) * 0.5,  # arXiv 1606.08415
        partial(F.gelu, approximate="tanh"): pointwise.gelu_tanh,
        F.mish: lambda x: x * pointwise.tanh(softplus(x)),
        partial(F.softplus, beta=factor): partial(softplus, beta=factor),
        F.softsign: lambda x: x / (1 + abs(x)),
        F.hardswish: lambda x: x * clamp(x + 3, 0, 6) / 6,
        F.hardsigmoid: lambda x: clamp(x + 3, 0, 6) / 6,
        F.logsigmoid: pointwise.log_sigmoid,
        partial(F.hardshrink, lambd=factor): lambda x: softshrink(x, x, factor),
        partial(F.softshrink, lambd=factor): lambda x: softshrink(x, x - math.copysign(factor, x.value), factor),
        F.tanhshrink: lambda x: x - pointwise.tanh(x),
        partial(F.threshold, threshold=factor, value=-1.0): lambda x: select(x.value > factor, x, -1.0),
    }
    check_all(claims, x)
    share = drawn(seed, *shape, low=0.1, high=0.9)
    check_each(logit, torch.logit, share)
    check_each(lambda x: logit(clamp(x, 0.2, 0.8)), partial(torch.logit, eps=0.2), share)


@cases
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), seeds)
def test_gates_and_learnt_slopes(n, c, l, seed):
    both, slopes = drawn(seed, n, 2 * c, l), drawn(seed, 2 * c)

    check_claim(lambda tally, x: x[:, :c] * sigmoid(x[:, c:]), lambda x: F.glu(x, 1), both)
    check_claim(lambda tally, x, weight: each(leaky_relu, x, weight[:, None]), F.prelu, both, slopes)
    check_claim(
        lambda tally, *grids: each(pointwise.prelu_backward, *grids, results=2),
        aten._prelu_kernel_backward,
        drawn(seed + 1, n, 2 * c, l),
        both,
        drawn(seed + 2, n, 2 * c, l),
    )

    def backward(tally, gradient, x):
        return np.concatenate(pointwise.glu_backward(gradient, x[:, :c], x[:, c:]), 1)

    check_claim(backward, lambda g, x: aten.glu_backward(g, x, 1), drawn(seed + 1, n, c, l), both)


@cases
@given(sizes, seeds, st.sampled_from((1.0, 0.5)))
def test_activations_backward(shape, seed, factor):
    g, x = drawn(seed, *shape), drawn(seed + 1, *shape, low=-5, high=5)
    share = drawn(seed, *shape, low=0.1, high=0.9)
    claims = {
        lambda g, x: aten.threshold_backward(g, x, factor): lambda g, x: select(x.value > factor, g, 0.0),
        lambda g, x: aten.hardtanh_backward(g, x, -2, 3): lambda g, x: select(-2 < x.value < 3, g, 0.0),
        lambda g, x: aten.leaky_relu_backward(g, x, 0.1, False): lambda g, x: select(x.value > 0, g, g * 0.1),
        aten.gelu_backward: pointwise.gelu_backward,
        lambda g, x: aten.gelu_backward(g, x, approximate="tanh"): pointwise.gelu_tanh_backward,
        aten.silu_backward: lambda g, x: g * (s := sigmoid(x)) * (1 + x * (1 - s)),
        aten.mish_backward: pointwise.mish_backward,
        lambda g, x: aten.elu_backward(g, factor, 1, 1, False, x): lambda g, x: select(
            x.value > 0, g, scaled(g * exp(x), factor)
        ),
        lambda g, x: aten.elu_backward(g, factor, 1, 1, True, x): lambda g, y: select(y.value > 0, g, g * (y + factor)),
        lambda g, x: aten.softplus_backward(g, x, factor, 20): lambda g, x: g * (z := exp(scaled(x, factor))) / (z + 1),
        aten.hardswish_backward: lambda g, x: select(-3 < x.value < 3, g * (x / 3 + 0.5), g.value * (x.value >= 3)),
        aten.hardsigmoid_backward: lambda g, x: select(-3 < x.value < 3, g / 6, 0.0),
        lambda g, x: aten.hardshrink_backward(g, x, factor): lambda g, x: softshrink(x, g, factor),
        lambda g, x: aten.softshrink_backward(g, x, factor): lambda g, x: softshrink(x, g, factor),
    }
    check_all(claims, g, x)
    check_each(lambda g, y: g * (1 - y) * y, aten.sigmoid_backward, g, share)
    check_each(lambda g, y: g * (1 - y * y), aten.tanh_backward, g, share)
    check_each(lambda g, x: g / (x * (1 - x)), aten.logit_backward, g, share)
    check_each(pointwise.log_sigmoid_backward, aten.log_sigmoid_backward, g, x, (-x.abs()).exp())


@cases
@given(broadcast_shapes(2), seeds)
def test_complex_numbers(shapes, seed):
    z, w = (
        torch.complex(drawn(seed + 2 * i, *shape), drawn(seed + 2 * i + 1, *shape)) for i, shape in enumerate(shapes)
    )
    two = {
        torch.add: lambda a, b: a + b,
        torch.sub: lambda a, b: a - b,
        torch.mul: lambda a, b: a * b,
        torch.div: lambda a, b: a / b,
    }
    check_all(two, z, w)
    one = {
        torch.neg: lambda a: -a,
        torch.abs: abs,
        torch.exp: pointwise.complex_exp,
        torch.angle: lambda z: z.imag.call("atan2", lambda side: math.atan2(side, z.real.value)),
    }
    check_all(one, z)
    check_claim(lambda tally, row: tally.sum(row), lambda a: a.sum(), z.reshape(-1))


@st.composite
def reduced(draw):
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dims = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True))
    return tuple(shape), tuple(sorted(dims))


@cases
@given(reduced(), seeds, st.booleans(), st.integers(0, 1))
def test_reductions(case, seed, keep, correction):
    shape, dims = case
    x = drawn(seed, *shape)
    n = math.prod(shape[dim] for dim in dims)
    claims = {
        torch.sum: total_of,
        torch.mean: reductions.mean_of,
        torch.amax: reductions.largest_of,
        torch.amin: reductions.smallest_of,
        torch.logsumexp: reductions.log_sum_exp,
        torch.linalg.vector_norm: reductions.norm_of,
    }
    for order in (1, 2, 3.5, math.inf, -math.inf):
        claims[partial(torch.linalg.vector_norm, ord=order)] = partial(reductions.norm_of, order=order)
    if n > correction:
        claims[partial(torch.var, correction=correction)] = partial(reductions.variance_of, correction=correction)
        claims[partial(torch.std, correction=correction)] = partial(reductions.deviation_of, correction=correction)
    for function, program in claims.items():
        check_claim(along(program, *dims), lambda a, function=function: function(a, dim=dims, keepdim=keep), x)


def total_of(tally, x):
    return tally.sum(x, -1)


def along(program, *dims):
    """Return the program over some dimensions, which it gets as the last one of each array."""

    def program_of_last(tally, *arrays):
        moved = [np.moveaxis(array, dims, range(-len(dims), 0)) for array in arrays]
        return program(tally, *[array.reshape(*array.shape[: -len(dims)], -1) for array in moved])

    return program_of_last


@cases
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), seeds, st.data())
def test_reductions_over_one_or_all_dimensions(shape, seed, data):
    x = drawn(seed, *shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    whole = {
        torch.sum: total_of,
        torch.mean: reductions.mean_of,
        torch.prod: reductions.product_of,
        torch.max: reductions.largest_of,
        torch.min: reductions.smallest_of,
        torch.norm: reductions.norm_of,
        partial(torch.var, correction=0): reductions.variance_of,
    }
    for function, program in whole.items():
        check_claim(lambda tally, a, program=program: program(tally, a.ravel()), function, x)
    one = {
        torch.prod: reductions.product_of,
        torch.nansum: total_of,
        lambda a, dim: torch.max(a, dim).values: reductions.largest_of,
        lambda a, dim: torch.min(a, dim).values: reductions.smallest_of,
    }
    for function, program in one.items():
        check_claim(along(program, dim), lambda a, function=function: function(a, dim=dim), x)
    both = along(reductions.variance_and_mean_of, dim)
    check_claim(both, lambda a: torch.var_mean(a, dim, correction=0), x)


def kept(program, dim):
    """Return the program that makes as many numbers of each row along a dimension, in the tensor's own order."""
    return lambda tally, *arrays: np.moveaxis(along(program, dim)(tally, *arrays), -1, dim)


@cases
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), seeds, st.data())
def test_softmax(shape, seed, data):
    x, g = drawn(seed, *shape), drawn(seed + 1, *shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    check_claim(kept(reductions.softmax, dim), lambda a: a.softmax(dim), x)
    check_claim(kept(reductions.log_softmax, dim), lambda a: a.log_softmax(dim), x)
    backward, double = kept(reductions.softmax_backward, dim), torch.float64
    check_claim(backward, lambda g, y: aten._softmax_backward_data(g, y, dim, double), g, x.softmax(dim))
    backward = kept(reductions.log_softmax_backward, dim)
    check_claim(backward, lambda g, y: aten._log_softmax_backward_data(g, y, dim, double), g, x.log_softmax(dim))


@cases
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), seeds, st.data())
def test_running_sums(shape, seed, data):
    x = drawn(seed, *shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    claims = {
        torch.cumsum: reductions.running(lambda a, b: a + b, 0),
        torch.cumprod: reductions.running(lambda a, b: a * b, 1),
        torch.logcumsumexp: reductions.running(reductions.log_add_exp, -math.inf),
        lambda a, dim: torch.cummax(a, dim).values: reductions.running(lambda a, b: a.max(b), -math.inf),
        lambda a, dim: torch.cummin(a, dim).values: reductions.running(lambda a, b: a.min(b), math.inf),
    }
    for function, program in claims.items():
        check_claim(kept(program, dim), lambda a, function=function: function(a, dim=dim), x)


@cases
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), seeds)
def test_what_is_free(shape, seed):
    x, y = drawn(seed, *shape), drawn(seed + 1, *shape)
    free = (
        lambda a: a.transpose(0, -1).contiguous(),
        lambda a: a.to(torch.float32),
        lambda a: a.to(torch.int64) + 1,
        torch.zeros_like,
        torch.rand_like,
        lambda a: a.flip(0),
        lambda a: torch.cat((a, a)),
        lambda a: a.expand(2, *a.shape).clone(),
        lambda a: a.index_select(0, torch.tensor([0])),
    )
    for function in free:
        check_claim(lambda tally, a: None, function, x, compare=False)
    check_claim(lambda tally, a, b: None, lambda a, b: torch.where(torch.tensor([True]), a, b), x, y, compare=False)


@cases
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), seeds, coefficients)
def test_scattered_sums(rows_, columns, count_, seed, factor):
    x, y = drawn(seed, rows_, columns), drawn(seed + 1, count_, columns)
    index = torch.randint(rows_, (count_,), generator=torch.Generator().manual_seed(seed))

    def scattered(step):
        def program(tally, grid, source, index):
            grid = grid.copy()
            for row, place in zip(source, index, strict=True):
                grid[place] = each(step, grid[place], row)
            return grid

        return program

    plus = scattered(lambda a, b: a + b)
    scaled_plus = scattered(lambda a, b: a + scaled(b, factor))
    check_claim(scaled_plus, lambda a, b, i: a.index_add(0, i, b, alpha=factor), x, y, index)
    wide = lambda i: i[:, None].expand(-1, columns)  # noqa: E731
    check_claim(plus, lambda a, b, i: a.scatter_add(0, wide(i), b), x, y, index)
    check_claim(plus, lambda a, b, i: a.index_put((i,), b, accumulate=True), x, y, index)
    for reduce, step in (
        ("sum", lambda a, b: a + b),
        ("prod", lambda a, b: a * b),
        ("amax", lambda a, b: a.max(b)),
        ("amin", lambda a, b: a.min(b)),
    ):
        function = lambda a, b, i, reduce=reduce: a.scatter_reduce(0, wide(i), b, reduce)  # noqa: E731
        check_claim(scattered(step), function, x, y, index)
        function = lambda a, b, i, reduce=reduce: a.index_reduce(0, i, b, reduce)  # noqa: E731
        if reduce != "sum":
            check_claim(scattered(step), function, x, y, index)

    def from_zero(tally, source, index):
        return plus(tally, tally.zeros(rows_, columns), source, index)

    check_claim(from_zero, lambda g, i: aten.embedding_dense_backward(g, i, rows_, -1, False), y, index)


@cases
@given(sizes, seeds, st.sampled_from((0.25, 0.5)))
def test_dropout(shape, seed, share):
    x = drawn(seed, *shape)
    # The mask is random, its multiplication and that by 1/(1 - p) are not.
    check_each(lambda a: a * 1.0 * (1 / (1 - share)), partial(F.dropout, p=share, training=True), x, compare=False)
    check_each(lambda a: a, partial(F.dropout, p=share, training=False), x)
    check_each(
        lambda g, kept: g * float(kept) * (1 / (1 - share)),
        lambda g, mask: aten.native_dropout_backward(g, mask, 1 / (1 - share)),
        *(x, x > 0),
    )


@cases
@given(sizes, seeds, st.sampled_from(REDUCTIONS), coefficients)
def test_losses_of_elements(shape, seed, reduction, factor):
    x, y = drawn(seed, *shape), drawn(seed + 1, *shape)
    p, q = drawn(seed, *shape, low=0.1, high=0.9), drawn(seed + 1, *shape, low=0.1, high=0.9)
    signs = drawn(seed + 2, *shape).sign()
    claims = (
        (losses.squared, F.mse_loss, (x, y)),
        (lambda x, y: abs(x - y), F.l1_loss, (x, y)),
        (partial(losses.smooth, beta=factor), partial(F.smooth_l1_loss, beta=factor), (x, y)),
        (partial(losses.huber, delta=factor), partial(F.huber_loss, delta=factor), (x, y)),
        (losses.cross_entropy_of_bit, F.binary_cross_entropy, (p, q)),
        (losses.cross_entropy_of_logit, F.binary_cross_entropy_with_logits, (x, q)),
        (lambda x, y: y * log(y) - y * x, F.kl_div, (x, p)),
        (lambda x, y: exp(y) * (y - x), partial(F.kl_div, log_target=True), (x, y)),
        (lambda x, y: exp(x) - y * x, F.poisson_nll_loss, (x, y)),
        (lambda x, y: x - y * log(x + 1e-8), partial(F.poisson_nll_loss, log_input=False), (p, q)),
        (lambda x, y: log(1 + exp(-y * x)), F.soft_margin_loss, (x, signs)),
        (partial(losses.hinge_embedding, margin=1.0), F.hinge_embedding_loss, (x, signs)),
        (lambda x, y, sign: (-sign * (x - y) + 0.5).max(0), partial(F.margin_ranking_loss, margin=0.5), (x, y, signs)),
    )
    for step, function, tensors in claims:
        check_claim(loss(step, reduction), partial(function, reduction=reduction), *tensors)
    check_claim(
        loss(lambda x, y, w: (1 - y) * x - ((w - 1) * y + 1) * pointwise.log_sigmoid(x), reduction),
        lambda a, b, w: F.binary_cross_entropy_with_logits(a, b, pos_weight=w, reduction=reduction),
        *(x, q, p),
    )
    for step, function, tensors in claims[4:6]:
        check_claim(
            loss(lambda a, b, w, step=step: step(a, b) * w, reduction),
            lambda a, b, w, function=function: function(a, b, w, reduction=reduction),
            *(*tensors, drawn(seed + 3, *shape, low=0.1)),
        )


@cases
@given(sizes, seeds, st.sampled_from(REDUCTIONS), coefficients)
def test_losses_of_elements_backward(shape, seed, reduction, factor):
    x, y = drawn(seed, *shape), drawn(seed + 1, *shape)
    p, q = drawn(seed, *shape, low=0.1, high=0.9), drawn(seed + 1, *shape, low=0.1, high=0.9)
    signs = drawn(seed + 2, *shape).sign()
    number = REDUCTIONS.index(reduction)
    g = drawn(seed + 3, *(shape if reduction == "none" else ()))
    mean = reduction == "mean"
    share = 1 / x.numel() if mean else 1
    claims = (
        (lambda g, x, y: 2 * share * (x - y) * g, lambda g, a, b: aten.mse_loss_backward(g, a, b, number), (x, y)),
        (
            partial(losses.smooth_backward, beta=factor, factor=share),
            lambda g, a, b: aten.smooth_l1_loss_backward(g, a, b, number, factor),
            (x, y),
        ),
        (
            partial(losses.huber_backward, delta=factor, factor=share),
            lambda g, a, b: aten.huber_loss_backward(g, a, b, number, factor),
            (x, y),
        ),
        (
            lambda g, x, y: (g * share if mean else g) * (x - y) / ((1 - x) * x).max(1e-12),
            lambda g, a, b: aten.binary_cross_entropy_backward(g, a, b, None, number),
            (p, q),
        ),
        (
            lambda g, x, y: -y * share * g * (z := exp(-y * x)) / (z + 1),
            lambda g, a, b: aten.soft_margin_loss_backward(g, a, b, number),
            (x, signs),
        ),
    )
    for step, function, tensors in claims:
        check_each(step, function, g, *tensors)


@cases
@given(st.integers(1, 4), st.integers(2, 4), seeds, st.sampled_from(REDUCTIONS), st.sampled_from((0.0, 0.1)))
def test_losses_of_classes(n, classes, seed, reduction, smoothing):
    x, weight = drawn(seed, n, classes), drawn(seed + 1, classes, low=0.1)
    target = torch.randint(classes, (n,), generator=torch.Generator().manual_seed(seed))
    likelihood, nll = (partial(function, reduction=reduction) for function in (losses.likelihood, F.nll_loss))
    check_claim(lambda tally, a, t: likelihood(tally, a, t, None), nll, x, target)
    check_claim(likelihood, nll, x, target, weight)
    smoothed = partial(F.cross_entropy, label_smoothing=smoothing, reduction=reduction)
    check_claim(lambda tally, a, t: losses.cross_entropy(tally, a, t, smoothing, reduction), smoothed, x, target)
    soft = partial(losses.cross_entropy_of_probabilities, reduction=reduction)
    check_claim(soft, partial(F.cross_entropy, reduction=reduction), x, drawn(seed + 2, n, classes))
    # Of an image every pixel has its classes.
    image, labels = drawn(seed + 4, 2, classes, n), target.repeat(2, 1)
    check_claim(
        lambda tally, a, t: likelihood(tally, np.swapaxes(a, 1, 2).reshape(-1, classes), t.ravel(), None),
        lambda a, t: nll(a[..., None], t[..., None]),
        *(image, labels),
    )
    g = drawn(seed + 3, *((n,) if reduction == "none" else ()))
    check_claim(
        lambda tally, g, a, t, _: losses.likelihood_backward(tally, g, a, t, reduction),
        lambda g, a, t, total: aten.nll_loss_backward(g, a, t, None, REDUCTIONS.index(reduction), -100, total),
        *(g, x, target, torch.tensor(float(n), dtype=torch.float64)),
    )


@cases
@given(st.integers(1, 3), st.integers(1, 4), seeds, st.sampled_from(REDUCTIONS))
def test_losses_of_rows(n, d, seed, reduction):
    x, y, z = (drawn(seed + place, n, d) for place in range(3))

    check_claim(lambda tally, a, b: losses.distance(tally, a, b, 2, 1e-6), F.pairwise_distance, x, y)

    def triplets(tally, *grids):
        return losses.reduce(tally, losses.triplet(tally, *grids, 1.0), reduction)

    check_claim(triplets, lambda a, b, c: F.triplet_margin_loss(a, b, c, reduction=reduction), x, y, z)


decays = st.sampled_from((0.0, 0.1))
adams = st.builds(
    partial(optimizers.Adam, lr=0.1, beta1=0.8, beta2=0.9, eps=1e-3),
    weight_decay=decays,
    **dict.fromkeys(("amsgrad", "maximize", "decoupled"), st.booleans()),
)
sgds = st.builds(
    partial(optimizers.Sgd, lr=0.1),
    momentum=st.sampled_from((0.0, 0.9)),
    dampening=st.sampled_from((0.0, 0.25)),
    weight_decay=decays,
    **dict.fromkeys(("nesterov", "maximize"), st.booleans()),
)


@cases
@given(st.lists(sizes, min_size=1, max_size=3), seeds, adams)
def test_a_step_of_adam(shapes, seed, settings):
    lists = [[drawn(seed + 9 * place + i, *shape, low=0.1) for i, shape in enumerate(shapes)] for place in range(5)]
    step = 3

    def program(tally, *tensors):
        count_ = len(tensors) // 5
        adam = partial(optimizers.adam, step=step, settings=settings)
        return [each(adam, *tensors[i::count_], results=4)[0] for i in range(count_)]

    def fused(*tensors):
        size = len(tensors) // 5
        p, g, mean, square, top = (list(tensors[place * size : (place + 1) * size]) for place in range(5))
        options = asdict(settings)
        function = torch._fused_adamw_ if options.pop("decoupled") else torch._fused_adam_
        steps = [torch.tensor(float(step)) for _ in p]
        function(p, g, mean, square, top if settings.amsgrad else [], steps, **options)
        return tuple(p)

    check_claim(program, fused, *[tensor for each_ in lists for tensor in each_])


@cases
@given(sizes, seeds, sgds, st.booleans())
def test_a_step_of_sgd(shape, seed, settings, first):
    tensors = [drawn(seed + place, *shape) for place in range(3)]
    s = replace(settings, nesterov=settings.nesterov and settings.momentum != 0 and settings.dampening == 0)

    def program(tally, *grids):
        stepped = each(partial(optimizers.sgd, settings=s, first=first), *grids, results=2)
        return stepped if s.momentum else stepped[:1]

    def fused(p, g, buffer):
        torch._fused_sgd_([p], [g], [buffer] if s.momentum else [], is_first_step=first, **asdict(s))
        return (p, buffer) if s.momentum else (p,)

    check_claim(program, fused, *tensors)


@cases
@given(sizes, seeds, decays)
def test_a_step_of_adagrad(shape, seed, decay):
    tensors = [drawn(seed + place, *shape, low=0.1) for place in range(3)]

    def program(tally, *grids):
        return each(partial(optimizers.adagrad, lr=0.1, weight_decay=decay, eps=1e-3), *grids, results=2)

    def fused(p, g, total):
        rates = {"lr": 0.1, "lr_decay": 0.0, "weight_decay": decay, "eps": 1e-3}
        torch._fused_adagrad_([p], [g], [total], [torch.tensor(1.0)], maximize=False, **rates)
        return p, total

    check_claim(program, fused, *tensors)


@cases
@given(st.lists(sizes, min_size=1, max_size=3), seeds, coefficients)
def test_lists_of_tensors(shapes, seed, factor):
    xs, ys, zs = (
        [drawn(seed + 9 * place + i, *shape, low=0.1) for i, shape in enumerate(shapes)] for place in range(3)
    )

    def check(step, function, *lists):
        size = len(shapes)
        parts = lambda tensors: [tensors[i : i + size] for i in range(0, len(tensors), size)]  # noqa: E731
        check_claim(
            lambda tally, *grids: [each(step, *operands) for operands in zip(*parts(grids), strict=True)],
            lambda *tensors: function(*parts(tensors)),
            *[tensor for tensors in lists for tensor in tensors],
        )

    one = {
        torch._foreach_neg: lambda a: -a,
        torch._foreach_abs: abs,
        torch._foreach_sqrt: lambda a: a.sqrt(),
        torch._foreach_reciprocal: lambda a: 1 / a,
        torch._foreach_exp: exp,
        torch._foreach_sigmoid: sigmoid,
        lambda a: torch._foreach_add(a, 0.5): lambda a: a + 0.5,
        lambda a: torch._foreach_mul(a, 0.5): lambda a: a * 0.5,
        lambda a: torch._foreach_clamp_min(a, 0.5): lambda a: a.max(0.5),
    }
    for function, step in one.items():
        check(step, function, xs)
    two = {
        lambda a, b: torch._foreach_add(a, b, alpha=factor): lambda a, b: a + scaled(b, factor),
        lambda a, b: torch._foreach_sub(a, b, alpha=factor): lambda a, b: a - scaled(b, factor),
        torch._foreach_mul: lambda a, b: a * b,
        torch._foreach_div: lambda a, b: a / b,
        torch._foreach_maximum: lambda a, b: a.max(b),
        lambda a, b: torch._foreach_lerp(a, b, 0.3): lambda a, b: a + (b - a) * 0.3,
    }
    for function, step in two.items():
        check(step, function, xs, ys)
    three = {
        lambda a, b, c: torch._foreach_addcmul(a, b, c, value=factor): lambda a, b, c: a + scaled(b, factor) * c,
        lambda a, b, c: torch._foreach_addcdiv(a, b, c, value=factor): lambda a, b, c: a + scaled(b, factor) / c,
        torch._foreach_lerp: lambda a, b, weight: a + (b - a) * weight,
    }
    for function, step in three.items():
        check(step, function, xs, ys, zs)
    check_claim(
        lambda tally, *grids: [reductions.norm_of(tally, np.ravel(grid)) for grid in grids],
        lambda *tensors: torch._foreach_norm(list(tensors)),
        *xs,
    )


@cases
@given(sizes, seeds)
def test_quantisation(shape, seed):
    x = drawn(seed, *shape).to(torch.float32)
    scale, zero, low, high = 0.0625, 3, 0, 40
    rounded = lambda a, low, high: clamp(pointwise.rounded(round)(a / scale) + zero, low, high)  # noqa: E731
    for highest, function in {
        high: lambda a: torch.fake_quantize_per_tensor_affine(a, scale, zero, low, high),
        255: lambda a: torch.quantize_per_tensor(a, scale, zero, torch.quint8).dequantize(),
    }.items():
        check_each(lambda a, highest=highest: (rounded(a, 0, highest) - zero) * scale, function, x)
    if shape:
        scales, zeros = drawn(seed + 1, shape[0], low=0.1).to(torch.float32), torch.full((shape[0],), zero)

        def channelled(tally, grid, scales):
            rounded = lambda a, s: clamp(pointwise.rounded(round)(a / s) + zero, low, high)  # noqa: E731
            return each(lambda a, s: (rounded(a, s) - zero) * s, grid, scales.reshape(-1, *[1] * (grid.ndim - 1)))

        function = lambda a, s: torch.fake_quantize_per_channel_affine(a, s, zeros.to(torch.int32), 0, low, high)  # noqa: E731
        check_claim(channelled, function, x, scales)


@cases
@given(st.integers(1, 4), st.integers(2, 4), seeds, st.sampled_from(REDUCTIONS))
def test_losses_of_margins(n, classes, seed, reduction):
    x, y = drawn(seed, n, classes), drawn(seed + 1, n, classes)
    signs = drawn(seed + 2, n).sign()

    def cosines(tally, a, b, signs):
        return losses.reduce(tally, losses.cosine_embedding(tally, a, b, signs, 0.25), reduction)

    function = partial(F.cosine_embedding_loss, margin=0.25, reduction=reduction)
    check_claim(cosines, function, x, y, signs)
    target = torch.randint(classes, (n,), generator=torch.Generator().manual_seed(seed))
    weight = drawn(seed + 3, classes, low=0.1)
    for order in (1, 2):

        def margins(tally, a, t, *weights, order=order):
            own = weights[0] if weights else None
            rows_ = [losses.multi_margin(tally, row, place, order, 1.0, own) for row, place in zip(a, t, strict=True)]
            return losses.reduce(tally, rows_, reduction)

        function = partial(F.multi_margin_loss, p=order, reduction=reduction)
        check_claim(margins, function, x, target)
        check_claim(margins, lambda a, t, w, function=function: function(a, t, weight=w), x, target, weight)


@cases
@given(st.integers(2, 6))
def test_evenly_spaced_numbers(steps):
    for function in (
        partial(torch.linspace, 1.5, 1.5 + 0.5 * (steps - 1), steps),
        partial(torch.arange, 1.5, 1.4 + 0.5 * steps, 0.5),
    ):
        check_claim(
            lambda tally: [tally.number(step) * 0.5 + 1.5 for step in range(steps)],
            partial(function, dtype=torch.float64),
        )
