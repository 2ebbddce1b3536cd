"""The product programs: matrix products of every rank, and what is made of them, as loops over counting numbers."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from tests.support.oracle.number import Complex, Number, Tally
from tests.support.oracle.pointwise import depth_of

Vector = list[Any]
Matrix = list[Vector]


def transpose(matrix: Matrix) -> Matrix:
    return [list(column) for column in zip(*matrix, strict=True)]


def at(nested: Any, index: Iterable[int]) -> Any:
    """Return what stands at an index of nested lists."""
    for position in index:
        nested = nested[position]
    return nested


def build(shape: Sequence[int], element: Callable[..., Any]) -> Any:
    """Return nested lists of a shape, made element by element from the index."""
    if not shape:
        return element()
    return [build(shape[1:], lambda *rest, first=first: element(first, *rest)) for first in range(shape[0])]


def indexes(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every index of a shape."""
    return itertools.product(*map(range, sizes))


def shape_of(nested: Any) -> tuple[int, ...]:
    return (len(nested), *shape_of(nested[0])) if isinstance(nested, list) else ()


def vdot(tally: Tally, left: Vector, right: Vector) -> Complex:
    """Return the sum of products with the conjugates of the left vector, whose sign the multiply-adds take."""
    real, imag = tally.zero(), tally.zero()
    for one, other in zip(left, right, strict=True):
        real = real.plus_product(one.real, other.real).plus_product(one.imag, other.imag)
        imag = imag.plus_product(one.real, other.imag).minus_product(one.imag, other.real)
    return Complex(real, imag)


def linear(tally: Tally, input: Any, weight: Matrix, bias: Vector | None = None) -> Any:
    """Return input @ weight.T + bias, of an input of any number of dimensions."""
    if isinstance(input[0], list):
        return [linear(tally, row, weight, bias) for row in input]
    products = [tally.dot(input, row) for row in weight]
    return products if bias is None else [product + one for product, one in zip(products, bias, strict=True)]


def linear_backward(
    tally: Tally, input: Matrix, grad: Matrix, weight: Matrix, mask: Sequence[bool]
) -> tuple[Any, Any, Any]:
    """Return the gradients of a linear map's input, weight and bias, where `mask` asks for them."""
    return (
        mm(tally, grad, weight) if mask[0] else None,
        mm(tally, transpose(grad), input) if mask[1] else None,
        [tally.sum(column) for column in transpose(grad)] if mask[2] else None,
    )


def mm(tally: Tally, left: Matrix, right: Matrix) -> Matrix:
    columns = transpose(right)
    return [[tally.dot(row, column) for column in columns] for row in left]


def mv(tally: Tally, matrix: Matrix, vector: Vector) -> Vector:
    return [tally.dot(row, vector) for row in matrix]


def bmm(tally: Tally, left: list[Matrix], right: list[Matrix]) -> list[Matrix]:
    return [mm(tally, one, other) for one, other in zip(left, right, strict=True)]


def scale(factor: float, nested: Any) -> Any:
    """Return nested numbers times a real factor: no operation where it is 1."""
    if factor == 1:
        return nested
    if isinstance(nested, Complex):
        return Complex(nested.real * factor, nested.imag * factor)
    return [scale(factor, item) for item in nested] if isinstance(nested, list) else nested * factor


def add(product, other):
    """Return a product plus what broadcasts to its shape: an addition for each element of the product."""
    if not isinstance(product, list):
        return product + other
    if depth_of(other) < depth_of(product):
        return [add(item, other) for item in product]
    return [add(item, other[index if len(other) > 1 else 0]) for index, item in enumerate(product)]


def add_product(product: Any, other: Any, beta: float, alpha: float) -> Any:
    """Return alpha * product + beta * other; each factor touches each element of the result, and 0 drops the other."""
    if beta == 0:
        return scale(alpha, product)
    if beta == 1:
        return add(scale(alpha, product), other)
    everywhere = build(shape_of(product), lambda *index: _broadcast(other, index))
    return add(scale(alpha, product), scale(beta, everywhere))


