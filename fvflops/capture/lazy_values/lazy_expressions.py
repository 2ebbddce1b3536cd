"""Expressions of tensors, evaluated at requested indices only, and bounds of them: interval arithmetic over boxes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

# The lowest and the highest value, one of each for every box, or a number for all.
Bounds = tuple[Any, Any]
_NARROW = frozenset({torch.uint8, torch.int8, torch.int16})
# An op's function and the bounds of its arguments, keyword arguments as they are.
_Rule = Callable[..., "Bounds | None"]


def bounds_of(
    name: str, function: Callable[..., Any], args: Sequence[Bounds | None], kwargs: Mapping[str, Any]
) -> Bounds | None:
    """Return the bounds of an op's result, None if unknown; `name` is the op's, without overload and underscore."""
    rule, known = _RULES.get(name), [arg for arg in args if arg is not None]
    if rule is None or (name not in _LOGICAL and len(known) < len(args)):
        return None
    if name in _ADDITIVE and (len(args) > 2 or kwargs.get("alpha", 1) < 0):
        return None
    if name in _ARITHMETIC and any(getattr(low, "dtype", None) in _NARROW for low, _ in known):
        return None  # the results may wrap around
    if name in _BOOLEAN and not (known and all(map(_is_bool, known))):
        return None
    result = rule(function, *[arg or (torch.tensor(False), torch.tensor(True)) for arg in args], **kwargs)
    return None if result is None else widened(*result)


def widened(low: Any, high: Any) -> Bounds:
    """Return bounds without nan: unbounded instead, as the values may be nan or not."""
    if isinstance(low, Tensor) and isinstance(high, Tensor) and low.is_floating_point():
        unknown = low.isnan() | high.isnan()
        return torch.where(unknown, -torch.inf, low), torch.where(unknown, torch.inf, high)
    return low, high


def _monotone(*decreasing: int) -> _Rule:
    """Bounds of a function that decreases in the arguments at these positions, and increases in the others."""

    def rule(function: Callable[..., Any], *args: Bounds, **kwargs: Any) -> Bounds:
        ends = [arg[::-1] if position in decreasing else arg for position, arg in enumerate(args)]
        return function(*[low for low, _ in ends], **kwargs), function(*[high for _, high in ends], **kwargs)

    return rule


def _convert(function: Callable[..., Any], values: Bounds, **kwargs: Any) -> Bounds | None:
    low, high = values
    first, last = function(low, **kwargs), function(high, **kwargs)
    if first.dtype is torch.bool and low.dtype is not torch.bool:
        return (low > 0) | (high < 0), (low != 0) | (high != 0)
    if not first.is_floating_point() and (low.is_floating_point() or bool((first != low).any() | (last != high).any())):
        return None  # values that the integers cannot represent wrap around
    return first, last


def _multiply(function: Callable[..., Any], one: Bounds, other: Bounds) -> Bounds:
    products = torch.stack(torch.broadcast_tensors(*(function(a, b) for a in one for b in other)))
    if products.dtype is torch.bool:
        return products.all(0), products.any(0)
    return products.amin(0), products.amax(0)


def _absolute(function: Callable[..., Any], values: Bounds) -> Bounds:
    low, high = values
    ends = torch.minimum(function(low), function(high)), torch.maximum(function(low), function(high))
    return torch.where((low <= 0) & (high >= 0), torch.zeros_like(ends[0]), ends[0]), ends[1]


def _divisor(one: Bounds, other: Bounds) -> Any:
    """Return a positive number by which integers are divided, else None."""
    if not isinstance(one[0], Tensor) or one[0].is_floating_point():
        return None
    divisor = other[0]
    if isinstance(divisor, Tensor) and divisor.numel() == 1 and bool((other[1] == divisor).all()):
        divisor = divisor.item()
    return divisor if isinstance(divisor, int) and divisor > 0 else None


def _divide(function: Callable[..., Any], one: Bounds, other: Bounds, **kwargs: Any) -> Bounds | None:
    divisor = _divisor(one, other)
    return None if divisor is None else (function(one[0], divisor, **kwargs), function(one[1], divisor, **kwargs))


def _remainder(function: Callable[..., Any], one: Bounds, other: Bounds) -> Bounds | None:
    divisor, (low, high) = _divisor(one, other), one
    if divisor is None:
        return None
    same = torch.div(low, divisor, rounding_mode="floor") == torch.div(high, divisor, rounding_mode="floor")
    return torch.where(same, function(low, divisor), 0), torch.where(same, function(high, divisor), divisor - 1)


def _not_equal(_: Callable[..., Any], one: Bounds, other: Bounds) -> Bounds:
    (a, b), (c, d) = one, other
    return (b < c) | (d < a), (a != b) | (c != d) | (a != c)


def _equal(function: Callable[..., Any], one: Bounds, other: Bounds) -> Bounds:
    surely_differ, may_differ = _not_equal(function, one, other)
    return ~may_differ, ~surely_differ


def _is_bool(bounds: Bounds) -> bool:
    return getattr(bounds[0], "dtype", type(bounds[0])) in (torch.bool, bool)


def _choose(condition: Bounds, if_true: Bounds, if_false: Bounds) -> Bounds | None:
    if not _is_bool(condition):
        return None
    either = _hull(if_true[0], if_false[0], torch.minimum), _hull(if_true[1], if_false[1], torch.maximum)
    low, high = condition
    return tuple(
        torch.where(low, chosen, torch.where(~high, other, both))
        for chosen, other, both in zip(if_true, if_false, either, strict=True)
    )  # type: ignore[return-value]


def _hull(one: Any, other: Any, extreme: Callable[..., Any]) -> Any:
    one, other = (item if isinstance(item, Tensor) else torch.tensor(item) for item in (one, other))
    return extreme(one, other)


_ADDITIVE: dict[str, _Rule] = {"add": _monotone(), "rsub": _monotone(0), "sub": _monotone(1)}
_ARITHMETIC: dict[str, _Rule] = {
    **_ADDITIVE,
    **dict.fromkeys(("clamp_max", "clamp_min", "maximum", "minimum"), _monotone()),
    "abs": _absolute,
    "mul": _multiply,
    "neg": _monotone(0),
}
# Their results may be known although an operand is not.
_LOGICAL: dict[str, _Rule] = dict.fromkeys(("bitwise_and", "bitwise_or", "logical_and", "logical_or"), _monotone())
_BOOLEAN: dict[str, _Rule] = {
    **_LOGICAL,
    **dict.fromkeys(("bitwise_not", "logical_not"), _monotone(0)),
    **dict.fromkeys(("bitwise_xor", "logical_xor"), _not_equal),
}
_RULES: dict[str, _Rule] = {
    **_ARITHMETIC,
    **_BOOLEAN,
    **dict.fromkeys(("div", "floor_divide"), _divide),
    "eq": _equal,
    **dict.fromkeys(("ge", "gt"), _monotone(1)),
    **dict.fromkeys(("le", "lt"), _monotone(0)),
    "masked_fill": lambda _, values, mask, value: _choose(mask, value, values),
    "ne": _not_equal,
    "remainder": _remainder,
    "to": _convert,
    "where": lambda _, condition, *values: _choose(condition, *values),
}


# An index tensor for each dimension, or a tensor of these, of one rank; they broadcast to [boxes, *size of a box].
Indices = Sequence[Tensor] | Tensor
# An expression with more operands, each counted as often as it is used, is not kept.
MAX_OPERANDS = 256


class Expression(ABC):
    """Values of a tensor, immutable and thread-safe; `operands` is the number of constants an element depends on."""

    __slots__ = ("count", "operands", "shape")

    def __init__(self, shape: Sequence[int], operands: int = 1) -> None:
        self.shape = tuple(shape)
        self.operands = operands
        self.count: tuple[float, int | None] | None = None  # of the elements above a threshold, cached by the counter

    @abstractmethod
    def at(self, indices: Indices) -> Tensor:
        """Return the elements at these indices, a tensor that broadcasts to the indices' shape."""

    @abstractmethod
    def bounds(self, low: Indices, high: Indices) -> Bounds | None:
        """Return bounds of the elements of boxes of indices, from `low` to `high` (inclusive), None if unknown."""


