"""Read packed parameters: those in torch.ao's quantization objects, or with two values in one byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fvflops.trace import TensorSpec

_QUANTIZED = "__torch__.torch.classes.quantized."
_CELL = "__torch__.torch.classes.rnn.CellParamsBase"
_TENSOR_TYPES = (nn.Parameter, torch.Tensor)


def packed_tensors(module: nn.Module) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Yield the tensors in the objects in which a torch.ao module stores its weights, such as `_packed_params`.

    Yields (name, identity, tensor): `_packed_params.weight`, a number that is equal for two names of one tensor, and
    the logical elements, [out, in] for a linear layer, independent of the memory layout.
    """
    for attribute, value in module.__dict__.items():
        if type(value) is torch.ScriptObject:
            for name, tensor in _unpack(value):
                yield f"{attribute}.{name}", hash((id(value), name)), tensor


def _unpack(value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    kind = value._type().qualified_name()
    if kind == _CELL:  # its own tensors are the biases of the linear layers inside
        inner = [item for item in _flatten(value.__getstate__()) if isinstance(item, torch.ScriptObject)]
        names = ("ih", "hh", "hr")[: len(inner)]
        for prefix, item in zip(names, inner, strict=True):
            for name, tensor in _unpack(item):
                yield f"{name}_{prefix}", tensor
    elif kind.startswith(_QUANTIZED) and value._has_method("unpack"):
        unpacked = value._get_method("unpack")()
        tensors = unpacked if isinstance(unpacked, tuple) else (unpacked,)
        for name, tensor in zip(("weight", "bias"), tensors, strict=False):
            if tensor is not None:
                yield name, tensor


def _flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flatten(item)
    else:
        yield value


def logical_spec(tensor: torch.Tensor, spec: TensorSpec) -> TensorSpec:
    """Return the spec of a parameter's logical elements if its tensor packs two of them in a byte, else `spec`.

    These are bitsandbytes' `Params4bit`, whose `quant_state` has the logical shape, and torch's float4_e2m1fn_x2. The
    dtype is then nf4, fp4 or float4_e2m1fn, of half a byte.
    """
    if spec.dtype == "float4_e2m1fn_x2" and spec.shape:
        return TensorSpec((*spec.shape[:-1], 2 * spec.shape[-1]), "float4_e2m1fn", spec.device)
    if type(tensor) in _TENSOR_TYPES:
        return spec
    state = getattr(tensor, "quant_state", None)
    kind, shape = getattr(state, "quant_type", None), getattr(state, "shape", None)
    if kind in ("nf4", "fp4") and shape is not None and tensor.element_size() * tensor.numel() * 2 >= _product(shape):
        return TensorSpec(tuple(map(int, shape)), kind, spec.device)
    return spec


def _product(shape: Any) -> int:
    return int(torch.Size(shape).numel())
