"""The product programs: what is made of matrix products, on arrays of counting numbers."""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tests.support.oracle.number import Complex, Number, Tally, each, matmul, plus_product, scaled
from tests.support.oracle.pointwise import power, sign
from tests.support.oracle.reductions import norm_of


def vdot(tally: Tally, left: Any, right: Any) -> Complex:
    """Return the sum of products with the conjugates of the left vector, whose sign the multiply-adds take."""
    real, imag = tally.number(0), tally.number(0)
    for one, other in zip(left, right, strict=True):
        real = real.plus_product(one.real, other.real).plus_product(one.imag, other.imag)
        imag = imag.plus_product(one.real, other.imag).minus_product(one.imag, other.real)
    return Complex(real, imag)


def linear_backward(tally: Tally, x: Any, grad: Any, weight: Any, mask: Sequence[bool]) -> tuple[Any, Any, Any]:
    """Return the gradients of a linear map's input, weight and bias, where `mask` asks for them."""
    return (
        matmul(tally, grad, weight) if mask[0] else None,
        matmul(tally, grad.T, x) if mask[1] else None,
        tally.sum(grad, 0) if mask[2] else None,
    )


def add_product(product: Any, other: Any, beta: float, alpha: float) -> Any:
    """Return alpha * product + beta * other; each factor touches each element of the result, and 0 drops the other."""
    product = scaled(product, alpha)
    return product if beta == 0 else product + scaled(np.broadcast_to(other, product.shape), beta)


def outer(tally: Tally, left: Any, right: Any) -> Any:
    """Return each number of one vector times each of another: multiplications, nothing is added."""
    return left[:, None] * right


def kron(tally: Tally, left: Any, right: Any) -> Any:
    """Return the Kronecker product: each element of one matrix times the other matrix."""
    return np.block([[one * right for one in row] for row in left[..., None, None]])


def multi_dot(tally: Tally, *matrices: Any) -> Any:
    """Return a product of matrices in the order that takes the fewest multiply-adds."""
    sizes = [len(matrices[0]), *[matrix.shape[1] for matrix in matrices]]

    def cheapest(first: int, last: int) -> tuple[int, int]:
        if first == last:
            return 0, first
        return min(
            (
                cheapest(first, cut)[0] + cheapest(cut + 1, last)[0] + sizes[first] * sizes[cut + 1] * sizes[last + 1],
                cut,
            )
            for cut in range(first, last)
        )

    def multiply(first: int, last: int) -> Any:
        cut = cheapest(first, last)[1]
        return matrices[first] if first == last else matmul(tally, multiply(first, cut), multiply(cut + 1, last))

    return multiply(0, len(matrices) - 1)


def bilinear(tally: Tally, left: Any, right: Any, weight: Any, bias: Any = None) -> Any:
    """Return x1 W y + b for each row: the weight with the first input, then with the second."""
    first = tally.dot(left[:, None, None], np.swapaxes(weight, 1, 2))
    product = tally.dot(first, right[:, None])
    return product if bias is None else product + bias


def einsum(tally: Tally, equation: str, *operands: Any) -> Any:
    """Return an einsum, operands multiplied in pairs from the left.

    An index that one operand alone still has, and the output lacks, is summed before the product; a shared one that
    nobody needs any more is summed by it, in multiply-adds; a product without sums multiplies. Size 1 is not an index.
    """
    inputs, output = equation.split("->")
    names = "".join(sorted({*inputs} - {","}))

    def spread(term: str, array: Any) -> Any:
        """Return an array with an axis for each index, of size 1 where it has none; a repeated one is a diagonal."""
        own = "".join(name for name in names if name in term)
        absent = [place for place, name in enumerate(names) if name not in term]
        return np.expand_dims(np.einsum(f"{term}->{own}", array), absent)

    def sum_alone(array: Any, others: Sequence[Any]) -> Any:
        """Return an array summed over the indices that neither the output nor another array has."""
        free = [axis for axis in range(len(names)) if all(other.shape[axis] == 1 for other in others)]
        alone = tuple(axis for axis in free if array.shape[axis] > 1 and names[axis] not in output)
        return np.expand_dims(tally.sum(array, alone), alone) if alone else array

    product, *rest = map(spread, inputs.split(","), operands)
    while rest:
        other, *rest = rest
        product, other = sum_alone(product, (other, *rest)), sum_alone(other, (product, *rest))
        needed = {axis for axis, name in enumerate(names) if name in output or any(one.shape[axis] > 1 for one in rest)}
        sizes = enumerate(zip(product.shape, other.shape, strict=True))
        summed = [axis for axis, (one, two) in sizes if one == two > 1 and axis not in needed]
        if summed:
            last = range(-len(summed), 0)
            moved = [np.moveaxis(array, summed, last) for array in (product, other)]
            flat = [array.reshape(*array.shape[: -len(summed)], -1) for array in moved]
            product = np.expand_dims(tally.dot(*flat), summed)
        else:
            product = product * other
    absent = tuple(axis for axis, name in enumerate(names) if name not in output)
    kept = "".join(name for name in names if name in output)
    return sum_alone(product, ()).squeeze(absent).transpose([kept.index(name) for name in output])


