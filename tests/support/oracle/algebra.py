"""The algebra programs: factorisations, solves and Fourier transforms, as textbook loops over counting numbers."""

import cmath
import math
from typing import Any

import numpy as np

from tests.support.oracle.number import Complex, Number, Tally, each, minus_product
from tests.support.oracle.pointwise import sign


def cholesky(tally: Tally, matrix: Any) -> Any:
    """Return L of L L^H, row by row; the diagonal is real."""
    n = len(matrix)
    lower = tally.zeros(n, n)
    for i in range(n):
        for j in range(i + 1):
            rest = matrix[i, j]
            for k in range(j):
                rest = rest.minus_product(lower[i, k], _conjugate(lower[j, k]))
            if i == j:
                lower[i, j] = (rest.real if isinstance(rest, Complex) else rest).sqrt()
            else:
                lower[i, j] = rest / lower[j, j]
    return lower


def _conjugate(number):
    # The multiply-add that it goes into takes the sign.
    is_complex = isinstance(number, Complex)
    return Complex(number.real, Number(-number.imag.value, number.imag.tally)) if is_complex else number


def _size(number: Any) -> float:
    """Return the measure by which LAPACK chooses pivots."""
    return abs(number.value.real) + abs(number.value.imag)


def identity(tally: Tally, matrix: Any) -> Any:
    is_complex = isinstance(matrix[0, 0], Complex)
    return tally.numbers(np.eye(len(matrix), dtype=complex if is_complex else float))


def lu(tally: Tally, matrix: Any) -> tuple[Any, list[int]]:
    """Return L below and U on the diagonal and above, in one matrix, and the order of its rows.

    Elimination with partial pivoting, whose search for the largest number of a column is not arithmetic.
    """
    rows, order = matrix.copy(), np.arange(len(matrix))
    for k in range(min(rows.shape)):
        pivot = max(range(k, len(rows)), key=lambda i: _size(rows[i, k]))
        rows[[k, pivot]], order[[k, pivot]] = rows[[pivot, k]], order[[pivot, k]]
        for i in range(k + 1, len(rows)):
            rows[i, k] = rows[i, k] / rows[k, k]
            rows[i, k + 1 :] = minus_product(rows[i, k + 1 :], rows[i, k], rows[k, k + 1 :])
    return rows, order.tolist()


def unpack(tally: Tally, packed: Any, order: list[int]) -> tuple[Any, Any, Any]:
    """Return the permutation, L and U of what `lu` returns."""
    k, zero = min(packed.shape), tally.number(0)
    lower = np.where(np.tri(*packed.shape, -1, dtype=bool), packed, tally.numbers(np.eye(*packed.shape)))[:, :k]
    upper = np.where(np.tri(*packed.shape, -1, dtype=bool), zero, packed)[:k]
    return tally.numbers(np.eye(len(packed))[order].T), lower, upper


def solve_triangular(tally: Tally, matrix: Any, right: Any, upper: bool, unitriangular: bool) -> Any:
    """Return X of A X = B by substitution; a diagonal of ones divides nothing."""
    n, solved = len(matrix), right.copy()
    for i in reversed(range(n)) if upper else range(n):
        for j in range(i + 1, n) if upper else range(i):
            solved[i] = minus_product(solved[i], matrix[i, j], solved[j])
        if not unitriangular:
            solved[i] = each(lambda number, i=i: number / matrix[i, i], solved[i])
    return solved


def solve(tally: Tally, matrix: Any, right: Any) -> Any:
    """Return X of A X = B: elimination and two substitutions."""
    return solve_factored(tally, *lu(tally, matrix), right)


def solve_factored(tally: Tally, packed: Any, order: list[int], right: Any) -> Any:
    """Return X of P L U X = B, of what `lu` returns: two substitutions."""
    lower = solve_triangular(tally, packed, right[order], False, True)
    return solve_triangular(tally, packed, lower, True, False)


def inverse(tally: Tally, matrix: Any) -> Any:
    return solve(tally, matrix, identity(tally, matrix))


def solve_by_cholesky(tally: Tally, lower: Any, right: Any) -> Any:
    """Return X of L L^T X = B: two substitutions."""
    first = solve_triangular(tally, lower, right, False, False)
    return solve_triangular(tally, lower.T, first, True, False)


