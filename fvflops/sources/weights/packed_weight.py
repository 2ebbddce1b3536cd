"""A weight of few bits as a tensor subclass: codes and scales inside, a floating-point tensor outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.nn import functional

from fvflops.torch_internals import make_wrapper_subclass, no_torch_function, pytree

# Values of the codes of 4-bit floating-point formats, from code 0. Sources: Dettmers et al., "QLoRA"
# (arXiv:2305.14314), appendix E; OCP Microscaling Formats 1.0, E2M1.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TABLES = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "float4_e2m1fn": (*_E2M1, *(-value for value in _E2M1)),
}
# Ops that change which weights there are, or nothing: applied to codes and scales alike.
_SAME = frozenset({"aten::detach", "aten::alias"})
_OF_PARTS = frozenset({"aten::clone", "aten::select.int", "aten::_to_copy", *_SAME})
_INNER = ("codes", "scale", "offset")
_GROUPS = "bool transposed, Tensor offs, ScalarType compute"


@cache
def define_ops() -> Any:
    """Return the namespace with the ops of packed weights, defined on first use.

    `packed_linear` and `packed_grouped_mm` are kernels that read packed weights, as libraries have for inference;
    `unpack_weight` returns the weight itself, as they do where a gradient follows.
    """
    library = torch.library.Library("fvflops", "FRAGMENT")
    weight = "Tensor codes, Tensor scale, Tensor? offset, str format, int[] shape"
    for name, arguments, run, fake in (
        ("unpack_weight", f"{weight}, ScalarType dtype", _unpack, _unpack_fake),
        ("packed_linear", f"Tensor input, {weight}, Tensor? bias, ScalarType compute", _linear, _linear_fake),
        ("packed_grouped_mm", f"Tensor input, {weight}, {_GROUPS}", _grouped_mm, _grouped_mm_fake),
    ):
        library.define(f"{name}({arguments}) -> Tensor")
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fvflops::{name}", fake)
    define_ops.library = library  # type: ignore[attr-defined]  # an op exists as long as its library
    return torch.ops.fvflops


def _unpack(codes: torch.Tensor, scale: torch.Tensor, offset: Any, format: str, shape: Any, dtype: Any) -> torch.Tensor:
    rows, columns = shape[-2:]
    values = _values(codes, format, columns)
    factor = scale.float()
    if offset is not None and offset.is_floating_point():  # scales of the scales
        factor = factor * offset.repeat_interleave(math.ceil(factor[0].numel() / offset[0].numel()), -1)[
            ..., : factor[0].numel()
        ].view_as(factor)
    elif offset is not None:
        values = values - _expand(_values(offset, format, factor.shape[-1]), rows, columns)
    return (values * _expand(factor, rows, columns)).to(dtype)


def _values(codes: torch.Tensor, format: str, columns: int) -> torch.Tensor:
    """Return the numbers that codes stand for, in float32, before scaling."""
    if codes.dtype is not torch.uint8:
        return codes.float()
    bits = bits_of(format)
    single = (codes.unsqueeze(-1) >> torch.arange(8, device=codes.device)) & 1
    single = single.flatten(-2)[..., : columns * bits].unflatten(-1, (columns, bits)).long()
    numbers = (single << torch.arange(bits, device=codes.device)).sum(-1)
    if format in _TABLES:
        return torch.tensor(_TABLES[format], device=codes.device)[numbers]
    centred: torch.Tensor = numbers.float() - 2 ** (bits - 1)
    return centred


def _expand(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    tall = values.repeat_interleave(math.ceil(rows / values.shape[-2]), -2)[..., :rows, :]
    return tall.repeat_interleave(math.ceil(columns / values.shape[-1]), -1)[..., :columns]


def _linear(input: torch.Tensor, *weight: Any) -> torch.Tensor:
    return functional.linear(input, _unpack(*(*weight[:5], input.dtype)), weight[5])


def _grouped_mm(input: torch.Tensor, *weight: Any) -> torch.Tensor:
    dense = _unpack(*(*weight[:5], input.dtype))
    return functional.grouped_mm(input, dense.transpose(-2, -1) if weight[5] else dense, offs=weight[6])


def _unpack_fake(codes: torch.Tensor, scale: Any, offset: Any, format: str, shape: Any, dtype: Any) -> torch.Tensor:
    return codes.new_empty(shape, dtype=dtype)


def _linear_fake(input: torch.Tensor, *weight: Any) -> torch.Tensor:
    return input.new_empty((*input.shape[:-1], weight[4][-2]))


def _grouped_mm_fake(input: torch.Tensor, *weight: Any) -> torch.Tensor:
    return input.new_empty((input.shape[0], weight[4][-2] if weight[5] else weight[4][-1]))


def bits_of(format: str) -> int:
    """Return the bits of a code of a format.

    >>> bits_of("int3"), bits_of("nf4"), bits_of("float8_e4m3fn")
    (3, 4, 8)
    """
    return int("".join(filter(str.isdigit, format.partition("_")[0])))


class PackedWeight(torch.Tensor):
    """A weight that modules use as a tensor of `dtype`, stored as codes of a format.

    Linear layers and grouped products read the codes; all other ops get the unpacked weight. `compute` is the dtype in
    which products are computed, None for the weight's. `quant_type` is the dtype of a code, such as int4 or nf4.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    quant_type: str
    _stored_shape: tuple[int, ...]
    _compute: torch.dtype | None
    _transposed: bool

    @staticmethod
    def __new__(
        cls,
        parts: Sequence[torch.Tensor | None],
        format: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        compute: torch.dtype | None = None,
        transposed: bool = False,
    ) -> PackedWeight:
        size = (*shape[:-2], shape[-1], shape[-2]) if transposed else tuple(shape)
        assert parts[0] is not None
        weight: PackedWeight = make_wrapper_subclass(cls, size, dtype=dtype, device=parts[0].device)
        weight.codes, weight.scale, weight.offset = parts  # type: ignore[assignment]
        weight.quant_type, weight._stored_shape, weight._compute = format, tuple(shape), compute
        weight._transposed = transposed
        return weight

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [name for name in _INNER if getattr(self, name) is not None]
        return names, self._context()

    def _context(self) -> tuple[Any, ...]:
        return self.quant_type, self._stored_shape, self.dtype, self._compute, self._transposed

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, torch.Tensor], context: Any, size: Any, stride: Any) -> PackedWeight:
        return PackedWeight([inner.get(name) for name in _INNER], *context)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PackedWeight({self.quant_type}{list(self.shape)})"

    def unpack(self) -> torch.Tensor:
        dense: torch.Tensor = define_ops().unpack_weight(*self._arguments(), self.dtype)
        return dense.transpose(-2, -1) if self._transposed else dense

    def _arguments(self) -> tuple[Any, ...]:
        return self.codes, self.scale, self.offset, self.quant_type, self._stored_shape

    def _replaced(self, apply: Callable[[torch.Tensor], torch.Tensor], **changes: Any) -> PackedWeight:
        parts = [None if part is None else apply(part) for part in (self.codes, self.scale, self.offset)]
        own = dict(zip(("format", "shape", "dtype", "compute", "transposed"), self._context(), strict=True))
        return PackedWeight(parts, **{**own, **changes})

    def linear(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the product with an input, by the kernel that reads codes if no gradient follows."""
        if torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad)):
            product: torch.Tensor = _Product.apply(input, self)
            return product if bias is None else product + bias
        result: torch.Tensor = define_ops().packed_linear(input, *self._arguments(), bias, self._compute or input.dtype)
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            found = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
            if isinstance(found["weight"], PackedWeight) and not found["weight"]._transposed:
                return found["weight"].linear(found["input"], found.get("bias"))
        return no_torch_function(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func._schema.name) + ("." + func._overloadname if func._overloadname != "default" else "")
        weight = args[0] if args and isinstance(args[0], PackedWeight) else None
        if weight is not None and name in ("aten::t", "aten::transpose.int") and _swaps_last(weight, args[1:]):
            return weight._replaced(lambda part: part, transposed=not weight._transposed)
        if weight is not None and name in _OF_PARTS and "layout" not in kwargs:
            return _apply_to_parts(weight, func, name, args[1:], kwargs)
        if name == "aten::_grouped_mm" and isinstance(args[1], PackedWeight):
            packed = args[1]
            offs = kwargs.get("offs", args[2] if len(args) > 2 else None)
            if args[0].ndim == 2 and offs is not None:
                compute = packed._compute or args[0].dtype
                return define_ops().packed_grouped_mm(args[0], *packed._arguments(), packed._transposed, offs, compute)
        unpack = pytree.tree_map_only(PackedWeight, PackedWeight.unpack, (args, kwargs))
        return func(*unpack[0], **unpack[1])


def _swaps_last(weight: torch.Tensor, dimensions: Sequence[int]) -> bool:
    return not dimensions or {item % weight.ndim for item in dimensions} == {weight.ndim - 2, weight.ndim - 1}


def _apply_to_parts(weight: PackedWeight, func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if name in _SAME:
        return weight._replaced(lambda part: part)
    if name == "aten::select.int":
        if weight.ndim != 3 or args[0] % 3:
            return func(weight.unpack(), *args)
        return weight._replaced(lambda part: func(part, *args), shape=weight._stored_shape[1:])
    if name == "aten::_to_copy":
        dtype = kwargs.get("dtype") or weight.dtype
        rest = {key: value for key, value in kwargs.items() if key in ("device", "non_blocking")}
        return weight._replaced(lambda part: func(part, **rest), dtype=dtype)
    return weight._replaced(lambda part: func(part, *args, **kwargs))


class _Product(torch.autograd.Function):
    """A linear layer that keeps its packed weight for the backward pass, and unpacks it in both."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        ctx.weight = weight
        return functional.linear(input, weight.unpack())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient @ ctx.weight.unpack(), None
