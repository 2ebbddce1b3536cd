"""The oracle of linear algebra and Fourier transforms, against programs that count their ops.

Elimination, Cholesky and substitution are exact sums over their loops. QR is a formula whose leading terms are
Householder's algorithm's; eigenvalues and singular values come from an iteration, so their rows are held to the
formulas of the book they cite and to each other.
"""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fvflops import FlopCountAnalysis
from tests.support.oracle import algebra
from tests.support.oracle.claim import DEFAULT, EXACT, Source, check_product, sources
from tests.support.oracle.number import Tally, values
from tests.support.random_cases import random_cases

aten = torch.ops.aten

dtypes = st.sampled_from([torch.float64, torch.float64, torch.complex128])
cases = random_cases(8)
sizes = st.integers(1, 5)


def batched(program):
    """Return a program that does the same with each of a batch of matrices."""
    return lambda tally, *batches: [program(tally, *matrices) for matrices in zip(*batches, strict=True)]


@cases
@given(sources, sizes, sizes, dtypes)
def test_cholesky(source, b, n, dtype):
    root = source(b, n, n, dtype=dtype)
    check_product(batched(algebra.cholesky), torch.linalg.cholesky, root @ root.mH + torch.eye(n))


@cases
@given(sources, sizes, sizes, sizes, dtypes)
def test_lu_factor(source, b, m, n, dtype):
    check_product(
        batched(lambda tally, matrix: algebra.lu(tally, matrix)[0]),
        lambda matrix: torch.linalg.lu_factor(matrix)[0],
        source(b, m, n, dtype=dtype),
    )


@cases
@given(sources, sizes, sizes, dtypes)
def test_lu(source, m, n, dtype):
    check_product(
        lambda tally, matrix: algebra.unpack(tally, *algebra.lu(tally, matrix)),
        torch.linalg.lu,
        source(m, n, dtype=dtype),
    )


@cases
@given(sources, sizes, sizes, sizes, st.booleans(), st.booleans(), dtypes)
def test_solve_triangular(source, b, n, columns, upper, ones, dtype):
    matrix = source(b, n, n, dtype=dtype)
    matrix = matrix.triu() if upper else matrix.tril()
    if ones:
        matrix = matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1)) + torch.eye(n)
    check_product(
        batched(lambda tally, matrix, right: algebra.solve_triangular(tally, matrix, right, upper, ones)),
        lambda matrix, right: torch.linalg.solve_triangular(matrix, right, upper=upper, unitriangular=ones),
        matrix + 3 * torch.eye(n) * (not ones),
        source(b, n, columns, dtype=dtype),
    )


@cases
@given(sources, sizes, sizes, sizes, dtypes)
def test_solve(source, b, n, columns, dtype):
    check_product(
        batched(algebra.solve),
        torch.linalg.solve,
        source(b, n, n, dtype=dtype),
        source(b, n, columns, dtype=dtype),
        tolerance=1e-6,
    )


@cases
@given(sources, sizes, sizes)
def test_lu_solve(source, n, columns):
    packed, pivots = torch.linalg.lu_factor(source(n, n))
    order = list(range(n))
    for row, pivot in enumerate(pivots.tolist()):
        order[row], order[pivot - 1] = order[pivot - 1], order[row]
    check_product(
        lambda tally, packed, right: algebra.solve_factored(tally, packed, order, right),
        lambda packed, right: torch.linalg.lu_solve(packed, pivots, right),
        packed,
        source(n, columns),
        tolerance=1e-6,
    )


@cases
@given(sources, sizes, sizes, dtypes)
def test_inverse(source, b, n, dtype):
    check_product(batched(algebra.inverse), torch.linalg.inv, source(b, n, n, dtype=dtype), tolerance=1e-6)


@cases
@given(sources, sizes, sizes, sizes)
def test_cholesky_solve(source, b, n, columns):
    lower = source(b, n, n).tril() + 3 * torch.eye(n)
    check_product(
        batched(lambda tally, right, lower: algebra.solve_by_cholesky(tally, lower, right)),
        torch.cholesky_solve,
        source(b, n, columns),
        lower,
    )


@cases
@given(sources, sizes, sizes)
def test_cholesky_inverse(source, b, n):
    lower = source(b, n, n).tril() + 3 * torch.eye(n)
    check_product(batched(algebra.inverse_by_cholesky), torch.cholesky_inverse, lower)


@cases
@given(sources, sizes, sizes, dtypes)
def test_determinant(source, b, n, dtype):
    check_product(batched(algebra.determinant), torch.linalg.det, source(b, n, n, dtype=dtype))


@cases
@given(sources, sizes, sizes)
def test_slogdet(source, b, n):
    def program(tally, batch):
        pairs = [algebra.logarithm_of_determinant(tally, matrix) for matrix in batch]
        return tuple(zip(*pairs, strict=True))

    check_product(program, torch.linalg.slogdet, source(b, n, n))


@cases
@given(sources, sizes)
def test_ldl_factor(source, n):
    root = source(n, n)
    matrix = root @ root.T / 10 + 3 * torch.diag(1 + torch.rand(n))
    check_product(algebra.ldl, lambda matrix: torch.linalg.ldl_factor(matrix)[0].tril(), matrix)


@cases
@given(sources, sizes, sizes)
def test_ldl_solve(source, n, columns):
    root = source(n, n)
    packed, pivots = torch.linalg.ldl_factor(root @ root.T / 10 + 3 * torch.eye(n))
    check_product(
        algebra.solve_by_ldl,
        lambda packed, right: torch.linalg.ldl_solve(packed, pivots, right),
        packed.tril(),
        source(n, columns),
    )


def macs_of(function, *tensors):
    return sum(entry.macs for entry in FlopCountAnalysis(function, tensors, table=DEFAULT).counts().entries)


