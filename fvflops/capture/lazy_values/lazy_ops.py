"""Expressions of the results of ops whose arguments are expressions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fvflops.capture.lazy_values.lazy_expressions import Constant, Elementwise, Expression, Overwritten, View

_ATEN = torch.ops.aten
_COPIES = frozenset({"alias", "clone", "contiguous", "detach", "lift_fresh"})
# Ops that fill a new tensor, and the position of the value among their arguments, or the value.
_FILLED: dict[str, tuple[int | None, Any]] = {
    **dict.fromkeys(("full", "full_like", "fill"), (1, None)),
    "new_full": (2, None),
    **dict.fromkeys(("new_ones", "ones", "ones_like"), (None, 1)),
    **dict.fromkeys(("new_zeros", "zeros", "zeros_like", "zero"), (None, 0)),
}
# These read no values of their first argument.
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
# An op's arguments as expressions (the first one surely), the shape and dtype of its result.
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
    """Return the values of a tensor in memory, None if they are no function of the dimensions one by one."""
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