class Constant(Expression):
    """A tensor of known values, which must not change; an expanded one has its stored elements only."""

    __slots__ = ("_dims", "_values")

    def __init__(self, values: Tensor, shape: Sequence[int] | None = None) -> None:
        super().__init__(values.shape if shape is None else shape)
        repeated = [stride == 0 or size == 1 for size, stride in zip(values.shape, values.stride(), strict=True)]
        offset = len(self.shape) - values.ndim
        self._dims = [offset + dim for dim, is_repeated in enumerate(repeated) if not is_repeated]
        self._values = values[tuple(0 if is_repeated else slice(None) for is_repeated in repeated)]

    def at(self, indices: Indices) -> Tensor:
        """Return the elements; a 0-dim tensor stays one, since it promotes types in its own way."""
        if self._dims:
            return self._values[tuple(indices[dim] for dim in self._dims)]
        return self._values.reshape((1,) * (len(self.shape) + 1)) if self.shape else self._values

    def bounds(self, low: Indices, high: Indices) -> Bounds | None:
        """Return the minimum and maximum of each box, if it has one index in all dimensions but one."""
        if not self._dims:
            value = self._values.reshape(1) if self.shape else self._values
            return value, value
        dims = sorted(self._dims, key=lambda dim: bool((low[dim] == high[dim]).all()))
        if len(dims) > 1 and not bool((low[dims[1]] == high[dims[1]]).all()):
            return None
        along = self._dims.index(dims[0])
        values = self._values.movedim(along, -1)
        fixed = tuple(low[dim] for dim in self._dims if dim != dims[0])
        return _range_bounds(values, fixed, low[dims[0]], high[dims[0]])