def _broadcast(nested: Any, index: Sequence[int]) -> Any:
    shape = shape_of(nested)
    own = index[len(index) - len(shape) :]
    return at(nested, [0 if size == 1 else place for size, place in zip(shape, own, strict=True)])


def matmul(tally: Tally, left: Any, right: Any) -> Any:
    """Return a matmul as numpy's: batches broadcast, a vector is one row on the left and one column on the right."""
    if depth_of(left) == 1 and depth_of(right) == 1:
        return tally.dot(left, right)
    if depth_of(left) == 1:
        return _drop(matmul(tally, [left], right), depth_of(right) - 2)
    if depth_of(right) == 1:
        return _drop(matmul(tally, left, transpose([right])), depth_of(left) - 1)
    one, other = shape_of(left)[:-2], shape_of(right)[:-2]
    rank = max(len(one), len(other))
    pairs = zip((1,) * (rank - len(one)) + one, (1,) * (rank - len(other)) + other, strict=True)
    batch = [max(pair) for pair in pairs]
    return build(batch, lambda *index: mm(tally, _batch(left, index), _batch(right, index)))


def _batch(nested: Any, index: Sequence[int]) -> Matrix:
    batch = shape_of(nested)[:-2]
    own = index[len(index) - len(batch) :]
    return at(nested, [0 if size == 1 else place for size, place in zip(batch, own, strict=True)])


def _drop(nested: Any, axis: int) -> Any:
    return nested[0] if axis == 0 else [_drop(item, axis - 1) for item in nested]


def outer(tally: Tally, left: Vector, right: Vector) -> Matrix:
    """Return each number of one vector times each of another: multiplications, nothing is added."""
    return [[one * other for other in right] for one in left]


def kron(tally: Tally, left: Matrix, right: Matrix) -> Matrix:
    """Return the Kronecker product: each element of one matrix times the other matrix."""
    return [[one * other for one in top for other in row] for top in left for row in right]


def multi_dot(tally: Tally, *matrices: Matrix) -> Matrix:
    """Return a product of matrices in the order that takes the fewest multiply-adds."""
    sizes = [len(matrices[0]), *[len(matrix[0]) for matrix in matrices]]

    def cheapest(first: int, last: int) -> tuple[int, int]:
        if first == last:
            return 0, first
        ways = (
            (
                cheapest(first, cut)[0] + cheapest(cut + 1, last)[0] + sizes[first] * sizes[cut + 1] * sizes[last + 1],
                cut,
            )
            for cut in range(first, last)
        )
        return min(ways)

    def multiply(first: int, last: int) -> Matrix:
        cut = cheapest(first, last)[1]
        return matrices[first] if first == last else mm(tally, multiply(first, cut), multiply(cut + 1, last))

    return multiply(0, len(matrices) - 1)


def bilinear(tally: Tally, left: Matrix, right: Matrix, weight: list[Matrix], bias: Vector | None = None) -> Matrix:
    """Return x1 W y + b for each row: the weight with the first input, then with the second."""
    result = []
    for x, y in zip(left, right, strict=True):
        row = [tally.dot([tally.dot(x, column) for column in transpose(matrix)], y) for matrix in weight]
        result.append(row if bias is None else [number + one for number, one in zip(row, bias, strict=True)])
    return result


def einsum(tally: Tally, equation: str, *operands: Any) -> Any:
    """Return an einsum, operands multiplied in pairs from the left.

    An index that one operand alone still has, and the output lacks, is summed before the product; a shared one that
    nobody needs any more is summed by it, in multiply-adds; a product without sums multiplies. Size 1 is no index.
    """
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    sizes = {}
    for term, nested in zip(terms, operands, strict=True):
        sizes.update(zip(term, shape_of(nested), strict=True))
    factors = [_entries(term, nested, sizes) for term, nested in zip(terms, operands, strict=True)]
    wanted = [name for name in output if sizes[name] > 1]
    while len(factors) > 1:
        left, right, *rest = factors
        needed = set(wanted).union(*(names for names, _ in rest))
        left, right = _sum_alone(tally, left, right, needed), _sum_alone(tally, right, left, needed)
        factors = [_multiply(tally, left, right, needed, sizes), *rest]
    names, entries = _sum_alone(tally, factors[0], ((), {}), set(wanted))
    order = [names.index(name) for name in wanted]
    placed = {tuple(index[place] for place in order): number for index, number in entries.items()}
    large = [place for place, name in enumerate(output) if sizes[name] > 1]
    return build([sizes[name] for name in output], lambda *index: placed[tuple(index[place] for place in large)])


