"""Formulas of torch_flops that YAML cannot express: an optional parameter, a window, a power of a scale."""

from __future__ import annotations

import math

from fvflops.formulas.cost import Cost
from fvflops.formulas.language.call import Call
from fvflops.trace import TensorSpec


def count_torch_flops_convolution(call: Call) -> Cost:
    """Return the cost of a module Conv1d, Conv2d or Conv3d by torch_flops: multiplications, additions, the bias.

    An element of the output has kernel * in_channels / groups multiplications, one addition fewer, and one for the
    bias, if the module has one. Source: `flops_convnd` in torch_flops/flops_ops.py.

    >>> spec = TensorSpec((1, 6, 6))
    >>> call = Call("torch.nn.Conv1d", {}, (spec,), attributes={"weight": TensorSpec((6, 2, 3))})
    >>> count_torch_flops_convolution(call).flops
    396
    """
    weight = call.attributes["weight"]
    assert isinstance(weight, TensorSpec)
    multiplications = math.prod(weight.shape[1:])
    bias = isinstance(call.attributes.get("bias"), TensorSpec)
    return Cost(flops=call.out.numel * (2 * multiplications - 1 + bias))


def count_torch_flops_avg_pool(call: Call) -> Cost:
    """Return the cost of a module AvgPool1d, AvgPool2d or AvgPool3d by torch_flops: window * output elements.

    Reproduces a bug: a window passed as one number counts as that number, in two and three dimensions too. Source:
    `flops_avgpoolnd` in torch_flops/flops_ops.py.

    >>> call = Call("torch.nn.AvgPool2d", {}, (TensorSpec((1, 3, 4, 4)),), attributes={"kernel_size": 2})
    >>> count_torch_flops_avg_pool(call).flops
    96
    """
    return Cost(flops=_window(call) * call.out.numel)


def count_torch_flops_max_pool(call: Call) -> Cost:
    """Return the cost of a module MaxPool1d, MaxPool2d or MaxPool3d by torch_flops: (window - 1) * output elements.

    Reproduces the bug of `count_torch_flops_avg_pool`. Source: `flops_maxpoolnd` in torch_flops/flops_ops.py.
    """
    return Cost(flops=(_window(call) - 1) * call.out.numel)


def count_torch_flops_interpolate(call: Call) -> Cost:
    """Return the cost of interpolate by torch_flops: the positions of the size, or the input's elements times a scale.

    Reproduces three bugs: a size counts without batch and channels; a scale is raised to the number of samples, not of
    dimensions; a non-integer result is ignored by torch_flops. For the overloads `.vec` of the upsampling ops, in
    which a single scale is a list of equal ones. Source: `FunctionFLOPs_interpolate` in
    torch_flops/flops_ops.py.

    >>> images = TensorSpec((1, 3, 4, 4))
    >>> call = Call("aten::upsample_nearest2d.vec", {"input": images, "scale_factors": (2.0, 2.0)}, ())
    >>> count_torch_flops_interpolate(call).flops
    96
    """
    size, scales = call.arguments.get("output_size"), call.arguments.get("scale_factors")
    if isinstance(size, tuple):
        return Cost(flops=math.prod(item for item in size if isinstance(item, int)))
    assert isinstance(scales, tuple)
    scale = scales[0]
    assert isinstance(scale, (int, float))
    source = call.tensor("input")
    return Cost(flops=source.numel * int(scale) ** source.shape[0] if scale == int(scale) else 0)


def _window(call: Call) -> int:
    window = call.attributes["kernel_size"]
    sizes = window if isinstance(window, tuple) else (window,)
    return math.prod(size for size in sizes if isinstance(size, int))
