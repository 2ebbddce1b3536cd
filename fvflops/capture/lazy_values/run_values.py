"""The lazy values of a run in shape execution: which tensors have them, and how ops make and change them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fvflops.capture.lazy_values.counting import count_boxes
from fvflops.capture.lazy_values.lazy_expressions import (
    MAX_OPERANDS,
    Constant,
    Elementwise,
    Expression,
    Overwritten,
    View,
)
from fvflops.torch_internals import disable_dispatch_modes

_ATEN = torch.ops.aten
_COPIES = frozenset({"alias", "clone", "contiguous", "detach", "lift_fresh"})
# Ops that fill a new tensor, and the position of the value among their arguments, or the value.
_FILLED: dict[str, tuple[int | None, Any]] = {
    **dict.fromkeys(("full", "full_like", "fill"), (1, None)),
    "new_full": (2, None),
    **dict.fromkeys(("new_ones", "ones", "ones_like"), (None, 1)),
    **dict.fromkeys(("new_zeros", "zeros", "zeros_like", "zero"), (None, 0)),
}
# Ops that read no values of their first argument.
INDEPENDENT = frozenset({"full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like"})
COUNTS = frozenset({"all", "any", "count_nonzero", "sum"})
# Composite ops, which may be recorded as called, and the op that each is.
_ALIASES = {
    "__and__": "bitwise_and",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "absolute": "abs",
    "clip": "clamp",
    "negative": "neg",
}

# Ops that convert values, and the position of these among their arguments.
_CONVERSIONS = {"_to_copy": 0, "copy": 1, "to": 0, "type_as": 0}
# An op's arguments as expressions (at least the first one), the shape and dtype of its result.
_Builder = Callable[[Sequence[Any], Mapping[str, Any], Sequence[int], torch.dtype], "Expression | None"]


def base_name(op: str) -> str:
    """Return an op's name without namespace, overload and the underscore of in-place ops, "" for one of a library.

    >>> base_name("aten::masked_fill_.Scalar"), base_name("aten::__and__.Tensor"), base_name("mylib::scan")
    ('masked_fill', 'bitwise_and', '')
    """
    namespace, _, name = op.partition("::")
    if namespace != "aten":
        return ""
    name = name.partition(".")[0]
    name = name if name.endswith("__") else name.removesuffix("_")
    return _ALIASES.get(name, name)


def is_supported(func: Any, op: str) -> bool:
    """Return whether the result of an op can be an expression: elementwise, a copy, a constant; not random."""
    name, tags = base_name(op), getattr(func, "tags", ())
    if not name or op.endswith("out") or torch.Tag.nondeterministic_seeded in tags:
        return False
    if any(name in names for names in (_FILLED, _COPIES, _CONVERSIONS, _BUILDERS, _ALIASES.values(), ("where", "cat"))):
        return True
    # Not all in-place overloads have the tag.
    return torch.Tag.pointwise in tags or torch.Tag.pointwise in getattr(_out_of_place(op), "tags", ())


def _out_of_place(op: str) -> Any:
    """Return the overload that an in-place one writes the result of, None if there is none."""
    return getattr(getattr(_ATEN, base_name(op), None), op.partition(".")[2] or "default", None)


def result_of(
    func: Any, op: str, args: Sequence[Any], kwargs: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype
) -> Expression | None:
    """Return the result of an op as an expression, None if it cannot be one; tensor arguments are expressions."""
    name = base_name(op)
    if not is_supported(func, op):
        return None
    if name in _FILLED:
        position, value = _FILLED[name]
        if position is not None:
            value = args[position] if position < len(args) else kwargs.get("fill_value", kwargs.get("value"))
        if isinstance(value, Expression):
            return _converted(value, shape, dtype)
        return None if value is None else filled(value, shape, dtype)
    if name == "cat":
        return _concatenate(args, kwargs, shape, dtype)
    if name in _COPIES or name in _CONVERSIONS or name in _BUILDERS:
        values = args[_CONVERSIONS.get(name, 0)]
        if not isinstance(values, Expression):
            return None
        if name in _COPIES:
            return values
        return _converted(values, shape, dtype) if name in _CONVERSIONS else _BUILDERS[name](args, kwargs, shape, dtype)
    if any(isinstance(value, (list, tuple)) for value in (*args, *kwargs.values())):
        return None
    packet = op.partition(".")[0]
    if not packet.endswith("_") or packet.endswith("__"):
        return Elementwise(name, func, args, kwargs, shape)
    function = _out_of_place(op)
    return None if function is None else _converted(Elementwise(name, function, args, kwargs, shape), shape, dtype)


def filled(value: Any, shape: Sequence[int], dtype: torch.dtype) -> Expression:
    return Constant(torch.full((1,) * len(shape), value, dtype=dtype), shape)


def _converted(value: Expression, shape: Sequence[int], dtype: torch.dtype) -> Expression:
    return Elementwise("to", torch.Tensor.to, (value,), {"dtype": dtype}, shape)


def _triangle(
    is_kept: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Expression:
    diagonal = args[1] if len(args) > 1 else kwargs.get("diagonal", 0)
    rows = Constant(torch.arange(shape[-2]).unsqueeze(1) + diagonal)
    columns = Constant(torch.arange(shape[-1]))
    kept = Elementwise(is_kept.__name__, is_kept, (columns, rows), {}, shape[-2:])
    return Elementwise("where", torch.where, (kept, args[0], filled(0, shape, dtype)), {}, shape)


def _reshape(args: Sequence[Any], _: Mapping[str, Any], shape: Sequence[int], __: torch.dtype) -> Expression | None:
    return view_of(args[0], _contiguous(args[0].shape), shape, _contiguous(shape), 0)


def _contiguous(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _pad(args: Sequence[Any], kwargs: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype) -> Expression | None:
    values, pad = args[0], args[1]
    mode = args[2] if len(args) > 2 and isinstance(args[2], str) else kwargs.get("mode", "constant")
    if min(pad) < 0 or mode != "constant":
        return None
    value = args[-1] if len(args) > 2 and not isinstance(args[-1], str) else kwargs.get("value")
    value = 0 if value is None else value
    before = [0] * (len(shape) - len(pad) // 2) + list(pad[::2])[::-1]
    return Overwritten(filled(value, shape, dtype), values, [(start, 1, dim) for dim, start in enumerate(before)])


def _concatenate(
    args: Sequence[Any], kwargs: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype
) -> Expression | None:
    axis = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(shape)
    result, start = filled(0, shape, dtype), 0
    for part in args[0]:
        if not isinstance(part, Expression) or len(part.shape) != len(shape):
            return None
        region = [(start if dim == axis else 0, 1, dim) for dim in range(len(shape))]
        result = Overwritten(result, _converted(part, part.shape, dtype), region)
        start += part.shape[axis]
    return result


_BUILDERS: dict[str, _Builder] = {
    "_unsafe_view": _reshape,
    "constant_pad_nd": _pad,
    "pad": _pad,
    "reshape": _reshape,
    "tril": partial(_triangle, torch.le),
    "triu": partial(_triangle, torch.ge),
}


def overwritten(
    memory: Expression, strides: Sequence[int], target: tuple[Sequence[int], Sequence[int], int], values: Expression
) -> Expression | None:
    """Return the values of memory after writing to a tensor in it; None if its elements are not a box.

    `target` are the tensor's shape, strides and offset.
    """
    shape, target_strides, offset = target
    dims = {dim for dim, size in enumerate(shape) if size > 1}
    region: list[tuple[int, int, int | None]] = []
    for size, stride in zip(memory.shape, strides, strict=True):
        start = offset // stride % size if size > 1 else 0
        ratios = {dim: divmod(target_strides[dim], stride) for dim in dims if size > 1}
        found = [dim for dim, (ratio, rest) in ratios.items() if not rest and 0 < ratio < size]
        if len(found) > 1:
            return None
        if not found:
            region.append((start, 1, None))
            continue
        dim, step = found[0], target_strides[found[0]] // stride
        if start + (shape[dim] - 1) * step >= size:
            return None
        dims.discard(dim)
        region.append((start, step, dim))
    return None if dims else Overwritten(memory, values, region)


def view_of(
    memory: Expression, strides: Sequence[int], shape: Sequence[int], view_strides: Sequence[int], offset: int
) -> Expression | None:
    """Return the values of a tensor in memory, None if they are not separable by dimension."""
    if offset == 0 and tuple(shape) == memory.shape and tuple(view_strides) == tuple(strides):
        return memory
    view = View(memory, strides, shape, view_strides, offset)
    return view if view.separable else None


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether a tensor's elements fill its memory, in some order of dimensions."""
    order = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    expected = 1
    for stride, size in order:
        if stride != expected:
            return False
        expected *= size
    return True


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
    """Makes expressions of a run's ops, interned, so that elements of equal ones are counted once."""

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
