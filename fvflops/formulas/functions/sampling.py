"""Exact cost of indexing, adaptive pooling, antialiased interpolation and grid sampling."""

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


# Filter radius, in units of the larger of both grids' spacing.
_FILTER_RADII = {"bilinear": 1, "bicubic": 2, "lanczos": 3}
_BILINEAR, _NEAREST, _BICUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)


def count_exact_antialiased(call: Call) -> Cost:
    """Return the cost of an interpolation with antialiasing: the width first, then the height.

    An output is a sum of k products, where k is the maximum window size 2*ceil(radius*scale) + 1, the radius is 1
    (bilinear), 2 (bicubic) or 3 (lanczos), and the scale is the downscaling factor, at least 1. A dimension whose
    size does not change costs nothing. For aten::_upsample_bilinear2d_aa ... Source: ATen's UpSampleKernel.cpp.

    >>> from fvflops.trace import TensorSpec
    >>> image, out = TensorSpec((1, 1, 8, 8)), TensorSpec((1, 1, 4, 4))
    >>> count_exact_antialiased(Call("aten::_upsample_bilinear2d_aa", {"self": image}, (out,))).flops
    432
    """
    image = call.shape("self" if "self" in call.arguments else "input")
    return Cost(flops=sum(outputs * (2 * points - 1) for outputs, points in _passes(call, image, call.out.shape)))


def count_exact_antialiased_backward(call: Call) -> Cost:
    """Return the cost of its backward: a product and an addition per gradient and point of its window."""
    passes = _passes(call, tuple(call.arguments["input_size"]), call.shape("grad_output"))  # type: ignore[arg-type]
    return Cost(flops=sum(2 * outputs * points for outputs, points in passes))


def _passes(call: Call, image: tuple[int, ...], out: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (outputs, points per output) for the passes along the width and along the height."""
    radius = next(radius for name, radius in _FILTER_RADII.items() if name in call.op)
    passes = []
    planes = math.prod(out[:-2])
    for outputs, size, result in (
        (planes * image[-2] * out[-1], image[-1], out[-1]),
        (planes * out[-2] * out[-1], image[-2], out[-2]),
    ):
        if size != result and result:
            # ceil(radius * size / result), at least the radius; a window has at most as many points as the input.
            passes.append((outputs, min(size, 2 * max(radius, -(-radius * size // result)) + 1)))
    return passes


def count_exact_grid_sampler(call: Call) -> Cost:
    """Return the cost of grid sampling.

    Each coordinate is converted to pixels: 3 operations, 4 without aligned corners. The padding mode border clamps it
    from two sides; reflection first computes |x - low| (2), the quotient by the span (2), the remainder (2) and its
    mirror image (2). Bilinear: a floor and the distances to both sides (3), the corners' weights (one product each in
    2-D, two in 3-D); each output has as many products, and one sum less. Nearest: a rounding. Bicubic: a floor and a
    distance, 25 operations for the weights of a dimension; each output 5 sums of 4 products, row by row, for which the
    padding mode moves positions. Input [N, C, H, W] or [N, C, D, H, W]. For aten::grid_sampler, grid_sampler_2d and 3d.
    Source: ATen's GridSampler.h.

    >>> from fvflops.trace import TensorSpec
    >>> specs = {"input": TensorSpec((1, 3, 4, 4)), "grid": TensorSpec((1, 5, 5, 2))}
    >>> count_exact_grid_sampler(Call("grid", {**specs, "align_corners": False}, (TensorSpec((1, 3, 5, 5)),))).flops
    975
    """
    per_position, per_output = _sampling(call)
    return Cost(flops=_positions(call) * per_position + call.out.numel * per_output)


def count_exact_grid_sampler_backward(call: Call) -> Cost:
    """Return the cost of the backward of grid sampling: recomputed positions, the gradients of input and grid.

    The input's gradient takes a product and an addition per point that an output read. To the grid's gradient each
    point adds, per dimension, the product of its value, the gradient and the derivative of its weight (in 3-D a product
    of two distances); then one scaling per coordinate.
    """
    grad, mask = call.tensor("grad_output"), call.arguments.get("output_mask")
    wants_input, wants_grid = (bool(mask[0]), bool(mask[1])) if isinstance(mask, tuple) else (True, True)
    spatial, mode = call.shape("grid")[-1], _mode(call)
    points = {_BILINEAR: 2**spatial, _NEAREST: 1, _BICUBIC: 4**spatial}[mode]
    input_flops = 2 * points * wants_input if mode != _NEAREST else wants_input
    grid_flops = 3 * points * spatial * wants_grid if mode != _NEAREST else 0
    # The scaling per coordinate; derivatives of the weights of 3-D corners: 4 products for each of 3 dimensions.
    derivatives = 0 if mode == _NEAREST else spatial + (12 if spatial == 3 else 0)
    positions = _positions(call) * (_sampling(call)[0] + derivatives * wants_grid)
    return Cost(flops=positions + grad.numel * (input_flops + grid_flops))


def _mode(call: Call) -> int:
    mode = call.arguments.get("interpolation_mode")
    return mode if isinstance(mode, int) else _BILINEAR


def _positions(call: Call) -> int:
    return math.prod(call.shape("grid")[:-1])


def _sampling(call: Call) -> tuple[int, int]:
    """Return the FLOPs of grid sampling for each position, and for each element of the output."""
    spatial, padding = call.shape("grid")[-1], call.arguments.get("padding_mode")
    # cuDNN's op has no mode arguments: bilinear, zeros, aligned corners.
    aligned = bool(call.arguments.get("align_corners", True))
    coordinate = 3 if aligned else 4
    mode = _mode(call)
    if mode == _BICUBIC:
        return spatial * (coordinate + 2 + 25), 35
    coordinate += 10 if padding == _REFLECTION else 2 if padding == _BORDER else 0
    if mode == _NEAREST:
        return spatial * (coordinate + 1), 0
    corners = 2**spatial
    return spatial * (coordinate + 3) + corners * (spatial - 1), 2 * corners - 1