def _range_bounds(values: Tensor, fixed: tuple[Tensor, ...], low: Tensor, high: Tensor) -> Bounds:
    """Return minimum and maximum of `values[*fixed, low : high + 1]`, from ranges whose lengths are powers of two."""
    if values.dtype is torch.bool:
        minimum, maximum = _range_bounds(values.to(torch.uint8), fixed, low, high)
        return minimum.bool(), maximum.bool()
    length = high - low + 1
    power = torch.tensor([int(item).bit_length() - 1 for item in length.tolist()])
    lowest, highest = values.new_empty(length.shape), values.new_empty(length.shape)
    minima = maxima = values
    for exponent in range(int(power.max()) + 1):
        if exponent:
            half = 1 << (exponent - 1)
            minima = torch.minimum(minima[..., :-half], minima[..., half:])
            maxima = torch.maximum(maxima[..., :-half], maxima[..., half:])
        chosen = power == exponent
        if bool(chosen.any()):
            # Two overlapping ranges of 2^exponent elements, that begin and end with the box.
            first, last = low[chosen], high[chosen] + 1 - (1 << exponent)
            rest = tuple(index[chosen] for index in fixed)
            starts, ends = (*rest, first), (*rest, last)
            lowest[chosen] = torch.minimum(minima[starts], minima[ends])
            highest[chosen] = torch.maximum(maxima[starts], maxima[ends])
    return widened(lowest, highest)


class Elementwise(Expression):
    """An elementwise op of expressions and numbers, which broadcast; `name` is the op's, without overload."""

    __slots__ = ("_args", "_function", "_kwargs", "_name")

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        shape: Sequence[int],
    ) -> None:
        operands = sum(arg.operands for arg in (*args, *kwargs.values()) if isinstance(arg, Expression))
        super().__init__(shape, operands)
        self._name, self._function, self._args, self._kwargs = name, function, tuple(args), dict(kwargs)

    def at(self, indices: Indices) -> Tensor:
        """Return the op's result on the operands' elements."""
        args = [self._operand(arg, indices) for arg in self._args]
        kwargs = {name: self._operand(arg, indices) for name, arg in self._kwargs.items()}
        result: Tensor = self._function(*args, **kwargs)
        return result

    def _operand(self, arg: Any, indices: Indices) -> Any:
        return arg.at(_broadcast(indices, arg.shape)) if isinstance(arg, Expression) else arg

    def bounds(self, low: Indices, high: Indices) -> Bounds | None:
        """Return the bounds by the op's rule, from its operands' bounds."""

        def operand(arg: Any) -> Any:
            if not isinstance(arg, Expression):
                return None if arg is None else (arg, arg)
            return arg.bounds(_broadcast(low, arg.shape), _broadcast(high, arg.shape))

        return bounds_of(self._name, self._function, [operand(arg) for arg in self._args], self._kwargs)


def _broadcast(indices: Indices, shape: Sequence[int]) -> list[Tensor]:
    """Return the indices of an operand of this shape, which broadcasts."""
    own = indices[len(indices) - len(shape) :]
    return [index if size != 1 else torch.zeros_like(index) for index, size in zip(own, shape, strict=True)]


