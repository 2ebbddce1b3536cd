"""The names of `fvcore.nn.jit_handles`, for handles in fvcore's form, without fvcore.

A handle takes the inputs and the outputs of an op, and returns its FLOPs, or a Counter of them by operator. Values may
be torch's, or values that fvflops passes to a handle. The rules are fvcore's: a multiply-add is one FLOP.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from fvflops.formulas import Call
from fvflops.formulas.functions.einsum import count_fvcore_einsum
from fvflops.trace import TensorSpec

Handle = Callable[[list[Any], list[Any]], Any]


def get_shape(val: Any) -> list[int] | None:
    """Return the shape of a value, None if it is not a tensor."""
    shape: list[int] | None = val.type().sizes() if val.isCompleteTensor() else None
    return shape


def generic_activation_jit(op_name: str | None = None) -> Handle:
    """Return a handle that counts the elements of the first output, under `op_name` if that is given."""

    def count_outputs(inputs: list[Any], outputs: list[Any]) -> int | Counter[str]:
        count = _numel(outputs[0])
        return count if op_name is None else Counter({op_name: count})

    return count_outputs


def elementwise_flop_counter(input_scale: float = 1, output_scale: float = 0) -> Handle:
    """Return a handle that counts given FLOPs for each element of the first input and of the first output.

    >>> import torch
    >>> from fvflops import FlopCountAnalysis
    >>> analysis = FlopCountAnalysis(torch.nn.GELU(), torch.ones(2, 3))
    >>> analysis.set_op_handle("aten::gelu", elementwise_flop_counter(0, 8)).total()
    48
    """

    def count_elements(inputs: list[Any], outputs: list[Any]) -> float:
        scales = ((input_scale, inputs), (output_scale, outputs))
        return sum(scale * _numel(values[0]) for scale, values in scales if scale)

    return count_elements


def conv_flop_count(
    x_shape: Sequence[int], w_shape: Sequence[int], out_shape: Sequence[int], transposed: bool = False
) -> int:
    """Return the multiply-adds of a convolution, by the shapes of input, weight and output, each with a batch.

    >>> conv_flop_count([1, 3, 32, 32], [8, 3, 3, 3], [1, 8, 30, 30])
    194400
    """
    return x_shape[0] * math.prod(w_shape) * math.prod((x_shape if transposed else out_shape)[2:])


def conv_flop_jit(inputs: list[Any], outputs: list[Any]) -> Counter[str]:
    """Count an `aten::_convolution`, as "conv"."""
    image, weight, out = (_shape(value) for value in (*inputs[:2], outputs[0]))
    return Counter({"conv": conv_flop_count(image, weight, out, inputs[6].toIValue())})


def addmm_flop_jit(inputs: list[Any], outputs: list[Any]) -> int:
    """Count an `aten::addmm`."""
    return _numel(inputs[1]) * _shape(inputs[2])[-1]


def linear_flop_jit(inputs: list[Any], outputs: list[Any]) -> int:
    """Count an `aten::linear`."""
    return _numel(inputs[0]) * _shape(inputs[1])[0]


def matmul_flop_jit(inputs: list[Any], outputs: list[Any]) -> int:
    """Count an `aten::matmul`, with the batches of the first operand alone, as fvcore does."""
    return _numel(inputs[0]) * _shape(inputs[1])[-1]


def bmm_flop_jit(inputs: list[Any], outputs: list[Any]) -> int:
    """Count an `aten::bmm`."""
    return matmul_flop_jit(inputs, outputs)


def einsum_flop_jit(inputs: list[Any], outputs: list[Any]) -> int:
    """Count an `aten::einsum` from the four digits of numpy's cheapest path, as fvcore does."""
    tensors = tuple(TensorSpec(tuple(_shape(value))) for value in inputs[1].node().inputs())
    arguments = {"equation": inputs[0].toIValue(), "tensors": tensors}
    macs = count_fvcore_einsum(Call("aten::einsum", arguments, (TensorSpec(tuple(_shape(outputs[0]))),))).macs
    assert macs is not None
    return macs


def norm_flop_counter(affine_arg_index: int) -> Handle:
    """Return a handle that counts 5 FLOPs per element of a norm with weights, which are that input, else 4."""

    def count_norm(inputs: list[Any], outputs: list[Any]) -> int:
        return _numel(inputs[0]) * (4 if get_shape(inputs[affine_arg_index]) is None else 5)

    return count_norm


def batchnorm_flop_jit(inputs: list[Any], outputs: list[Any]) -> int:
    """Count an `aten::batch_norm`: in training as any norm, else 2 FLOPs per element with weights, or 1."""
    if inputs[5].toIValue():
        count: int = norm_flop_counter(1)(inputs, outputs)
        return count
    return _numel(inputs[0]) * (1 if get_shape(inputs[1]) is None else 2)


def _shape(value: Any) -> list[int]:
    shape = get_shape(value)
    if shape is None:
        raise TypeError(f"this handle needs a tensor, not {value}")
    return shape


def _numel(value: Any) -> int:
    return math.prod(_shape(value))