def inverse_by_cholesky(tally: Tally, lower: Any) -> Any:
    """Return the inverse of L L^T: the solution for each column of the identity, whose zeros are not looked for."""
    return solve_by_cholesky(tally, lower, identity(tally, lower))


def _sign_of(order: list[int]) -> float:
    swaps = sum(order[i] > order[j] for i in range(len(order)) for j in range(i + 1, len(order)))
    return -1.0 if swaps % 2 else 1.0


def determinant(tally: Tally, matrix: Any) -> Any:
    """Return the determinant: elimination, then the product of the diagonal, an accumulator that begins at 1."""
    packed, order = lu(tally, matrix)
    result = tally.number(_sign_of(order))
    if isinstance(packed[0, 0], Complex):
        result = Complex(result, tally.number(0))
    return np.multiply.reduce(packed.diagonal(), initial=result)


def logarithm_of_determinant(tally: Tally, matrix: Any) -> tuple[Number, Number]:
    """Return the sign of the determinant, a product of signs, and the sum of the logarithms of the diagonal."""
    packed, order = lu(tally, matrix)
    signs = each(sign, packed.diagonal())
    total = tally.sum(np.log(abs(packed.diagonal())))
    return np.multiply.reduce(signs, initial=tally.number(_sign_of(order))), total


def ldl(tally: Tally, matrix: Any) -> Any:
    """Return L below and D on the diagonal, of L D L^T with ones on L's diagonal, where no pivots are needed."""
    packed = matrix.copy()
    for j in range(len(packed)):
        scaled = [packed[j, k] * packed[k, k] for k in range(j)]
        for k in range(j):
            packed[j:, j] = minus_product(packed[j:, j], packed[j:, k], scaled[k])
        packed[j + 1 :, j] = packed[j + 1 :, j] / packed[j, j]
    return np.where(np.tri(len(packed), dtype=bool), packed, tally.number(0))


def solve_by_ldl(tally: Tally, packed: Any, right: Any) -> Any:
    """Return X of L D L^T X = B: two substitutions without divisions, and the diagonal's between them."""
    first = solve_triangular(tally, packed, right, False, True)
    return solve_triangular(tally, packed.T, first / packed.diagonal()[:, None], True, True)


def householder(tally: Tally, matrix: Any) -> tuple[Any, Any]:
    """Return Q and R, reduced, by Householder reflections that are then applied to the identity's first columns."""
    rows, reflectors, k = matrix.copy(), [], min(matrix.shape)
    for start in range(k):
        vector = rows[start:, start].copy()
        norm = tally.dot(vector, vector).sqrt()
        vector[0] = vector[0] + norm * (1.0 if vector[0].value >= 0 else -1.0)
        reflectors.append((start, vector, 2.0 / tally.dot(vector, vector)))
        _reflect(tally, rows, *reflectors[-1])
    basis = tally.numbers(np.eye(len(rows), k))
    for reflector in reversed(reflectors):
        _reflect(tally, basis, *reflector)
    return basis, np.where(np.tri(*rows.shape, -1, dtype=bool), tally.number(0), rows)[:k]


def _reflect(tally: Tally, rows: Any, start: int, vector: Any, factor: Number) -> None:
    share = tally.dot(rows[start:, start:].T, vector) * factor
    rows[start:, start:] = minus_product(rows[start:, start:], vector[:, None], share)


def fft(tally: Tally, numbers: Any, *, skip: bool = False) -> Any:
    """Return the Fourier transform of 2**k numbers by halves: log2 n rounds of n / 2 butterflies (Cooley, Tukey).

    With `skip` the roots 1 and -i multiply nothing.
    """
    n = len(numbers)
    if n == 1:
        return numbers
    even, odd = fft(tally, numbers[::2], skip=skip), fft(tally, numbers[1::2], skip=skip)
    turned = each(lambda one, k: _turn(tally, one, k, n, skip), odd, np.arange(n // 2))
    return np.concatenate([even + turned, even - turned])


def _turn(tally: Tally, number: Complex, k: int, n: int, skip: bool) -> Complex:
    if skip and k == 0:
        return number
    if skip and 4 * k == n:
        return Complex(number.imag, tally.number(-number.real.value))
    root = cmath.exp(-2j * math.pi * k / n)
    return number * Complex(tally.number(root.real), tally.number(root.imag))
