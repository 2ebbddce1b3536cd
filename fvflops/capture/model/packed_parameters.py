"""Read packed parameters: in torch.ao's quantization objects, in bitsandbytes' or in tensor subclasses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fvflops.capture.recorder.tensor_specs import describe_tensor, inner_tensors
from fvflops.torch_internals import is_wrapper_subclass, pytree
from fvflops.trace import TensorSpec

_QUANTIZED = "__torch__.torch.classes.quantized."
_CELL = "__torch__.torch.classes.rnn.CellParamsBase"
_TENSOR_TYPES = (nn.Parameter, torch.Tensor)
# Dtypes in which libraries store quantised weights; several weights may share an element.
LOW_PRECISION = frozenset(
    dtype
    for name in (
        *("int8", "uint8", "int16", "uint16", "int32", "uint32", "float4_e2m1fn_x2"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if (dtype := getattr(torch, name, None)) is not None
)


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
        inner = [item for item in pytree.tree_leaves(value.__getstate__()) if isinstance(item, torch.ScriptObject)]
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


def logical_spec(tensor: torch.Tensor, spec: TensorSpec) -> TensorSpec:
    """Return the spec of a parameter's logical elements if its tensor stores them as codes of a few bits, else `spec`.

    These are bitsandbytes' `Params4bit`, whose `quant_state` has the logical shape; torch's float4_e2m1fn_x2; and
    wrapper subclasses of a floating-point dtype around integers or 8-bit floats, as in torchao and quanto.
    """
    if spec.dtype == "float4_e2m1fn_x2" and spec.shape:
        return TensorSpec((*spec.shape[:-1], 2 * spec.shape[-1]), "float4_e2m1fn", spec.device)
    if type(tensor) in _TENSOR_TYPES:
        return spec
    if is_wrapper_subclass(tensor):
        codes = max(inner_tensors(tensor), key=_nbytes, default=None)
        if codes is None or not spec.is_floating_point or codes.dtype not in LOW_PRECISION or not spec.numel:
            return spec
        kind = getattr(tensor, "quant_type", None)
        return replace(spec, dtype=kind if isinstance(kind, str) else code_dtype(describe_tensor(codes), spec.numel))
    state = getattr(tensor, "quant_state", None)
    kind, shape = getattr(state, "quant_type", None), getattr(state, "shape", None)
    if kind in ("nf4", "fp4") and shape is not None and 2 * _nbytes(tensor) >= math.prod(shape):
        return TensorSpec(tuple(map(int, shape)), kind, spec.device)
    return spec


def stored_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a parameter as stored, with the scales inside a wrapper subclass."""
    return sum(map(_nbytes, inner_tensors(tensor)))


def code_dtype(stored: TensorSpec, elements: int, bits: int | None = None) -> str:
    """Return the dtype of weights stored as codes: the stored one, or such as int4 where an element has several.

    `bits` of a code are stated by the layer; otherwise they follow from the stored bytes.

    >>> code_dtype(TensorSpec((8, 64), "int32"), 64 * 64), code_dtype(TensorSpec((64, 64), "int8"), 64 * 64)
    ('int4', 'int8')
    """
    if stored.numel == elements and bits in (None, 8):
        return stored.dtype
    return f"int{bits or max(1, round(8 * stored.nbytes / elements))}"


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