Entries = tuple[tuple[str, ...], dict[tuple[int, ...], Any]]


def _entries(term: str, nested: Any, sizes: dict[str, int]) -> Entries:
    names = tuple(name for name in dict.fromkeys(term) if sizes[name] > 1)  # a repeated index is a diagonal
    entries = {}
    for index in itertools.product(*[range(sizes[name]) for name in names]):
        place = dict(zip(names, index, strict=True))
        entries[index] = at(nested, [place.get(name, 0) for name in term])
    return names, entries


def _sum_alone(tally: Tally, factor: Entries, other: Entries, needed: set[str]) -> Entries:
    names, entries = factor
    kept = tuple(name for name in names if name in needed or name in other[0])
    if kept == names:
        return factor
    sums = {}
    for index, number in entries.items():
        place = tuple(position for name, position in zip(names, index, strict=True) if name in kept)
        sums[place] = sums.get(place, tally.zero()) + number
    return kept, sums


def _multiply(tally: Tally, left: Entries, right: Entries, needed: set[str], sizes: dict[str, int]) -> Entries:
    names = tuple(dict.fromkeys((*left[0], *right[0])))
    kept = tuple(name for name in names if name in needed)
    results = {}
    for index in itertools.product(*[range(sizes[name]) for name in names]):
        place = dict(zip(names, index, strict=True))
        one = left[1][tuple(place[name] for name in left[0])]
        other = right[1][tuple(place[name] for name in right[0])]
        target = tuple(place[name] for name in kept)
        if kept == names:
            results[target] = one * other
        else:
            results[target] = results.get(target, tally.zero()).plus_product(one, other)
    return kept, results


def cdist(tally: Tally, left: Matrix, right: Matrix, p: float) -> Matrix:
    """Return the distance of each row of one matrix to each row of another, in the norm of order p."""
    return [[_distance(tally, one, other, p) for other in right] for one in left]


def cdist_by_product(tally: Tally, left: Matrix, right: Matrix) -> Matrix:
    """Return Euclidean distances as the root of x*x + y*y - 2*x*y, in one product that is two columns wider."""
    one = tally.number(1.0)
    wide = [[*[number * -2.0 for number in row], _square(tally, row), one] for row in left]
    other = [[*row, one, _square(tally, row)] for row in right]
    return [[number.max(0.0).sqrt() for number in row] for row in mm(tally, wide, transpose(other))]


def _square(tally: Tally, row: Vector) -> Number:
    # No matrix product: the squares, then their sum.
    return tally.sum(number * number for number in row)


def _distance(tally: Tally, one: Vector, other: Vector, p: float) -> Number:
    differences = [x - y for x, y in zip(one, other, strict=True)]
    if p == 2:
        return tally.dot(differences, differences).sqrt()
    if p == 1:
        return tally.sum(abs(number) for number in differences)
    total = tally.zero()
    for number in differences:
        if p == math.inf:
            total = total.max(abs(number))
        else:
            total = total + abs(number).call("pow", lambda value: value**p)
    return total if p == math.inf else total.call("pow", lambda value: value ** (1 / p))


def cdist_backward(tally: Tally, grad: Matrix, left: Matrix, right: Matrix, p: float, distances: Matrix) -> Matrix:
    """Return the gradient of the left rows: each distance's, times its derivative, summed over the right."""
    result = []
    for i, one in enumerate(left):
        row = []
        for k, number in enumerate(one):
            total = tally.zero()
            for j, other in enumerate(right):
                slope = _slope(number - other[k], distances[i][j], p)
                total = total.plus_product(grad[i][j], slope)
            row.append(total)
        result.append(row)
    return result


