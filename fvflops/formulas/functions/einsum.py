"""Cost of einsum: by the products that torch runs, also exact, and by the number that numpy.einsum_path prints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from fvflops.formulas.cost import Cost
from fvflops.formulas.functions.matmul import multiply_pair, operation_costs, other_flops
from fvflops.formulas.language.call import Call
from fvflops.trace import tensors_in

# An index of an equation: a letter, or the position of a dimension under an ellipsis, counted from the right.
Index = str


@dataclass(frozen=True, slots=True)
class Equation:
    """An einsum equation: the indices of each operand and of the output, and the size of each index.

    The size of an index is its maximum over all operands, since a dimension of 1 broadcasts.
    """

    operands: tuple[tuple[Index, ...], ...]
    output: tuple[Index, ...]
    sizes: dict[Index, int]


def read_equation(text: str, shapes: Sequence[tuple[int, ...]]) -> Equation:
    """Parse an equation; one that does not match the operands' shapes raises ValueError.

    Without an arrow the output has the ellipsis, then the letters that occur once, sorted.

    >>> equation = read_equation("...ij, jk", [(7, 2, 3), (3, 4)])
    >>> equation.output, equation.sizes["j"]
    (('.0', 'i', 'k'), 3)
    """
    left, arrow, right = text.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(shapes):
        raise ValueError(f"the equation {text!r} has {len(terms)} operands, but there are {len(shapes)} tensors")
    operands = tuple(_indices(term, len(shape), text) for term, shape in zip(terms, shapes, strict=True))
    sizes: dict[Index, int] = {}
    for term, shape in zip(operands, shapes, strict=True):
        for index, size in zip(term, shape, strict=True):
            previous = sizes.setdefault(index, size)
            if 1 not in (previous, size) and previous != size:
                raise ValueError(
                    f"the equation {text!r} does not match {list(map(list, shapes))}: {index} is {previous} and {size}"
                )
            sizes[index] = size if previous == 1 else previous
    dots = sorted({index for term in operands for index in term if index[0] == "."}, reverse=True)
    if arrow:
        before, ellipsis, after = right.partition("...")
        output = (*before, *(dots if ellipsis else ()), *after)
        if len(set(output)) < len(output) or not sizes.keys() >= set(output):
            raise ValueError(
                f"the equation {text!r} has the output {right!r}: write each index once, from the operands"
            )
        return Equation(operands, output, sizes)
    occurrences = Counter(left)
    return Equation(
        operands,
        (*dots, *sorted(letter for letter in occurrences if letter.isalpha() and occurrences[letter] == 1)),
        sizes,
    )


def _indices(term: str, rank: int, text: str) -> tuple[Index, ...]:
    before, ellipsis, after = term.partition("...")
    hidden = rank - len(before) - len(after)
    if hidden < 0 or (hidden and not ellipsis) or not (before + after + "a").isalpha():
        raise ValueError(f"the equation {text!r} has the operand {term!r} for a tensor of {rank} dimensions")
    return (*before, *(f".{position}" for position in reversed(range(hidden))), *after)


_MAX_OPERANDS = 9  # of which all paths are tried, in seconds


def count_einsum(call: Call) -> Cost:
    """Return the cost of an einsum as torch runs it: the batched matrix products of its contraction path.

    Operands are multiplied in pairs from the left, or along `path`. Before a product each operand is summed over the
    indices that neither the other operands nor the output have; a product without contracted indices is elementwise
    and has no multiply-adds. For aten::einsum. Source: `einsum` in ATen's Linear.cpp.

    >>> from fvflops.trace import TensorSpec
    >>> pair = (TensorSpec((2, 3)), TensorSpec((3, 4)))
    >>> count_einsum(Call("aten::einsum", {"equation": "ij,jk", "tensors": pair}, (TensorSpec((2, 4)),))).macs
    24
    """
    return replace(count_exact_einsum(call), flops=0)


def count_fvcore_einsum(call: Call) -> Cost:
    """Return the cost of an einsum by fvcore: half of the count that numpy.einsum_path prints, rounded down.

    numpy prints the count of the cheapest path with four digits, so 88,700,958 multiply-adds are 88,700,000 here. Two
    equations that fvcore special-cases are exact. For aten::einsum. Source: fvcore's `einsum_flop_jit`, and
    `numpy.einsum_path(..., optimize="optimal")`.
    """
    equation = _equation_of(call)
    exact = _known_product(str(call.arguments["equation"]), equation)
    if exact is not None:
        return Cost(macs=exact, activations=call.out.numel)
    printed = f"{_optimal_flops(equation) + 1:.3e}"
    return Cost(macs=math.floor(float(printed) / 2), activations=call.out.numel)


def count_numpy_einsum(call: Call) -> Cost:
    """Return the cost of an einsum by DeepSpeed and calflops: the FLOPs that numpy.einsum_path prints, no MACs.

    They have four digits; see `count_fvcore_einsum`. For aten::einsum. Source: `_einsum_flops_compute` in
    deepspeed/profiling/flops_profiler/profiler.py.

    >>> from fvflops.trace import TensorSpec
    >>> pair = (TensorSpec((2, 3)), TensorSpec((3, 4)))
    >>> count_numpy_einsum(Call("aten::einsum", {"equation": "ij,jk", "tensors": pair}, (TensorSpec((2, 4)),)))
    Cost(macs=0, flops=49, activations=None)
    """
    return Cost(flops=int(float(f"{_optimal_flops(_equation_of(call)) + 1:.3e}")))


def _equation_of(call: Call) -> Equation:
    shapes = [spec.shape for spec in tensors_in(call.arguments["tensors"])]
    return read_equation(str(call.arguments["equation"]), shapes)


def _removed_axes(
    left: list[int], right: list[int], uses: Counter[int], axes: Iterable[int]
) -> tuple[list[int], list[int]]:
    """Return the axes that this product removes: axes of one operand only, then shared ones."""
    summed_before, summed = [], []
    for axis in axes:
        if left[axis] != 1 and right[axis] != 1:
            uses[axis] -= 1
            if uses[axis] == 1:
                summed.append(axis)
        elif uses[axis] == 1 and (left[axis] != 1 or right[axis] != 1):
            summed_before.append(axis)
        else:
            continue
        if uses[axis] == 1:
            uses[axis] = 0
    return summed_before, summed


def _align(term: tuple[Index, ...], shape: list[int], order: list[Index]) -> list[int]:
    sizes = dict(zip(term, shape, strict=True))
    return [sizes.get(index, 1) for index in order]


def _known_product(text: str, equation: Equation) -> int | None:
    letters = dict.fromkeys(letter for letter in text if letter.isalpha())
    normalised = "".join("abcdefghijklmnopqrstuvwxyz"[list(letters).index(c)] if c in letters else c for c in text)
    if normalised.replace(" ", "") not in ("abc,abd->acd", "abc,adc->adb"):
        return None
    return math.prod(equation.sizes.values())


def _optimal_flops(equation: Equation) -> int:
    """Return the FLOPs of numpy's optimal path: n - 1 for a product of n operands, 1 more for its sum."""
    terms = [frozenset(term) for term in equation.operands]
    output = frozenset(equation.output)
    sizes = equation.sizes
    if len(terms) <= 2 or frozenset().union(*terms) == output:
        return _contract(terms, range(len(terms)), output, sizes)[0]
    # numpy limits intermediate results to the largest operand or the output, with repeated indices multiplied twice.
    limit = max(math.prod(sizes[index] for index in term) for term in (*equation.operands, equation.output))
    if len(terms) > _MAX_OPERANDS:
        raise ValueError(f"numpy's path of an einsum of {len(terms)} operands is not computed: at most {_MAX_OPERANDS}")
    # Keep the cheapest of the paths to equal operands: the same steps follow all of them.
    paths: dict[object, tuple[int, list[frozenset[Index]]]] = {None: (0, terms)}
    for _ in terms[1:]:
        longer: dict[object, tuple[int, list[frozenset[Index]]]] = {}
        for cost, remaining in paths.values():
            for pair in combinations(range(len(remaining)), 2):
                added, after = _contract(remaining, pair, output, sizes)
                if math.prod(sizes[index] for index in after[-1]) <= limit:
                    key = frozenset(Counter(after).items())
                    if key not in longer or cost + added < longer[key][0]:
                        longer[key] = cost + added, after
        if not longer:
            cost, remaining = min(paths.values(), key=lambda path: path[0])
            return cost + _contract(remaining, range(len(remaining)), output, sizes)[0]
        paths = longer
    return min(cost for cost, _ in paths.values())


