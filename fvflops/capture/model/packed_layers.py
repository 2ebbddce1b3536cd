"""Packed parameters (of torch.ao, bitsandbytes, tensor subclasses), and layers that store quantised weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

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


def named_tensors(module: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield "parameter" or "buffer", name and tensor of a module's own tensors; of TorchScript's modules too."""
    for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
        yield from ((kind, name, tensor) for name, tensor in tensors.items() if tensor is not None)


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


# Attributes by which layers state the sizes of their weight, output first.
_SIZES = (
    ("out_features", "in_features"),
    ("outfeatures", "infeatures"),
    ("num_embeddings", "embedding_dim"),
    ("nf", "nx"),
    ("m", "n"),
)
_BITS = ("bits", "w_bit", "nbits", "num_bits", "weight_bits")
_INDICES = frozenset({torch.int64, *LOW_PRECISION})
# A weight has at most 8 bits; vector codes may have less than one.
_LEAST, _MOST = 0.5, 8
# Start of the names of low-rank factors that a packed layer may have beside its weight.
ADAPTERS = "lora_"
# Ends of the names of sizes of a stack of experts.
_EXPERT_SIZES = ("size", "dim", "features")


class PackedLayer(NamedTuple):
    """Tensors of a layer of packed weights: logical specs of its `weights`, names of its `biases`.

    All other tensors of the layer are scales, zero points, codebooks and permutations, which the unpacked layer lacks.
    """

    weights: Mapping[str, TensorSpec]
    biases: frozenset[str]


def packed_layer(module: nn.Module) -> PackedLayer | None:
    """Return which tensors of a module are packed weights and biases, None for a module without packed weights.

    The layer states the sizes of its weight: as in_features and out_features, or in the table of a library (HQQ). Its
    largest tensor of integers or 8-bit floats is the weight if it has up to 8 bits for each logical element, and no
    floating-point tensor has as many elements. A stack of experts states a hidden and an intermediate size; a layer
    that states nothing has 8 bits for each element and a scale named after the tensor.
    """
    own = named_tensors(module)
    tensors = {name: item for _, name, item in own if item.layout is torch.strided and not item.is_nested}
    codes = {name: tensor for name, tensor in tensors.items() if tensor.dtype in _INDICES}
    if LOW_PRECISION.isdisjoint(tensor.dtype for tensor in codes.values()):
        return None
    shape = _stated_shape(module)
    if shape is None:
        weights = _expert_weights(module, codes) or _scaled_weights(codes, tensors)
    else:
        weights = _weight(module, shape, tensors, codes)
    if not weights:
        return None
    biases = {"bias", *(f"{name}_bias" for name in weights)}
    return PackedLayer(weights, frozenset(biases.intersection(tensors)))


def elements_per_item(model: nn.Module) -> dict[int, Fraction]:
    """Return the id of a parameter in a packed layer → its logical elements for each stored one, 0 for its scales."""
    return {
        id(tensor): Fraction(layer.weights[name].numel, tensor.numel()) if name in layer.weights else Fraction(0)
        for module in model.modules()
        if (layer := packed_layer(module)) is not None
        for name, tensor in module._parameters.items()
        if tensor is not None and name not in layer.biases and not name.startswith(ADAPTERS)
    }


def _stated_shape(module: nn.Module) -> tuple[int, int] | None:
    attributes = module.__dict__
    for names in _SIZES:
        sizes = tuple(attributes.get(name) for name in names)
        if all(type(size) is int and size > 0 for size in sizes):
            return sizes  # type: ignore[return-value]
    for table in _tables(attributes):
        shape = table.get("shape")
        if isinstance(shape, (tuple, list)) and len(shape) == 2 and all(type(size) is int for size in shape):
            return tuple(shape)
    return None


def _stated_bits(module: nn.Module, limit: float) -> int | None:
    """Return the bits of a code that a layer states, if they are at most `limit`."""
    for table in (module.__dict__, *_tables(module.__dict__)):
        for name in _BITS:
            bits = table.get(name)
            if type(bits) is int and 0 < bits <= limit:
                return bits
    return None


