"""Formulas that reproduce other tools' conventions: ptflops, torch_flops and torchinfo."""

from __future__ import annotations

import math

from fvflops.formulas.cost import Cost
from fvflops.formulas.language.call import Call
from fvflops.trace import TensorSpec

_SIZES = ("kernel_size", "in_channels", "out_channels", "groups")
# Cost of one sample of a deformable convolution in ptflops: a bilinear interpolation, its fractional
# coordinates, and the modulation by a mask if there is one.
_SAMPLE = 20 + 4
_MODULATION = 1


def count_ptflops_linear(call: Call) -> Cost:
    """Return the cost of a linear layer by ptflops 0.7.5: out_features * (in_features + 1) per row, the 1 for a bias.

    Source: ptflops/pytorch_ops.py, linear_flops_counter_hook.

    >>> attributes = {"weight": TensorSpec((5, 8)), "bias": TensorSpec((5,))}
    >>> inputs = {"input": TensorSpec((2, 3, 8))}
    >>> count_ptflops_linear(Call("torch.nn.Linear", inputs, (TensorSpec((2, 3, 5)),), attributes=attributes))
    Cost(macs=240, flops=30, activations=None)
    """
    rows, columns = math.prod(call.shape("input")[:-1]), call.out.shape[-1]
    return Cost(macs=rows * columns * call.shape("input")[-1], flops=rows * columns * _has(call, "bias"))


def count_ptflops_convolution(call: Call) -> Cost:
    """Return the cost of a convolution by ptflops 0.7.5: kernel * in_channels * out_channels / groups per position.

    Positions are the output's, or the input's for a transposed class. A bias adds the elements of the output, a
    deformable convolution the sampling of the input per position. An input [C, *spatial] is treated as a batch, as in
    ptflops. Source: conv_flops_counter_hook and deformable_conv_flops_counter_hook.

    >>> attributes = {"kernel_size": (3,), "in_channels": 4, "out_channels": 6, "groups": 2, "bias": TensorSpec((6,))}
    >>> inputs = {"input": TensorSpec((1, 4, 8))}
    >>> count_ptflops_convolution(Call("torch.nn.Conv1d", inputs, (TensorSpec((1, 6, 6)),), attributes=attributes))
    Cost(macs=216, flops=36, activations=None)
    """
    image, out = call.shape("input"), call.out.shape
    kernel, inner, outer, groups = (_number(call, name) for name in _SIZES)
    positions = math.prod((image if "Transpose" in call.op else out)[2:])
    sample = 0
    if "Deform" in call.op:
        sample = _SAMPLE + (_MODULATION if "input_2" in call.arguments else 0)
    bias = image[0] * math.prod(out[1:]) * _has(call, "bias")
    return Cost(
        macs=image[0] * positions * kernel * inner * (outer // groups),
        flops=image[0] * positions * kernel * sample + bias,
    )


def count_ptflops_attention(call: Call) -> Cost:
    """Return the cost of nn.MultiheadAttention by ptflops 0.7.5: projections, both products, softmax, scaling, biases.

    A call that returns its weights computes them by F.softmax, which ptflops counts twice. As in ptflops, keys and
    values of other sizes than the queries are projected to these sizes, and the last projection always has a bias.
    Source: multihead_attention_counter_hook and FUNCTIONAL_MAPPING.

    >>> inputs = {name: TensorSpec((2, 5, 8)) for name in ("input", "input_1", "input_2")}
    >>> attributes = {"batch_first": True, "num_heads": 2, "in_proj_bias": TensorSpec((24,))}
    >>> count_ptflops_attention(Call("torch.nn.MultiheadAttention", inputs, (), attributes=attributes))
    Cost(macs=3360, flops=500, activations=None)
    """
    query, key, value = (call.shape(name) for name in ("input", "input_1", "input_2"))
    heads = _number(call, "num_heads")
    batch_axis, length_axis = (0, 1) if call.attributes.get("batch_first") else (1, 0)
    batch, (Q, K, V) = query[batch_axis], (shape[length_axis] for shape in (query, key, value))
    E, D, F = query[2], key[2], value[2]
    projections = Q * E * E + K * D * D + V * F * F + Q * F * F
    products = heads * Q * K * (E // heads + F // heads)
    softmax = heads * Q * K * (1 if len(call.outputs) < 2 else 2)
    biases = Q * F + (Q + K + V) * E * _has(call, "in_proj_bias")
    return Cost(macs=batch * (projections + products), flops=batch * (Q * E + softmax + biases))


def _has(call: Call, name: str) -> bool:
    """Return whether a module has a parameter; one that is None is not among its attributes."""
    return isinstance(call.attributes.get(name), TensorSpec)


def _number(call: Call, name: str) -> int:
    """Return a numeric attribute of a module, of a list the product; a module without it raises ValueError."""
    value = call.attributes.get(name)
    numbers = value if isinstance(value, tuple) else (value,)
    product = 1
    for number in numbers:
        if not isinstance(number, int):
            raise ValueError(f"{call.op} has {name} = {value!r}, not an integer")
        product *= number
    return product


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
    return Cost(flops=call.out.numel * (2 * multiplications - 1 + _has(call, "bias")))


def count_torch_flops_avg_pool(call: Call) -> Cost:
    """Return the cost of a module AvgPool1d, AvgPool2d or AvgPool3d by torch_flops: window * output elements.

    Reproduces a bug: a window passed as one number counts as that number, in two and three dimensions too. Source:
    `flops_avgpoolnd` in torch_flops/flops_ops.py.

    >>> call = Call("torch.nn.AvgPool2d", {}, (TensorSpec((1, 3, 4, 4)),), attributes={"kernel_size": 2})
    >>> count_torch_flops_avg_pool(call).flops
    96
    """
    return Cost(flops=_number(call, "kernel_size") * call.out.numel)


def count_torch_flops_max_pool(call: Call) -> Cost:
    """Return the cost of a module MaxPool1d, MaxPool2d or MaxPool3d by torch_flops: (window - 1) * output elements.

    Reproduces the bug of `count_torch_flops_avg_pool`. Source: `flops_maxpoolnd` in torch_flops/flops_ops.py.
    """
    return Cost(flops=(_number(call, "kernel_size") - 1) * call.out.numel)


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


def count_torchinfo_layer(call: Call) -> Cost:
    """Return the cost of one call of a module without submodules by torchinfo 1.8.0.

    A parameter named `weight` or `bias` counts its elements per index of the output's first dimension, and in a class
    with "Conv" in its name per position of the output, channels second. One with "weight" or "bias" inside its name, as
    in recurrent layers, counts them per index of the output's first two dimensions. Other parameters count nothing. The
    class name is the table row's. Source: torchinfo/layer_info.py, calculate_macs.

    >>> linear = {"weight": TensorSpec((5, 8)), "bias": TensorSpec((5,))}
    >>> count_torchinfo_layer(Call("torch.nn.Linear", {}, (TensorSpec((2, 7, 5)),), attributes=linear)).macs
    90
    """
    out = call.out.shape
    convolves = "Conv" in call.op.rpartition(".")[2]
    macs = 0
    for name, value in call.attributes.items():
        if not isinstance(value, TensorSpec):
            continue
        if name in ("weight", "bias"):
            macs += value.numel * (math.prod(out[:1] + out[2:]) if convolves else out[0])
        elif "weight" in name or "bias" in name:
            macs += value.numel * math.prod(out[:2])
    return Cost(macs=macs)