def _contract(
    terms: list[frozenset[Index]], chosen: Iterable[int], output: frozenset[Index], sizes: dict[Index, int]
) -> tuple[int, list[frozenset[Index]]]:
    """Return the FLOPs of multiplying the chosen terms, and the remaining terms, the result last."""
    positions = set(chosen)
    inside = frozenset().union(*(terms[position] for position in positions))
    rest = [term for position, term in enumerate(terms) if position not in positions]
    result = inside & output.union(*rest)
    factor = max(1, len(positions) - 1) + (result != inside)
    return factor * math.prod(sizes[index] for index in inside), [*rest, result]


def count_exact_einsum(call: Call) -> Cost:
    """Return the cost of an einsum as torch runs it: matrix products, elementwise products and sums.

    An index of one operand only is summed before the product, an addition per element; a product without contracted
    indices is multiplications. For aten::einsum; see `count_einsum`.

    >>> from fvflops.trace import TensorSpec
    >>> pair = (TensorSpec((2, 3)), TensorSpec((4,)))
    >>> call = Call("aten::einsum", {"equation": "ij,k->ik", "tensors": pair}, (TensorSpec((2, 4)),))
    >>> count_exact_einsum(call)
    Cost(macs=0, flops=14, activations=8)
    """
    equation = _equation_of(call)
    order = [*equation.output, *sorted(equation.sizes.keys() - set(equation.output))]
    shapes = [list(spec.shape) for spec in tensors_in(call.arguments["tensors"])]
    factors = [_align(term, shape, order) for term, shape in zip(equation.operands, shapes, strict=True)]
    uses = Counter(axis for factor in factors for axis, size in enumerate(factor) if size != 1)
    path: list[Any] = list(call.arguments.get("path") or ())  # type: ignore[arg-type]
    from_left = not path
    summed_axes = range(len(equation.output), len(order))
    add, multiply = operation_costs(call)
    macs = flops = 0
    while len(factors) > 1:
        first, second = (0, 1) if from_left else sorted((path.pop(0), path.pop(0)))
        right, left = factors.pop(second), factors.pop(first)
        summed_before, summed = _removed_axes(left, right, uses, summed_axes)
        flops += add * sum(math.prod(f) for f in (left, right) if any(f[axis] > 1 for axis in summed_before))
        left, right = ([1 if axis in summed_before else size for axis, size in enumerate(f)] for f in (left, right))
        products, result = multiply_pair(left, right, summed)
        macs += products
        flops += other_flops(left, right, summed, add, multiply)
        factors.insert(0 if from_left else len(factors), result)
    if any(factors[0][axis] > 1 for axis in summed_axes):
        flops += add * math.prod(factors[0])
    return Cost(macs, flops, call.out.numel)