def cdist(tally: Tally, left: Any, right: Any, p: float) -> Any:
    """Return the distance of each row of one matrix to each row of another, in the norm of order p."""
    return distance(tally, left[:, None] - right, p)


def distance(tally: Tally, differences: Any, p: float) -> Any:
    """Return norms along the last axis: squares in multiply-adds, the largest from 0."""
    if p == 2:
        return np.sqrt(tally.dot(differences, differences))
    return tally.largest(abs(differences), 0) if p == math.inf else norm_of(tally, differences, p)


def cdist_by_product(tally: Tally, left: Any, right: Any) -> Any:
    """Return Euclidean distances as the root of x*x + y*y - 2*x*y, in one product that is two columns wider."""
    # No matrix product: the squares, then their sum.
    squares = [tally.sum(rows * rows, 1) for rows in (left, right)]
    ones = [tally.numbers(np.ones(len(rows))) for rows in (left, right)]
    wide = np.column_stack([left * -2.0, squares[0], ones[0]])
    product = matmul(tally, wide, np.column_stack([right, ones[1], squares[1]]).T)
    return each(lambda number: number.max(0.0).sqrt(), product)


def cdist_backward(tally: Tally, grad: Any, left: Any, right: Any, p: float, distances: Any) -> Any:
    """Return the gradient of the left rows: each distance's, times its derivative, summed over the right."""
    slopes = each(partial(_slope, p=p), left[:, None] - right, distances[..., None])
    return tally.dot(grad[:, None], np.swapaxes(slopes, 1, 2))


def pdist_backward(tally: Tally, grad: Any, rows: Any, p: float, distances: Any) -> Any:
    """Return the gradient of rows: what one row of a pair gets in a multiply-add, the other loses in an addition."""
    result = tally.zeros(*rows.shape)
    for (i, j), slope, length in zip(itertools.combinations(range(len(rows)), 2), grad, distances, strict=True):
        change = each(partial(_slope, p=p), rows[i] - rows[j], length)
        result[i] = plus_product(result[i], slope, change)
        # The same product.
        result[j] = result[j] - each(lambda number, slope=slope: tally.number(slope.value * number.value), change)
    return result


def _slope(difference: Number, distance: Number, p: float) -> Number:
    """Return how a norm changes with one difference."""
    if p == 2:
        return difference / distance
    if p == 1:
        return sign(difference)
    part = (sign(difference) if p < 2 else difference) * power(abs(difference), p - 1 if p < 2 else p - 2)
    return part / power(distance, p - 1)


def sparse_mm(tally: Tally, left: Any, right: Any) -> Any:
    """Return a matrix product in which the zeros of the left matrix, which are not stored, meet nothing."""
    stored = each(lambda number: number.value != 0, left).astype(bool)
    return np.stack([tally.dot(right[own].T, row[own]) for row, own in zip(left, stored, strict=True)])


def grouped_mm(tally: Tally, rows: Any, matrices: Any, ends: Sequence[int]) -> Any:
    """Return rows times the matrix of their group; group g ends before row ends[g]."""
    groups = zip(np.split(rows, ends[:-1]), matrices, strict=True)
    return np.concatenate([matmul(tally, group, matrix) for group, matrix in groups])


def embedding_bag(tally, table, indices, offsets, mode, weights=None):
    """Return a sum, mean or maximum of the rows of a table that each bag names; weights multiply rows of a sum."""
    bags = []
    for bag in np.split(np.arange(len(indices)), offsets[1:]):
        columns = table[np.array(indices)[bag]].T
        if mode == "max":
            bags.append(tally.largest(columns) if len(bag) else tally.zeros(len(columns)))
        elif weights is not None:
            bags.append(tally.dot(columns, weights[bag]))
        else:
            sums = tally.sum(columns, 1)
            bags.append(sums / max(1, len(bag)) if mode == "mean" else sums)
    return np.stack(bags)


def affine_grid(tally: Tally, matrices: Any, sizes: Sequence[int], align_corners: bool) -> Any:
    """Return each position of a grid, in homogeneous coordinates, times each matrix; positions cost nothing."""
    axes = [(np.arange(size) * 2 + 1) / size - 1 for size in sizes]
    if align_corners:
        axes = [np.linspace(-1, 1, size) if size > 1 else np.zeros(1) for size in sizes]
    grid = np.meshgrid(*axes, indexing="ij")[::-1]
    positions = tally.numbers(np.stack([*grid, np.ones(sizes)], -1).reshape(-1, len(sizes) + 1))
    return matmul(tally, positions, np.swapaxes(matrices, 1, 2)).reshape(len(matrices), *sizes, -1)
