"""The algebra programs: factorisations, solves and Fourier transforms, as textbook loops over counting numbers."""

import cmath
import math
from typing import Any

from tests.support.oracle.number import Complex, Number, Tally
from tests.support.oracle.products import Matrix, transpose


def cholesky(tally: Tally, matrix: Matrix) -> Matrix:
    """Return L of L L^H, row by row; the diagonal is real."""
    n = len(matrix)
    lower = [[tally.zero()] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            rest = matrix[i][j]
            for k in range(j):
                rest = rest.minus_product(lower[i][k], _conjugate(lower[j][k]))
            if i > j:
                lower[i][j] = _divide_by_real(rest, lower[j][j])
            else:
                lower[i][j] = (rest.real if isinstance(rest, Complex) else rest).sqrt()
    return lower


def _conjugate(number):
    # The multiply-add that it goes into takes the sign.
    return (
        Complex(number.real, Number(-number.imag.value, number.imag.tally)) if isinstance(number, Complex) else number
    )


def _divide_by_real(number: Any, divisor: Number) -> Any:
    return Complex(number.real / divisor, number.imag / divisor) if isinstance(number, Complex) else number / divisor


def _size(number: Any) -> float:
    """Return the measure by which LAPACK chooses pivots."""
    return abs(number.real.value) + abs(number.imag.value) if isinstance(number, Complex) else abs(number.value)


def identity(tally: Tally, matrix: Matrix) -> Matrix:
    n, is_complex = len(matrix), isinstance(matrix[0][0], Complex)
    return [
        [
            Complex(entry, tally.zero()) if is_complex else entry
            for entry in (tally.number(float(i == j)) for j in range(n))
        ]
        for i in range(n)
    ]


def lu(tally: Tally, matrix: Matrix) -> tuple[Matrix, list[int]]:
    """Return L below and U on the diagonal and above, in one matrix, and the order of its rows.

    Elimination with partial pivoting, whose search for the largest number of a column is no arithmetic.
    """
    rows = [list(row) for row in matrix]
    m, n = len(rows), len(rows[0])
    order = list(range(m))
    for k in range(min(m, n)):
        pivot = max(range(k, m), key=lambda i: _size(rows[i][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        order[k], order[pivot] = order[pivot], order[k]
        for i in range(k + 1, m):
            rows[i][k] = rows[i][k] / rows[k][k]
            for j in range(k + 1, n):
                rows[i][j] = rows[i][j].minus_product(rows[i][k], rows[k][j])
    return rows, order


def unpack(tally: Tally, packed: Matrix, order: list[int]) -> tuple[Matrix, Matrix, Matrix]:
    """Return the permutation, L and U of what `lu` returns."""
    m, n = len(packed), len(packed[0])
    k = min(m, n)
    permutation = [[tally.number(float(order[j] == i)) for j in range(m)] for i in range(m)]
    lower = [[packed[i][j] if j < i else tally.number(float(i == j)) for j in range(k)] for i in range(m)]
    upper = [[packed[i][j] if j >= i else tally.zero() for j in range(n)] for i in range(k)]
    return permutation, lower, upper


def solve_triangular(tally: Tally, matrix: Matrix, right: Matrix, upper: bool, unitriangular: bool) -> Matrix:
    """Return X of A X = B by substitution; a diagonal of ones divides nothing."""
    n = len(matrix)
    solved = [None] * n
    for i in reversed(range(n)) if upper else range(n):
        row = []
        for column in range(len(right[0])):
            rest = right[i][column]
            for j in range(i + 1, n) if upper else range(i):
                rest = rest.minus_product(matrix[i][j], solved[j][column])
            row.append(rest if unitriangular else rest / matrix[i][i])
        solved[i] = row
    return solved


def solve(tally: Tally, matrix: Matrix, right: Matrix) -> Matrix:
    """Return X of A X = B: elimination and two substitutions."""
    return solve_factored(tally, *lu(tally, matrix), right)


def solve_factored(tally: Tally, packed: Matrix, order: list[int], right: Matrix) -> Matrix:
    """Return X of P L U X = B, of what `lu` returns: two substitutions."""
    lower = solve_triangular(tally, packed, [right[i] for i in order], False, True)
    return solve_triangular(tally, packed, lower, True, False)


def inverse(tally: Tally, matrix: Matrix) -> Matrix:
    return solve(tally, matrix, identity(tally, matrix))


def solve_by_cholesky(tally: Tally, lower: Matrix, right: Matrix) -> Matrix:
    """Return X of L L^T X = B: two substitutions."""
    first = solve_triangular(tally, lower, right, False, False)
    return solve_triangular(tally, transpose(lower), first, True, False)


def inverse_by_cholesky(tally: Tally, lower: Matrix) -> Matrix:
    """Return the inverse of L L^T: the solution for each column of the identity, whose zeros are not looked for."""
    return solve_by_cholesky(tally, lower, identity(tally, lower))


def determinant(tally: Tally, matrix: Matrix) -> Any:
    """Return the determinant: elimination, then the product of the diagonal, an accumulator that begins at 1."""
    packed, order = lu(tally, matrix)
    swaps = sum(order[i] > order[j] for i in range(len(order)) for j in range(i + 1, len(order)))
    result = tally.number(-1.0 if swaps % 2 else 1.0)
    if isinstance(packed[0][0], Complex):
        result = Complex(result, tally.zero())
    for i, row in enumerate(packed):
        result = result * row[i]
    return result


def logarithm_of_determinant(tally: Tally, matrix: Matrix) -> tuple[Number, Number]:
    """Return the sign of the determinant, a product of signs, and the sum of the logarithms of the diagonal."""
    packed, order = lu(tally, matrix)
    swaps = sum(order[i] > order[j] for i in range(len(order)) for j in range(i + 1, len(order)))
    sign, total = tally.number(-1.0 if swaps % 2 else 1.0), tally.zero()
    for i, row in enumerate(packed):
        sign = sign * row[i].call("sign", lambda value: math.copysign(1.0, value))
        total = total + abs(row[i]).call("log", math.log)
    return sign, total


def ldl(tally: Tally, matrix: Matrix) -> Matrix:
    """Return L below and D on the diagonal, of L D L^T with ones on L's diagonal, where no pivots are needed."""
    n = len(matrix)
    packed = [list(row) for row in matrix]
    for j in range(n):
        scaled = [packed[j][k] * packed[k][k] for k in range(j)]
        for k in range(j):
            packed[j][j] = packed[j][j].minus_product(packed[j][k], scaled[k])
        for i in range(j + 1, n):
            for k in range(j):
                packed[i][j] = packed[i][j].minus_product(packed[i][k], scaled[k])
            packed[i][j] = packed[i][j] / packed[j][j]
    return [[packed[i][j] if j <= i else tally.zero() for j in range(n)] for i in range(n)]


def solve_by_ldl(tally: Tally, packed: Matrix, right: Matrix) -> Matrix:
    """Return X of L D L^T X = B: two substitutions without divisions, and the diagonal's between them."""
    first = solve_triangular(tally, packed, right, False, True)
    between = [[number / packed[i][i] for number in row] for i, row in enumerate(first)]
    return solve_triangular(tally, transpose(packed), between, True, True)


def householder(tally: Tally, matrix: Matrix) -> tuple[Matrix, Matrix]:
    """Return Q and R, reduced, by Householder reflections that are then applied to the identity's first columns."""
    rows = [list(row) for row in matrix]
    m, n = len(rows), len(rows[0])
    reflectors = []
    for k in range(min(m, n)):
        column = [rows[i][k] for i in range(k, m)]
        norm = tally.dot(column, column).sqrt()
        head = column[0] + norm * (1.0 if column[0].value >= 0 else -1.0)
        vector = [head, *column[1:]]
        factor = 2.0 / tally.dot(vector, vector)
        reflectors.append((k, vector, factor))
        _reflect(tally, rows, k, vector, factor, range(k, n))
    k = min(m, n)
    basis = [[tally.number(float(i == j)) for j in range(k)] for i in range(m)]
    for start, vector, factor in reversed(reflectors):
        _reflect(tally, basis, start, vector, factor, range(start, k))
    upper = [[rows[i][j] if j >= i else tally.zero() for j in range(n)] for i in range(k)]
    return basis, upper


def _reflect(tally: Tally, rows: Matrix, start: int, vector: list[Any], factor: Number, columns: range) -> None:
    for j in columns:
        share = tally.dot(vector, [row[j] for row in rows[start:]]) * factor
        for i, entry in enumerate(vector, start):
            rows[i][j] = rows[i][j].minus_product(entry, share)


def fft(tally: Tally, numbers: list[Complex], *, skip: bool = False) -> list[Complex]:
    """Return the Fourier transform of 2**k numbers by halves: log2 n rounds of n / 2 butterflies (Cooley, Tukey).

    With `skip` the roots 1 and -i multiply nothing.
    """
    n = len(numbers)
    if n == 1:
        return numbers
    even, odd = fft(tally, numbers[::2], skip=skip), fft(tally, numbers[1::2], skip=skip)
    turned = [_turn(one, k, n, skip) for k, one in enumerate(odd)]
    return [a + b for a, b in zip(even, turned, strict=True)] + [a - b for a, b in zip(even, turned, strict=True)]


def _turn(number: Complex, k: int, n: int, skip: bool) -> Complex:
    if skip and k == 0:
        return number
    if skip and 4 * k == n:
        return Complex(number.imag, Number(-number.real.value, number.real.tally))
    root = cmath.exp(-2j * math.pi * k / n)
    return number * Complex(Number(root.real, number.real.tally), Number(root.imag, number.real.tally))
