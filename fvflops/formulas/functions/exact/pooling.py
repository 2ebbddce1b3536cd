"""Exact cost of adaptive pooling, whose windows may differ in size and overlap."""

from __future__ import annotations

import math

from fvflops.formulas.cost import Cost
from fvflops.formulas.language.call import Call
from fvflops.trace import TensorSpec


def count_exact_adaptive_average(call: Call) -> Cost:
    """Return the cost of an adaptive average pooling: an addition per window element, a division per result.

    For aten::adaptive_avg_pool2d, _adaptive_avg_pool3d and their variants.

    >>> image, out = TensorSpec((1, 3, 5, 6)), TensorSpec((1, 3, 3, 2))
    >>> count_exact_adaptive_average(Call("pool", {"self": image, "output_size": (3, 2)}, (out,))).flops
    144
    """
    out = call.out
    return Cost(flops=_covered(call.tensor("self"), out, len(call.arguments["output_size"])) + out.numel)  # type: ignore[arg-type]


def count_exact_adaptive_maximum(call: Call) -> Cost:
    """Return the cost of an adaptive maximum pooling: a compare-select per window element."""
    return Cost(flops=_covered(call.tensor("self"), call.out, len(call.arguments["output_size"])))  # type: ignore[arg-type]


def count_exact_adaptive_average_backward(call: Call) -> Cost:
    """Return the cost of the backward of an adaptive average pooling: a division and an addition per window element.

    For aten::_adaptive_avg_pool2d_backward, 3d and their variants.
    """
    grad = call.tensor("grad_output")
    return Cost(flops=_covered(call.tensor("self"), grad, 2 if "2d" in call.op else 3) + grad.numel)


def _covered(image: TensorSpec, out: TensorSpec, spatial: int) -> int:
    """Return the total number of elements in the windows of all results.

    Along a dimension window i of m reaches from floor(i*n/m) to ceil((i + 1)*n/m), and all have n + m - gcd(n, m).
    """
    sizes = zip(image.shape[-spatial:], out.shape[-spatial:], strict=True)
    return math.prod(out.shape[:-spatial]) * math.prod(n + m - math.gcd(n, m) if n and m else 0 for n, m in sizes)
