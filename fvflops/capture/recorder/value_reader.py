"""Read the values that an op's cost depends on: offsets of packed sequences, and the unmasked entries of masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import ReferenceType, ref

import torch

from fvflops.capture.lazy_values.counting import count_unmasked
from fvflops.capture.lazy_values.run_values import expression_of, unexpanded
from fvflops.torch_internals import disable_dispatch_modes, is_functorch_wrapped
from fvflops.trace import TensorSpec, Value
from fvflops.trace.records import ALL_LISTS

_MASKS = frozenset({"attn_mask", "attn_bias", "bias"})
# Longer lists are not read: their values are unknown.
_MAX_LENGTH = 1 << 16
_MAX_CACHED = 256

# The values of each value-dependent argument, None where unknown.
Values = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class ValueArgument:
    """An argument whose values an op's cost depends on: position, name, and whether it is a mask."""

    position: int
    name: str
    is_mask: bool


def find_value_arguments(op: str, names: Sequence[str], wanted: Sequence[str]) -> tuple[ValueArgument, ...]:
    """Return the arguments of an op whose values its cost depends on: `wanted` ones, and masks; most ops have none."""
    is_attention = "attention" in op or "attn" in op or "scaled_dot_product" in op
    masks = _MASKS if is_attention else ()
    wanted = names if wanted == ALL_LISTS else (*wanted, *masks)
    columns = [(position, name) for position, name in enumerate(names) if name in wanted]
    return tuple([ValueArgument(position, name, name in masks) for position, name in columns])


def add_values(
    inputs: tuple[Value, ...], value_arguments: Sequence[ValueArgument], values: Values
) -> tuple[Value, ...]:
    """Return the inputs of a signature with known values added to the specs of their tensors."""
    inputs_with_values = list(inputs)
    for argument, value in zip(value_arguments, values, strict=True):
        spec = inputs_with_values[argument.position]
        if value is not None and isinstance(spec, TensorSpec):
            inputs_with_values[argument.position] = replace(spec, values=value)
    return tuple(inputs_with_values)


class ValueReader:
    """Reader of tensor values; a mask is counted once per version.

    `has_values` returns whether tensors have the values of a real run.
    """

    def __init__(self, has_values: Callable[[list[Any]], bool]) -> None:
        self._has_values = has_values
        self._masks: dict[tuple[Any, ...], tuple[ReferenceType[Any], int]] = {}

    def read(self, value_arguments: Sequence[ValueArgument], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Values:
        """Return the values of an op's value-dependent arguments; for a mask, the number of unmasked entries."""
        return tuple(
            self._read(
                args[argument.position] if argument.position < len(args) else kwargs.get(argument.name),
                is_mask=argument.is_mask,
            )
            for argument in value_arguments
        )

    def _read(self, tensor: Any, *, is_mask: bool) -> tuple[int, ...] | None:
        if not isinstance(tensor, torch.Tensor):
            return None
        is_float = tensor.is_floating_point()
        is_list = tensor.ndim <= 1 and tensor.numel() <= _MAX_LENGTH and not (is_float or tensor.is_complex())
        if is_mask and (tensor.dtype is torch.bool or is_float):
            if (mask := expression_of(tensor)) is not None:
                return None if (count := count_unmasked(mask, tensor.dtype)) is None else (count,)
        elif is_mask or not is_list:
            return None
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return None
        if tensor.is_nested or is_functorch_wrapped(tensor) or not self._has_values([tensor]):
            return None
        if is_mask:
            return (self._count_mask(tensor),)
        with disable_dispatch_modes():
            return tuple(map(int, tensor.flatten().tolist()))

    def _count_mask(self, mask: torch.Tensor) -> int:
        """Return the number of unmasked entries: true ones, or values above half of the dtype's minimum.

        Masked entries are -inf, or the dtype's minimum, which some models use instead.
        """
        storage = mask.untyped_storage()
        version = -1 if mask.is_inference() else mask._version
        key = (id(storage), mask.storage_offset(), mask.shape, mask.stride(), mask.dtype, version)
        cached = self._masks.get(key)
        if cached is not None and version >= 0 and cached[0]() is storage:
            return cached[1]
        with disable_dispatch_modes():
            stored = unexpanded(mask)  # one mask for all heads, or for all batches
            entries = stored if stored.dtype is torch.bool else stored > torch.finfo(stored.dtype).min / 2
            count = int(torch.count_nonzero(entries)) * (mask.numel() // max(1, stored.numel()))
        if len(self._masks) >= _MAX_CACHED:
            self._masks.clear()
        self._masks[key] = ref(storage), count
        return count


def have_values(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors have values: not on the meta device."""
    return all(tensor.device.type != "meta" for tensor in tensors)
