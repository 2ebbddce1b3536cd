"""The oracle of products: matrix products of every kind against programs that count their ops."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.support.oracle import products
from tests.support.oracle.claim import Source, check_counts, check_product, check_results, sources
from tests.support.oracle.number import Tally, each, linear, matmul
from tests.support.random_cases import random_cases

aten = torch.ops.aten

cases = random_cases(10)
sizes = st.integers(1, 4)
factors = st.sampled_from([1, 1, 2, 0.5])
betas = st.sampled_from([1, 1, 2, 0.5, 0])
dtypes = st.sampled_from([torch.float64, torch.float64, torch.complex128])


@cases
@given(sources, st.lists(sizes, max_size=3), sizes, sizes, st.booleans(), dtypes)
def test_linear(source, batch, k, n, biased, dtype):
    tensors = [source(*batch, k, dtype=dtype), source(n, k, dtype=dtype), *([source(n, dtype=dtype)] if biased else [])]
    check_product(linear, F.linear, *tensors)


@cases
@given(sources, sizes, sizes, sizes, st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any))
def test_linear_backward(source, m, k, n, mask):
    def differentiate(x, grad, weight):
        return (grad @ weight if mask[0] else None, grad.T @ x if mask[1] else None, grad.sum(0) if mask[2] else None)

    check_product(
        lambda tally, *tensors: products.linear_backward(tally, *tensors, mask),
        lambda x, grad, weight: aten.linear_backward(x, grad, weight, list(mask)),
        *(source(m, k), source(m, n), source(n, k)),
        expected=differentiate,
    )


# Name → program, function, and the sizes of the operands, a letter each.
PRODUCTS = {
    "mm": (matmul, torch.mm, "mk kn"),
    "bmm": (matmul, torch.bmm, "bmk bkn"),
    "mv": (matmul, torch.mv, "mk k"),
    "dot": (Tally.dot, torch.dot, "k k"),
    "outer": (products.outer, torch.outer, "m n"),
    "ger": (products.outer, torch.ger, "m n"),
    "kron": (products.kron, torch.kron, "ab cd"),
    "multi_dot": (products.multi_dot, lambda *matrices: torch.linalg.multi_dot(matrices), "ab bc cd"),
    "multi_dot of five": (products.multi_dot, lambda *matrices: torch.linalg.multi_dot(matrices), "ab bc cd de ef"),
    "chain_matmul": (products.multi_dot, torch.chain_matmul, "ab bc cd"),
    "chain_matmul of five": (products.multi_dot, torch.chain_matmul, "ab bc cd de ef"),
}
REAL = ("kron", "multi_dot", "chain_matmul")
# The same with what is added: its sizes, of which one is drawn; 1 is broadcast.
ADDED = {
    "addmm": (matmul, torch.addmm, "mk kn", ("mn", "n", "1n", "m1")),
    "baddbmm": (matmul, torch.baddbmm, "bmk bkn", ("bmn", "1mn", "b1n")),
    "addmv": (matmul, torch.addmv, "mk k", ("m",)),
    "addr": (products.outer, torch.addr, "m n", ("mn",)),
}


def draw_operands(source, data, terms, dtype=torch.float64):
    """Return a tensor for each term, a letter of which is one size in all."""
    size = {"1": 1, **{name: data.draw(sizes) for name in sorted(set("".join(terms)) - {"1"})}}
    return [source(*[size[name] for name in term], dtype=dtype) for term in terms]


@pytest.mark.parametrize("name", PRODUCTS)
@cases
@given(sources, dtypes, st.data())
def test_product(name, source, dtype, data):
    program, function, terms = PRODUCTS[name]
    dtype = torch.float64 if name.startswith(REAL) else dtype
    check_product(program, function, *draw_operands(source, data, terms.split(), dtype))


@cases
@given(sources, sizes, dtypes)
def test_vdot(source, k, dtype):
    program = products.vdot if dtype.is_complex else Tally.dot
    check_product(program, torch.vdot, source(k, dtype=dtype), source(k, dtype=dtype))


@pytest.mark.parametrize("name", ADDED)
@cases
@given(sources, betas, factors, dtypes, st.data())
def test_product_that_is_added(name, source, beta, alpha, dtype, data):
    program, function, terms, own = ADDED[name]
    drawn = dtype if name == "addmm" else torch.float64
    check_product(
        lambda tally, c, a, b: products.add_product(program(tally, a, b), c, beta, alpha),
        lambda c, a, b: function(c, a, b, beta=beta, alpha=alpha),
        *draw_operands(source, data, [data.draw(st.sampled_from(own)), *terms.split()], drawn),
        products=name != "addr",
    )


@cases
@given(sources, sizes, sizes, sizes, sizes, betas, factors, st.data())
def test_addbmm(source, b, m, k, n, beta, alpha, data):
    """The products of a batch are summed in the multiply-adds of one longer product."""
    own = data.draw(st.sampled_from([(m, n), (n,)]))

    def program(tally, c, x, y):
        return products.add_product(matmul(tally, np.concatenate(x, 1), np.concatenate(y)), c, beta, alpha)

    operands = source(*own), source(b, m, k), source(b, k, n)
    check_product(program, lambda c, x, y: torch.addbmm(c, x, y, beta=beta, alpha=alpha), *operands)


@cases
@given(sources, st.lists(sizes, max_size=2), sizes, sizes, sizes, dtypes, st.data())
def test_matmul(source, batch, m, k, n, dtype, data):
    broadcast = [data.draw(st.sampled_from([size, 1])) for size in batch]
    broadcast = broadcast[data.draw(st.integers(0, len(batch))) :]
    batches = data.draw(st.permutations([batch, broadcast]))
    left, right = (*batches[0], m, k), (*batches[1], k, n)
    vectors = data.draw(st.sampled_from(["neither", "left", "right", "both"]))
    left = (k,) if vectors in ("left", "both") else left
    right = (k,) if vectors in ("right", "both") else right
    check_product(matmul, torch.matmul, source(*left, dtype=dtype), source(*right, dtype=dtype))


EQUATIONS = (
    *("ij,jk->ik", "bij,bjk->bik", "bhqd,bhkd->bhqk", "ij,ij->", "i,j->ij", "ij,j->ij", "ijk,jl->il"),
    *("ij,jk,kl->il", "bi,oij,bj->bo", "ii->i", "ij->j", "ijk->", "abc,cd,de->abe"),
)


def einsum_from_left(equation, *operands):
    """Return an einsum of operands taken from left to right; opt_einsum, where installed, finds another order."""
    with torch.backends.opt_einsum.flags(enabled=False):
        return torch.einsum(equation, *operands)


@pytest.mark.parametrize("equation", EQUATIONS)
@random_cases(5)
@given(sources, st.data())
def test_einsum(equation, source, data):
    terms = equation.split("->")[0].split(",")
    check_product(
        lambda tally, *operands: products.einsum(tally, equation, *operands),
        lambda *operands: einsum_from_left(equation, *operands),
        *draw_operands(source, data, terms),
    )


@cases
@given(sources, sizes, sizes, sizes, sizes, st.booleans())
def test_bilinear(source, b, i, j, o, biased):
    bias = [source(o)] if biased else []
    check_product(products.bilinear, F.bilinear, source(b, i), source(b, j), source(o, i, j), *bias)


@cases
@given(sources, sizes, sizes, sizes, st.sampled_from([1.0, 2.0, 3.0, 0.5, math.inf]))
def test_cdist(source, m, n, k, p):
    check_product(
        lambda tally, a, b: products.cdist(tally, a, b, p),
        lambda a, b: torch.cdist(a, b, p=p),
        *(source(m, k), source(n, k)),
        products=p == 2,  # the multiply-adds of `default` stand for any norm's work
    )


@random_cases(8)
@given(sources, st.integers(26, 28), sizes, sizes)
def test_cdist_by_product(source, m, n, k):
    """From 26 rows on, Euclidean distances are one matrix product."""
    check_product(products.cdist_by_product, torch.cdist, source(m, k), source(n, k), tolerance=1e-6)


@cases
@given(sources, sizes, sizes, sizes, st.sampled_from([1.0, 2.0, 3.0, 1.5]))
def test_cdist_backward(source, m, n, k, p):
    left, right = source(m, k), source(n, k)
    check_product(
        lambda tally, grad, a, b, distances: products.cdist_backward(tally, grad, a, b, p, distances),
        lambda grad, a, b, distances: aten._cdist_backward(grad, a, b, p, distances),
        *(source(m, n), left, right, torch.cdist(left, right, p=p)),
    )


@cases
@given(sources, st.integers(2, 4), sizes, st.sampled_from([1.0, 2.0, 3.0]))
def test_pdist(source, m, k, p):
    def program(tally, rows):
        pairs = np.array([rows[i] - rows[j] for i, j in itertools.combinations(range(m), 2)])
        return products.distance(tally, pairs, p)

    check_product(program, lambda rows: F.pdist(rows, p), source(m, k), products=p == 2)


@cases
@given(sources, st.integers(2, 4), sizes, st.sampled_from([1.0, 2.0, 3.0, 1.5]))
def test_pdist_backward(source, m, k, p):
    rows = source(m, k)
    distances = F.pdist(rows, p)
    check_product(
        lambda tally, grad, rows, distances: products.pdist_backward(tally, grad, rows, p, distances),
        lambda grad, rows, distances: aten._pdist_backward(grad, rows, p, distances),
        *(source(*distances.shape), rows, distances),
    )


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped_mm")
@cases
@given(sources, st.lists(st.integers(0, 3), min_size=1, max_size=3), sizes, sizes)
def test_grouped_mm(source, groups, k, n):
    ends = torch.tensor(groups, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    # The kernel wants rows of 16 bytes.
    rows, matrices = source(int(ends[-1]), 8 * k).bfloat16(), source(len(groups), 8 * k, 8 * n).bfloat16()
    check_product(
        lambda tally, a, b: products.grouped_mm(tally, a, b, ends.tolist()),
        lambda a, b: F.grouped_mm(a, b, offs=ends),
        *(rows, matrices),
        tolerance=0.1,
    )


@cases
@given(sources, st.integers(17, 20), st.integers(1, 2), st.integers(1, 2))
def test_int_mm(source, m, k, n):
    whole = [source(*shape).mul(20).to(torch.int8) for shape in ((m, 8 * k), (8 * k, 8 * n))]
    check_product(lambda tally, a, b: matmul(tally, tally.numbers(a), tally.numbers(b)), torch._int_mm, *whole)


@cases
@given(sources, sizes, st.integers(1, 2), st.integers(1, 2))
def test_weight_int8pack_mm(source, m, k, n):
    """Weights of whole numbers, and a factor for each column of the result."""
    weight = source(16 * n, 16 * k).mul(20).to(torch.int8)

    def program(tally, a, factors):
        return linear(tally, a, tally.numbers(weight)) * factors

    check_product(
        program,
        lambda a, factors: aten._weight_int8pack_mm(a, weight, factors),
        *(source(m, 16 * k).bfloat16(), source(16 * n).bfloat16()),
        tolerance=0.1,
    )


@cases
@given(sources, sizes, sizes, sizes, st.booleans())
def test_addmm_activation(source, m, k, n, gelu):
    def activate(x):
        if not gelu:
            return x.max(0.0)
        inner = ((x * x * x * 0.044715) + x) * math.sqrt(2 / math.pi)
        return x * 0.5 * (inner.call("tanh", math.tanh) + 1.0)

    def expect(c, a, b):
        return F.gelu(c + a @ b, approximate="tanh") if gelu else F.relu(c + a @ b)

    check_product(
        lambda tally, c, a, b: each(activate, matmul(tally, a, b) + c),
        lambda c, a, b: aten._addmm_activation(c, a, b, use_gelu=gelu),
        *(source(n), source(m, k), source(k, n)),
        expected=expect,
    )


@cases
@given(sources, sizes, sizes, sizes, st.booleans())
def test_sparse_mm(source, m, k, n, rows):
    """What is not stored is not multiplied."""
    left = source(m, k)
    left = left * (left > 0)
    right = source(k, n)
    tally = Tally()
    mine = products.sparse_mm(tally, tally.numbers(left), tally.numbers(right))
    stored = left.to_sparse_csr() if rows else left.to_sparse()
    check_results(mine, torch.sparse.mm(stored, right))
    check_counts(tally, torch.sparse.mm, stored, right)


@random_cases(5)
@given(sources, st.integers(1, 2), st.integers(1, 2), st.booleans())
def test_scaled_mm(source, m, n, biased):
    a, b = (source(16 * rows, 16).to(torch.float8_e4m3fn) for rows in (m, n))
    one, other = (source(1).abs().float()[0] for _ in range(2))

    def program(tally, a, b, one, other, *bias):
        scaled = matmul(tally, a, b.T) * one * other
        return scaled + bias[0] if bias else scaled

    check_product(
        program,
        lambda a, b, one, other, *bias: torch._scaled_mm(a, b.t(), one, other, *bias, out_dtype=torch.float32),
        *(a, b, one, other, *([source(16 * n).float()] if biased else [])),
        tolerance=0.01,
    )


@cases
@given(sources, sizes, st.lists(st.integers(0, 3), min_size=1, max_size=3), st.data())
def test_embedding_bag(source, d, lengths, data):
    mode = data.draw(st.sampled_from(["sum", "mean", "max"]))
    indices = [data.draw(st.integers(0, 4)) for _ in range(sum(lengths))]
    offsets = [sum(lengths[:bag]) for bag in range(len(lengths))]
    weights = [source(len(indices))] if mode == "sum" and data.draw(st.booleans()) else []
    if not indices:
        return
    bags = torch.tensor(indices), torch.tensor(offsets)

    def function(table, *weights):
        return F.embedding_bag(bags[0], table, bags[1], mode=mode, per_sample_weights=weights[0] if weights else None)

    def program(tally, table, *weights):
        return products.embedding_bag(tally, table, indices, offsets, mode, *weights)

    check_product(program, function, source(5, d), *weights, products=False)


@cases
@given(sources, sizes, st.lists(sizes, min_size=2, max_size=3), st.booleans())
def test_affine_grid(source, b, spatial, align_corners):
    check_product(
        lambda tally, matrices: products.affine_grid(tally, matrices, spatial, align_corners),
        lambda matrices: F.affine_grid(matrices, [b, 1, *spatial], align_corners=align_corners),
        source(b, len(spatial), len(spatial) + 1),
    )


def product_with_one_more_addition(tally, a, b):
    result = matmul(tally, a, b)
    result[0, 0] = result[0, 0] + 0.0
    return result


def test_the_claim_sees_what_is_wrong():
    tensors = (Source(0)(2, 3), Source(1)(3, 2))
    assert check_product(matmul, torch.mm, *tensors).macs == 12
    with pytest.raises(AssertionError, match="exact counts 24"):
        check_product(product_with_one_more_addition, torch.mm, *tensors)
    with pytest.raises(AssertionError, match="default counts 12 multiply-adds"):
        check_product(lambda tally, a, b: tally.sum(a[:, None] * b.T, -1), torch.mm, *tensors)
    with pytest.raises(AssertionError, match="not close"):
        check_product(lambda tally, a, b: matmul(tally, a, b[:, ::-1]), torch.mm, *tensors)
