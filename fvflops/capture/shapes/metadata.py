"""Interned metadata of strided tensors: shape, strides, dtype and device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

import torch

from fvflops.torch_internals import is_functorch_wrapped
from fvflops.trace import TensorSpec

META = torch.device("meta")
_CPU = torch.device("cpu")
_DTYPE_NAMES: dict[torch.dtype, str] = {}
_INTERNED: dict[tuple[Any, ...], Metadata] = {}


class Metadata:
    """A strided tensor's metadata, as needed by shape rules; created by `intern`.

    Equal metadata are one object, so that they compare and hash by identity. `known`: the values are available.
    `bits`: torch's conjugate (1) and negative (2) bits. `actual_device` is the device, or the CPU if this machine lacks
    it. `lazy`: the values may be available as an expression. `spec` describes the tensor in the Trace, `spec_tuple` is
    a 1-tuple of it, `row` describes a new storage there.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        known: bool,
        bits: int,
        lazy: bool = False,
    ) -> None:
        self.shape = tuple(map(int, shape))
        self.stride = tuple(map(int, stride))
        self.dtype = dtype
        self.device = device
        self.actual_device = device if is_available(device) else _CPU
        self.known = known
        self.lazy = lazy
        self.bits = bits
        self.spec = dense_spec(self.shape, dtype, device)
        extent = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)) + 1
        self.nbytes = 0 if 0 in self.shape else extent * dtype.itemsize
        self.spec_tuple = (self.spec,)
        self.row = (self.nbytes, self.spec.device, "op")

    def __repr__(self) -> str:
        values = "known" if self.known else "lazy" if self.lazy else "unknown"
        return f"Metadata({self.spec}, stride={self.stride}, device={self.device}, {values})"

    @property
    def is_conjugate(self) -> bool:
        return bool(self.bits & 1)

    @property
    def is_negative(self) -> bool:
        return bool(self.bits & 2)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def intern(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    known: bool = False,
    bits: int = 0,
    lazy: bool = False,
) -> Metadata:
    """Return the interned metadata with these fields."""
    key = (shape, stride, dtype, device, known, bits, lazy) if lazy else (shape, stride, dtype, device, known, bits)
    metadata = _INTERNED.get(key)
    if metadata is None:
        metadata = _INTERNED[key] = Metadata(*key)
    return metadata


def as_lazy(metadata: Metadata) -> Metadata:
    """Return the metadata of an equal tensor with lazy values."""
    rest = metadata.device, False, metadata.bits, True
    return intern(metadata.shape, metadata.stride, metadata.dtype, *rest)


def metadata_of(tensor: torch.Tensor) -> Metadata:
    return intern(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, False, bits_of(tensor))


def metadata_of_leaf(tensor: torch.Tensor) -> Metadata | None:
    """Return the metadata of a parameter, buffer or input, None if it is not a strided tensor."""
    kind = type(tensor)
    if kind is not torch.nn.Parameter and kind is not torch.Tensor:
        lazy = torch.nn.parameter.is_lazy(tensor)
        if lazy or tensor.is_nested or is_functorch_wrapped(tensor):
            return None
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    bits = bits_of(tensor) if tensor.is_complex() else 0
    key = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, False, bits)
    return _INTERNED.get(key) or intern(*key)


def metadata_of_leaves(
    tensors: Sequence[torch.Tensor],
    shapes: Sequence[torch.Size],
    strides: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    devices: Sequence[torch.device],
) -> list[Metadata]:
    """Return the metadata of strided tensors of torch's own classes, with these properties."""
    if any(dtype.is_complex for dtype in set(dtypes)):
        return list(map(metadata_of, tensors))
    get = _INTERNED.get
    keys = zip(shapes, strides, dtypes, devices, repeat(False), repeat(0))
    return [get(key) or intern(*key) for key in keys]


def is_available(device: torch.device) -> bool:
    """Return whether this torch can create tensors on a device."""
    if device.type in ("cpu", "meta"):
        return True
    backend = getattr(torch, device.type, None)
    return bool(backend is not None and hasattr(backend, "is_available") and backend.is_available())


def bits_of(tensor: torch.Tensor) -> int:
    return tensor.is_conj() + 2 * tensor.is_neg()


def clear_metadata() -> None:
    _INTERNED.clear()


def interned_count() -> int:
    return len(_INTERNED)


@lru_cache(maxsize=1 << 14)
def dense_spec(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> TensorSpec:
    return TensorSpec(shape, dtype_name(dtype), str(device))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the prefix `torch.`."""
    name = _DTYPE_NAMES.get(dtype)
    if name is None:
        name = _DTYPE_NAMES[dtype] = str(dtype).removeprefix("torch.")
    return name
