"""Exact cost of einsum and _trilinear, including the multiplications and sums outside of matrix products."""

from __future__ import annotations

import math
from collections.abc import Collection

from fvflops.formulas.cost import Cost
from fvflops.formulas.functions.einsum import contract
from fvflops.formulas.functions.matmul import count_trilinear, multiply_pair, pair_up
from fvflops.formulas.language.call import Call


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
    contraction = contract(call)
    add, multiply = _operation_costs(call)
    macs = flops = 0
    for step in contraction.steps:
        flops += add * sum(
            math.prod(factor) for factor in step.factors if any(factor[axis] > 1 for axis in step.summed_before)
        )
        macs += multiply_pair(*step.reduced_shapes, step.summed)[0]
        flops += _other_flops(*step.reduced_shapes, step.summed, add, multiply)
    if any(contraction.last[axis] > 1 for axis in contraction.summed_last):
        flops += add * math.prod(contraction.last)
    return Cost(macs, flops, call.out.numel)


def count_exact_trilinear(call: Call) -> Cost:
    """Return the cost of aten::_trilinear, with its elementwise products and its sums over the unrolled dimension."""
    products, add, multiply = count_trilinear(call), *_operation_costs(call)
    pairs = pair_up(call)
    flops = sum(_other_flops(left, right, summed, add, multiply) for left, right, summed in pairs.steps)
    if pairs.sums_unrolled:
        flops += add * call.out.numel
    return Cost(products.macs, products.flops + pairs.times * flops, products.activations)


def _operation_costs(call: Call) -> tuple[int, int]:
    return (2, 6) if call.out.is_complex else (1, 1)


def _other_flops(left: list[int], right: list[int], summed: Collection[int], add: int, multiply: int) -> int:
    """Return the FLOPs of one product that are not multiply-adds."""
    if not summed:
        return multiply * math.prod(multiply_pair(left, right, summed)[1])
    pairs = ((left, right), (right, left))
    return add * sum(math.prod(a) for a, b in pairs if any(a[axis] > 1 and b[axis] == 1 for axis in summed))