@cases
@given(sources, sizes, sizes)
def test_qr_is_what_householder_computes(source, m, n):
    matrix = source(m, n)
    tally = Tally()
    q, r = (
        torch.tensor(values(part), dtype=torch.float64) for part in algebra.householder(tally, tally.numbers(matrix))
    )
    torch.testing.assert_close(q @ r, matrix)
    torch.testing.assert_close(q.T @ q, torch.eye(min(m, n), dtype=torch.float64))
    expected = torch.linalg.qr(matrix)
    torch.testing.assert_close(r.abs(), expected.R.abs())
    torch.testing.assert_close(q.abs(), expected.Q.abs())


@pytest.mark.parametrize("m, n", [(32, 16), (24, 24), (16, 32)])
def test_qr_counts_the_leading_terms(m, n):
    """The reflections and Q from them: what the program does beyond the table is of lower order, below 2 columns' work.

    Doubling the sizes halves the share that the table leaves out.
    """
    shares = []
    for scale in (1, 2):
        tally = Tally()
        matrix = Source(scale)(m * scale // 2, n * scale // 2)
        algebra.householder(tally, tally.numbers(matrix))
        table = macs_of(torch.linalg.qr, matrix)
        shares.append(tally.macs / table - 1)
    assert 0 < shares[1] < 0.6 * shares[0]
    assert shares[1] < 4 / min(m, n)


# Golub and Van Loan, Matrix Computations, 4th ed.: flops of the sections 8.3 (eigenvectors and eigenvalues of symmetric
# matrices), 7.5 (the same of any matrix) and 8.6 (singular values, with U and V, without).
def test_eigenvalues_are_half_of_the_flops_of_the_book():
    n = 6
    matrix = torch.eye(n, dtype=torch.float64)
    assert macs_of(torch.linalg.eigh, matrix) * 2 == 9 * n**3
    assert macs_of(lambda a: aten._linalg_eigh(a, compute_v=False), matrix) * 2 == 4 * n**3 // 3
    assert macs_of(torch.linalg.eig, matrix) * 2 == 25 * n**3
    assert macs_of(aten._linalg_eigvals, matrix) * 2 == 10 * n**3


@pytest.mark.parametrize("m, n", [(6, 6), (8, 6), (6, 10)])
def test_singular_values_are_half_of_the_flops_of_the_book(m, n):
    matrix = Source(0)(m, n)
    long, short = max(m, n), min(m, n)
    thin = 14 * long * short**2 + 8 * short**3
    full = 4 * long**2 * short + 8 * long * short**2 + 9 * short**3
    bare = 4 * long * short**2 - 4 * short**3 // 3
    assert macs_of(lambda a: aten._linalg_svd(a, compute_uv=False), matrix) * 2 == bare
    assert macs_of(lambda a: torch.linalg.svd(a, full_matrices=False), matrix) * 2 == thin
    assert macs_of(lambda a: torch.linalg.svd(a, full_matrices=True), matrix) * 2 == full


@pytest.mark.parametrize("k", range(1, 8))
def test_a_fast_fourier_transform_does_no_more(k):
    """5 n log2 n is a convention: a transform by halves does n/2 log2 n products of 6 flops and as many pairs of sums.

    That is 5 n log2 n exactly, trivial roots multiplied too; the rest of the factor is what better algorithms save.
    """
    n = 2**k
    numbers = Source(k)(n, dtype=torch.complex128)
    tally = Tally()
    result = torch.tensor(values(algebra.fft(tally, tally.numbers(numbers))), dtype=torch.complex128)
    torch.testing.assert_close(result, torch.fft.fft(numbers))
    assert tally.flops(dict(EXACT.constants)) == 5 * n * k
    for table in (DEFAULT, EXACT):
        assert FlopCountAnalysis(torch.fft.fft, (numbers,), table=table).total() == 5 * n * k
        assert FlopCountAnalysis(torch.fft.rfft, (numbers.real,), table=table).total() == Fraction(5 * n * k, 2)
    # Back, each of n real or complex numbers is multiplied by 1/n.
    assert FlopCountAnalysis(torch.fft.ifft, (numbers,), table=EXACT).total() == 5 * n * k + 2 * n
    half = numbers[: n // 2 + 1]
    assert FlopCountAnalysis(torch.fft.irfft, (half,), table=EXACT).total() == Fraction(5 * n * k, 2) + n


@pytest.mark.parametrize("k", range(1, 8))
def test_a_transform_that_skips_trivial_roots_is_within_a_third(k):
    """Roots 1 and -i need no product: below the convention, and more than half of it."""
    n = 2**k
    tally = Tally()
    numbers = Source(k)(n, dtype=torch.complex128)
    result = algebra.fft(tally, tally.numbers(numbers), skip=True)
    torch.testing.assert_close(torch.tensor(values(result), dtype=torch.complex128), torch.fft.fft(numbers))
    done = tally.flops(dict(EXACT.constants))
    assert Fraction(2, 5) * 5 * n * k <= done < 5 * n * k


@pytest.mark.parametrize("shape", [(4, 8), (2, 4, 4)])
def test_a_transform_of_several_dimensions_transforms_each(shape):
    numbers = Source(0)(*shape, dtype=torch.complex128)
    together = FlopCountAnalysis(torch.fft.fftn, (numbers,), table=EXACT).total()
    assert together == 5 * numbers.numel() * sum(math.log2(size) for size in shape)
    one_by_one = [
        FlopCountAnalysis(lambda x, axis=axis: torch.fft.fft(x, dim=axis), (numbers,), table=EXACT).total()
        for axis in range(len(shape))
    ]
    assert together == sum(one_by_one)
