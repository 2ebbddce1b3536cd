"""The lazy values of a run in shape execution: which tensors have them, and how ops change them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fvflops.capture.lazy_values.counting import count_boxes
from fvflops.capture.lazy_values.lazy_expressions import MAX_OPERANDS, Constant, Elementwise, Expression
from fvflops.capture.lazy_values.lazy_ops import base_name, overwritten, result_of, view_of
from fvflops.torch_internals import disable_dispatch_modes

_MAX_INTERNED = 1 << 12
_MAX_COPIED = 1 << 20


class LazyMemory:
    """The values of a tensor's memory, None once they are unknown; tensors that share the memory share this object."""

    __slots__ = ("_views", "expression", "strides")

    def __init__(self, expression: Expression, strides: Sequence[int]) -> None:
        self.expression: Expression | None = expression
        self.strides = tuple(strides)
        self._views: dict[tuple[Any, ...], Expression | None] = {}

    def write(self, target: tuple[Sequence[int], Sequence[int], int], values: Expression | None) -> None:
        """Overwrite a tensor of this shape, strides and offset, with unknown values if None."""
        before, self._views = self.expression, {}
        if before is None or values is None:
            self.expression = None
        elif target == (before.shape, self.strides, 0):
            self.expression = values
        else:
            self.expression = overwritten(before, self.strides, target, values)
        if self.expression is not None and self.expression.operands > MAX_OPERANDS:
            self.expression = None

    def view(self, shape: Sequence[int], strides: Sequence[int], offset: int) -> Expression | None:
        """Return the values of a tensor in this memory, None if unknown."""
        if self.expression is None:
            return None
        key = tuple(shape), tuple(strides), offset
        if key not in self._views:
            self._views[key] = view_of(self.expression, self.strides, *key)
        return self._views[key]


class LazyValue(NamedTuple):
    """The memory of a shape tensor with lazy values, and the tensor's offset there."""

    memory: LazyMemory
    offset: int


def expression_of(tensor: Any) -> Expression | None:
    """Return the values of a shape tensor, None if unknown."""
    lazy: LazyValue | None = getattr(tensor, "lazy", None)
    return None if lazy is None else lazy.memory.view(tensor.metadata.shape, tensor.metadata.stride, lazy.offset)


class LazyValues:
    """Makes expressions of a run's ops. Equal ones are one object, so that their elements are counted once."""

    def __init__(self) -> None:
        self._interned: dict[tuple[Any, ...], tuple[Any, Expression]] = {}

    def result(
        self, func: Any, op: str, args: Sequence[Any], kwargs: Mapping[str, Any], shape: Any, dtype: torch.dtype
    ) -> Expression | None:
        """Return the result of an op, None if it is unknown; real tensors among the arguments have known values."""
        try:
            args, kwargs = self._operand(args), {name: self._operand(arg) for name, arg in kwargs.items()}
        except _Unknown:
            return None
        key = (op, *map(_key, args), *((name, _key(arg)) for name, arg in kwargs.items()), tuple(shape), dtype)
        if key not in self._interned:
            with disable_dispatch_modes():
                expression = result_of(func, op, args, kwargs, shape, dtype)
            if expression is None or expression.operands > MAX_OPERANDS:
                return None
            self._intern(key, (args, kwargs), expression)
        return self._interned[key][1]

    def _intern(self, key: tuple[Any, ...], alive: Any, expression: Expression) -> Expression:
        if len(self._interned) >= _MAX_INTERNED:
            self._interned.clear()
        # The operands, whose ids are in the key, stay alive with it.
        self._interned[key] = alive, expression
        return expression

    def _operand(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._operand(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        if hasattr(value, "metadata"):
            expression = expression_of(value)
            if expression is None:
                raise _Unknown
            return expression
        return self._constant(value)

    def _constant(self, tensor: torch.Tensor) -> Expression:
        with disable_dispatch_modes(), torch.no_grad():
            stored, alive = unexpanded(tensor), tensor
            content: Any = id(tensor.untyped_storage()), tensor.storage_offset(), tensor.stride()
            if stored.numel() <= _MAX_COPIED:  # a larger one existed before the run, which does not write to it
                alive = stored = stored.cpu().clone(memory_format=torch.contiguous_format)
                content = hash(stored.reshape(-1).view(torch.uint8).numpy().tobytes())
            key = tuple(tensor.shape), tensor.dtype, content
            known = self._interned.get(key)
            if known is not None and (alive is tensor or torch.equal(known[0], stored)):
                return known[1]
            return self._intern(key, alive, Constant(stored.cpu(), tensor.shape))

    def count(self, op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the result of `sum`, `count_nonzero`, `any` or `all`, None if it is unknown."""
        mask = expression_of(args[0])
        if mask is None:
            return None
        dtype = args[0].metadata.dtype
        name, rank = base_name(op), len(mask.shape)
        if name == "sum" and (dtype is not torch.bool or kwargs.get("dtype") is not None):
            return None
        if dtype is not torch.bool:
            mask = Elementwise("ne", torch.ne, (mask, 0), {}, mask.shape)
        dims = args[1] if len(args) > 1 else kwargs.get("dim")
        dims = range(rank) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
        reduced = {dim % rank for dim in dims}
        keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
        counts = count_boxes(mask, [dim for dim in range(rank) if dim not in reduced])
        if counts is None:
            return None
        with disable_dispatch_modes():
            if keepdim:
                counts = counts.view([1 if dim in reduced else size for dim, size in enumerate(mask.shape)])
            if name == "any":
                return counts > 0
            if name == "all":
                return counts == math.prod(mask.shape[dim] for dim in reduced)
            return counts


class _Unknown(Exception):
    """An argument whose values are unknown."""


def unexpanded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached view with expanded dimensions narrowed to size 1, which keeps its shape and strides."""
    view = tensor.detach()
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            view = view.narrow(dim, 0, 1)
    return view


def _key(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_key, value))
    if isinstance(value, (bool, float)):
        return type(value), repr(value)
    return id(value) if isinstance(value, Expression) else value
