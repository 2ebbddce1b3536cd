"""Matrix products: matmul of any ranks, dense or sparse, and the three-factor product of nn.Bilinear, also exact."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from fvflops.formulas.cost import Cost
from fvflops.formulas.language.call import Call
from fvflops.trace import TensorSpec, tensors_in


def count_matmul(call: Call) -> Cost:
    """Return the cost of a matmul: numel(out) * k, with broadcast batches and vectors as one row or column.

    A sparse operand has one multiply-add per stored element and row or column of the dense one. For two sparse operands
    it is the expected value for independent patterns, rounded down. For aten::matmul and its variants: the first two
    tensors are multiplied.

    >>> first, second = TensorSpec((3, 1, 5, 4)), TensorSpec((2, 4, 6))
    >>> call = Call("aten::matmul", {"a": first, "b": second}, (TensorSpec((3, 2, 5, 6)),), "m(Tensor a, Tensor b) -> ")
    >>> count_matmul(call).macs
    720
    """
    left, right = (call.tensor(name) for name in call.operands[:2])
    macs = call.out.numel * left.shape[-1]
    for factor in (left, right):
        if factor.nnz is not None:
            macs = macs * factor.nnz // max(1, factor.numel)
    return Cost(macs=macs, activations=call.out.numel)


def count_foreach_matmul(call: Call) -> Cost:
    """Return the cost of aten::_foreach_mm: one product per pair of matrices.

    >>> pair = (TensorSpec((4, 5)),), (TensorSpec((5, 6)),)
    >>> call = Call("aten::_foreach_mm", {"self": pair[0] * 3, "mat2": pair[1] * 3}, ((TensorSpec((4, 6)),) * 3,))
    >>> count_foreach_matmul(call).macs
    360
    """
    pairs = zip(tensors_in(call.arguments["self"]), tensors_in(call.arguments["mat2"]), strict=True)
    return Cost(
        macs=sum(left.numel * right.shape[-1] for left, right in pairs),
        activations=sum(spec.numel for spec in tensors_in(call.outputs)),
    )


def count_trilinear(call: Call) -> Cost:
    """Return the cost of aten::_trilinear: two products for each index of the unrolled dimension.

    The tensors are aligned by the dimensions that `expand1` ... insert; the first two are multiplied and summed over
    the dimensions that the third lacks, then the result and the third. Source: `_trilinear` in ATen's Linear.cpp.
    """
    return replace(count_exact_trilinear(call), flops=0)


def multiply_pair(left: list[int], right: list[int], summed: Collection[int]) -> tuple[int, list[int]]:
    """Return the multiply-adds of one product of aligned tensors, and the shape of its result, summed axes as 1.

    Without summed axes it is an elementwise multiplication, which has no multiply-adds; else a batched matrix product.
    Source: `sumproduct_pair` in ATen's Linear.cpp.

    >>> multiply_pair([2, 3, 1], [1, 3, 4], [1])
    (24, [2, 1, 4])
    """
    result = [max(sizes) if 0 not in sizes else 0 for sizes in zip(left, right, strict=True)]
    if not summed:
        return 0, result
    # A summed axis of one operand only is summed before the product.
    factor = [1 if axis in summed and 1 in (left[axis], right[axis]) else size for axis, size in enumerate(result)]
    return math.prod(factor), [1 if axis in summed else size for axis, size in enumerate(result)]


def _axes(call: Call, name: str) -> set[int]:
    return set(call.arguments[name])  # type: ignore[arg-type]


def _expand(tensor: TensorSpec, inserted: set[int]) -> list[int]:
    sizes = iter(tensor.shape)
    return [1 if axis in inserted else next(sizes) for axis in range(tensor.ndim + len(inserted))]


def count_exact_trilinear(call: Call) -> Cost:
    """Return the cost of aten::_trilinear, with its elementwise products and its sums over the unrolled dimension."""
    shapes = [_expand(call.tensor(f"i{index}"), _axes(call, f"expand{index}")) for index in (1, 2, 3)]
    if any(0 in shape for shape in shapes):
        return Cost(activations=call.out.numel)
    unroll, sums, inserted = call.integer("unroll_dim"), _axes(call, "sumdim"), _axes(call, "expand3")
    summed = sums - {unroll}
    times = max(shape[unroll] for shape in shapes)
    for shape in shapes:
        shape[unroll] = 1
    add, multiply = operation_costs(call)
    first, second, third = shapes
    macs, between = multiply_pair(first, second, summed & inserted)
    macs += multiply_pair(between, third, summed - inserted)[0]
    flops = other_flops(first, second, summed & inserted, add, multiply)
    flops += other_flops(between, third, summed - inserted, add, multiply)
    if unroll in sums:
        flops += add * call.out.numel
    return Cost(times * macs, times * flops, call.out.numel)


def operation_costs(call: Call) -> tuple[int, int]:
    return (2, 6) if call.out.is_complex else (1, 1)


def other_flops(left: list[int], right: list[int], summed: Collection[int], add: int, multiply: int) -> int:
    """Return the FLOPs of one product that are not multiply-adds."""
    if not summed:
        return multiply * math.prod(multiply_pair(left, right, summed)[1])
    pairs = ((left, right), (right, left))
    return add * sum(math.prod(a) for a, b in pairs if any(a[axis] > 1 and b[axis] == 1 for axis in summed))
