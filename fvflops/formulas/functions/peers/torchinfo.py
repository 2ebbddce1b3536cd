"""The layer as torchinfo prices it: by the elements of its weights and biases, whatever the layer does with them."""

from __future__ import annotations

import math

from fvflops.formulas.cost import Cost
from fvflops.formulas.language.call import Call
from fvflops.trace import TensorSpec


def count_torchinfo_layer(call: Call) -> Cost:
    """Return what torchinfo 1.8.0 says of one call of a module that has no submodules.

    A parameter called `weight` or `bias` counts its elements for each item of the output's first dimension, and in a
    class with "Conv" in its name for each position of the output, channels second. One with "weight" or "bias" inside
    its name, as those of recurrent layers, counts them for each index of the output's first two dimensions. Every other
    parameter counts nothing. The class is the one that the table names. Source: torchinfo/layer_info.py,
    calculate_macs.

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
