"""Cost of a layer by torchinfo: from the sizes of its weights and biases, independent of their use."""

from __future__ import annotations

import math

from fvflops.formulas.cost import Cost
from fvflops.formulas.language.call import Call
from fvflops.trace import TensorSpec


def count_torchinfo_layer(call: Call) -> Cost:
    """Return the cost of one call of a module without submodules by torchinfo 1.8.0.

    A parameter named `weight` or `bias` counts its elements per index of the output's first dimension, and in a class
    with "Conv" in its name per position of the output, channels second. One with "weight" or "bias" inside its name, as
    in recurrent layers, counts them per index of the output's first two dimensions. Other parameters count nothing. The
    class name is that of the table's row. Source: torchinfo/layer_info.py,
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