class View(Expression):
    """A view with these strides and offset of an expression, whose elements have `base_strides` in memory.

    It must be `separable`: an element's index in each dimension of the base is a sum of terms of the view's dimensions.
    """

    __slots__ = ("_base", "_terms")

    def __init__(
        self, base: Expression, base_strides: Sequence[int], shape: Sequence[int], strides: Sequence[int], offset: int
    ) -> None:
        super().__init__(shape, base.operands)
        self._base = base
        # For each dimension of the base: its size and stride, the offset's index, and the view's dimensions that move
        # in it with their distance in memory.
        self._terms = [
            (
                *(size, stride, offset // stride % size if size > 1 else 0),
                [
                    (dim, step)
                    for dim, (length, step) in enumerate(zip(shape, strides, strict=True))
                    if size > 1 and length > 1 and step % (stride * size)
                ],
            )
            for size, stride in zip(base.shape, base_strides, strict=True)
        ]

    @property
    def separable(self) -> bool:
        """Whether the terms of each dimension add up to an index without a carry to another dimension."""
        return bool(self.shape) and all(
            start + sum(min((self.shape[dim] - 1) * step // stride, size - 1) for dim, step in steps) < size
            for size, stride, start, steps in self._terms
        )

    def at(self, indices: Indices) -> Tensor:
        """Return the base's elements."""
        zero = torch.zeros_like(indices[0])
        indices_of_base = [
            reduce(torch.add, [indices[dim] * step // stride % size for dim, step in steps], zero + start)
            for size, stride, start, steps in self._terms
        ]
        return self._base.at(indices_of_base)

    def bounds(self, low: Indices, high: Indices) -> Bounds | None:
        """Return the base's bounds in the smallest boxes that contain the elements."""
        base_low, base_high = [], []
        for size, stride, start, steps in self._terms:
            lowest = highest = torch.full_like(low[0], start)
            for dim, step in steps:
                first, last = low[dim] * step // stride, high[dim] * step // stride
                wraps = first // size != last // size
                lowest = lowest + torch.where(wraps, 0, first % size)
                highest = highest + torch.where(wraps, size - 1, last % size)
            base_low.append(lowest)
            base_high.append(highest)
        return self._base.bounds(base_low, base_high)


class Overwritten(Expression):
    """An expression of which a region was overwritten by another's values, as by `mask[:, :8] = values`.

    `region` has for each dimension the first index, the step between indices, and the dimension of the values (None for
    a single index).
    """

    __slots__ = ("_base", "_region", "_values")

    def __init__(self, base: Expression, values: Expression, region: Sequence[tuple[int, int, int | None]]) -> None:
        super().__init__(base.shape, base.operands + values.operands)
        self._base, self._values, self._region = base, values, tuple(region)

    def _length(self, dim: int | None) -> int:
        return 1 if dim is None else self._values.shape[dim]

    def _positions(self, indices: Indices) -> tuple[list[Tensor], list[Tensor]]:
        """Return, by dimension, whether an index is in the region, and the last position of the values up to it."""
        inside, positions = [], []
        for index, (start, step, dim) in zip(indices, self._region, strict=True):
            position = torch.div(index - start, step, rounding_mode="floor")
            last = self._length(dim) - 1
            inside.append((position >= 0) & (position <= last) & ((index - start) % step == 0))
            positions.append(position.clamp(0, last))
        return inside, positions

    def _in_values(self, positions: Indices) -> list[Tensor]:
        dims = {dim: index for index, (_, _, dim) in zip(positions, self._region, strict=True) if dim is not None}
        return [dims.get(dim, torch.zeros_like(positions[0])) for dim in range(len(self._values.shape))]

    def at(self, indices: Indices) -> Tensor:
        """Return the values in the region, and the base's elsewhere."""
        inside, positions = self._positions(indices)
        return torch.where(
            reduce(torch.logical_and, inside), self._values.at(self._in_values(positions)), self._base.at(indices)
        )

    def bounds(self, low: Indices, high: Indices) -> Bounds | None:
        """Return the values' bounds in boxes inside the region, the base's outside, and both elsewhere."""
        (in_low, first), (in_high, last) = self._positions(low), self._positions(high)
        dense = [step == 1 or bool((a == b).all()) for a, b, (_, step, _) in zip(low, high, self._region, strict=True)]
        within = reduce(torch.logical_and, in_low) & reduce(torch.logical_and, in_high) & all(dense)
        apart = [
            (b < start) | (a > start + step * (self._length(dim) - 1))
            for a, b, (start, step, dim) in zip(low, high, self._region, strict=True)
        ]
        values = self._values.bounds(self._in_values(first), self._in_values(last))
        base = self._base.bounds(low, high)
        if values is None or base is None:
            return None
        outside = reduce(torch.logical_or, apart)
        return (
            torch.where(within, values[0], torch.where(outside, base[0], torch.minimum(values[0], base[0]))),
            torch.where(within, values[1], torch.where(outside, base[1], torch.maximum(values[1], base[1]))),
        )