def pdist_backward(tally: Tally, grad: Vector, rows: Matrix, p: float, distances: Vector) -> Matrix:
    """Return the gradient of rows: what one row of a pair gets in a multiply-add, the other loses in an addition."""
    result = [[tally.zero() for _ in row] for row in rows]
    for (i, j), slope, distance in zip(itertools.combinations(range(len(rows)), 2), grad, distances, strict=True):
        for k in range(len(rows[0])):
            change = _slope(rows[i][k] - rows[j][k], distance, p)
            result[i][k] = result[i][k].plus_product(slope, change)
            result[j][k] = result[j][k] - Number(slope.value * change.value, tally)  # the same product
    return result


def _slope(difference: Number, distance: Number, p: float) -> Number:
    """Return how a norm changes with one difference."""
    if p == 2:
        return difference / distance
    if p == 1:
        return _sign(difference)
    power = abs(difference).call("pow", lambda value: value ** (p - 1 if p < 2 else p - 2))
    part = (_sign(difference) if p < 2 else difference) * power
    return part / distance.call("pow", lambda value: value ** (p - 1))


def _sign(number: Number) -> Number:
    return number.call("sign", lambda value: math.copysign(1.0, value) if value else 0.0)


def sparse_mm(tally: Tally, left: Matrix, right: Matrix) -> Matrix:
    """Return a matrix product in which the zeros of the left matrix, which are not stored, meet nothing."""
    result = []
    for row in left:
        stored = [place for place, number in enumerate(row) if number.value]
        result.append(
            [tally.dot([row[k] for k in stored], [right[k][n] for k in stored]) for n in range(len(right[0]))]
        )
    return result


def grouped_mm(tally: Tally, rows: Matrix, matrices: list[Matrix], ends: Sequence[int]) -> Matrix:
    """Return rows times the matrix of their group; group g ends before row ends[g]."""
    starts = [0, *ends]
    return [
        row
        for start, end, matrix in zip(starts, ends, matrices, strict=False)
        for row in mm(tally, rows[start:end], matrix)
    ]


def embedding_bag(
    tally: Tally,
    table: Matrix,
    indices: Sequence[int],
    offsets: Sequence[int],
    mode: str,
    weights: Vector | None = None,
) -> Matrix:
    """Return a sum, mean or maximum of the rows of a table that each bag names; weights multiply rows of a sum."""
    bags = []
    for start, end in zip(offsets, [*offsets[1:], len(indices)], strict=True):
        rows = [table[index] for index in indices[start:end]]
        columns = transpose(rows) if rows else [[] for _ in table[0]]
        if mode == "max":
            bags.append([_maximum(tally, column) for column in columns])
        elif weights is not None:
            bags.append([tally.dot(column, weights[start:end]) for column in columns])
        else:
            sums = [tally.sum(column) for column in columns]
            bags.append([number / max(1, len(rows)) for number in sums] if mode == "mean" else sums)
    return bags


def _maximum(tally: Tally, numbers: Vector) -> Number:
    highest = tally.lowest()
    for number in numbers:
        highest = highest.max(number)
    return highest if numbers else tally.zero()


def affine_grid(tally: Tally, matrices: list[Matrix], sizes: Sequence[int], align_corners: bool) -> Any:
    """Return each position of a grid, in homogeneous coordinates, times each matrix; positions cost nothing."""
    axes = [
        [2 * i / max(1, size - 1) - 1 if align_corners else (2 * i + 1) / size - 1 for i in range(size)]
        for size in sizes
    ]
    if align_corners:
        axes = [axis if len(axis) > 1 else [0.0] for axis in axes]

    def transform(matrix: Matrix, index: Sequence[int]) -> Vector:
        position = [tally.number(axis[place]) for axis, place in zip(axes, index, strict=True)][::-1]
        return [tally.dot(row, [*position, tally.number(1.0)]) for row in matrix]

    return [build(sizes, lambda *index, matrix=matrix: transform(matrix, index)) for matrix in matrices]