def _tables(attributes: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the plain dicts among public attributes, such as the `meta` of HQQ."""
    return (value for name, value in attributes.items() if type(value) is dict and not name.startswith("_"))


def _weight(
    module: nn.Module, shape: tuple[int, int], tensors: Mapping[str, torch.Tensor], codes: Mapping[str, torch.Tensor]
) -> dict[str, TensorSpec]:
    """Return the weight of a layer of one matrix, {} if no tensor can be it."""
    elements = shape[0] * shape[1]
    others = [tensor for name, tensor in tensors.items() if name not in codes]
    values = [tensor.numel() for tensor in others if tensor.ndim == 1]
    candidates = [
        (tensor.numel() * tensor.element_size(), name)
        for name, tensor in codes.items()
        # Permutations and group indices have an element for each channel; a sparse matrix one or two for each value.
        if tensor.numel() not in (*shape, *values, *(2 * size for size in values))
        and (tensor.dtype in LOW_PRECISION or _stated_bits(module, _MOST))
    ]
    if not candidates or any(tensor.numel() == elements for tensor in others):
        return {}
    nbytes, name = max(candidates)
    spec = describe_tensor(codes[name])
    bits = 8 * nbytes / elements
    if logical_spec(codes[name], spec) is not spec or not _LEAST <= bits <= _MOST:
        return {}
    dtype = code_dtype(spec, elements, _stated_bits(module, bits))
    return {name: TensorSpec(shape, _floating(dtype, elements, name, tensors), spec.device)}


def _floating(dtype: str, elements: int, weight: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the dtype of codes of 4 bits that are floating-point numbers: their scales have 8 bits, one for 32 or 16.

    Source: OCP Microscaling Formats 1.0, table 1, has one format of 4 bits (E2M1); NVFP4 has E4M3 scales for 16.
    """
    others = [tensor for name, tensor in tensors.items() if name != weight and tensor.element_size() == 1]
    scales = [tensor for tensor in others if tensor.numel() in (elements // 32, elements // 16)]
    return "float4_e2m1fn" if dtype == "int4" and scales else dtype


def _expert_weights(module: nn.Module, codes: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """Return the weights [experts, out, in] of a stack: one size is stated, or twice it, the other is it or packed."""
    attributes = module.__dict__.items()
    sizes = {value for name, value in attributes if type(value) is int and value > 1 and name.endswith(_EXPERT_SIZES)}
    found = {}
    for name, tensor in codes.items():
        if tensor.ndim != 3 or not sizes or tensor.dtype not in LOW_PRECISION:
            continue
        spec = describe_tensor(tensor)
        experts, rows, columns = spec.shape
        for packing in (1, *(8 * tensor.element_size() // bits for bits in (4, 2))):
            logical = next(
                (
                    (experts, *sides)
                    for sides in ((rows, packing * columns), (packing * rows, columns))
                    if all(side in sizes or (side % 2 == 0 and side // 2 in sizes) for side in sides)
                ),
                None,
            )
            if logical is not None:
                # Two in a byte: experts have 4-bit floats (MXFP4, NVFP4); no library packs integers into such stacks.
                dtype = code_dtype(spec, math.prod(logical))
                is_float = dtype == "int4" and tensor.element_size() == 1
                found[name] = TensorSpec(logical, "float4_e2m1fn" if is_float else dtype, spec.device)
                break
    return found


def _scaled_weights(codes: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """Return matrices of 8 bits with scales named after them, of a layer that states no sizes, such as EETQ's."""
    return {
        name: describe_tensor(tensor)
        for name, tensor in codes.items()
        if tensor.element_size() == 1
        and tensor.ndim > 1
        and any(other.startswith((f"{name}_scale", f"{name}_inv_scale")) for other in tensors)
    }
