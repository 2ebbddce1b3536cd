"""Exact cost of index_put: with `accumulate` one addition per written element."""

from __future__ import annotations

import math
from itertools import zip_longest

from fvflops.formulas.cost import Cost
from fvflops.formulas.language.call import Call
from fvflops.trace import TensorSpec


def count_exact_index_put(call: Call) -> Cost:
    """Return the cost of an index_put: 0, or with `accumulate` one addition per indexed element.

    The indices broadcast together, dimensions without an index are selected whole, and the values broadcast to that. A
    bool mask is assumed to select as many elements as there are values. For aten::index_put and its variants.

    >>> arguments = {"self": TensorSpec((4, 3)), "indices": (TensorSpec((2,), "int64"),), "values": TensorSpec((3,))}
    >>> count_exact_index_put(Call("aten::index_put", {**arguments, "accumulate": True}, ())).flops
    6
    """
    if not call.arguments.get("accumulate"):
        return Cost()
    target, values = call.tensor("self"), call.tensor("values")
    indices = call.arguments["indices"]
    index_tensors = [item for item in (indices if isinstance(indices, tuple) else ()) if isinstance(item, TensorSpec)]
    flops_per_add = 2 if target.is_complex else 1
    if any(item.dtype in ("bool", "uint8") for item in index_tensors):
        return Cost(flops=flops_per_add * values.numel)
    axes = zip_longest(*(item.shape[::-1] for item in index_tensors), fillvalue=1)
    positions = math.prod(0 if 0 in sizes else max(sizes) for sizes in axes)
    unindexed = [size for axis, size in enumerate(target.shape) if not _has_index(indices, axis)]
    return Cost(flops=flops_per_add * positions * math.prod(unindexed))


def _has_index(indices: object, axis: int) -> bool:
    return isinstance(indices, tuple) and axis < len(indices) and isinstance(indices[axis], TensorSpec)
