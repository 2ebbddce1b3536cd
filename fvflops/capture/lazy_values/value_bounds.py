"""Bounds of the results of elementwise ops, from bounds of their operands: interval arithmetic over many boxes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

# The lowest and the highest value, one of each for every box, or a number for all.
Bounds = tuple[Any, Any]
_NARROW = frozenset({torch.uint8, torch.int8, torch.int16})
# An op's function and the bounds of its arguments, keyword arguments as they are.
_Rule = Callable[..., "Bounds | None"]


def bounds_of(
    name: str, function: Callable[..., Any], args: Sequence[Bounds | None], kwargs: Mapping[str, Any]
) -> Bounds | None:
    """Return the bounds of an op's result, None if unknown; `name` is the op's, without overload and underscore."""
    rule = _RULES.get(name)
    if rule is None or (name not in _LOGICAL and any(arg is None for arg in args)):
        return None
    known = [arg for arg in args if arg is not None]
    if name in _ADDITIVE and (len(args) > 2 or kwargs.get("alpha", 1) < 0):
        return None
    if name in _ARITHMETIC and any(getattr(low, "dtype", None) in _NARROW for low, _ in known):
        return None  # the results may wrap around
    if (name in _LOGICAL or name in _BOOLEAN) and not (known and all(map(_is_bool, known))):
        return None
    result = rule(function, *args, **kwargs)
    return None if result is None else widened(*result)


def widened(low: Any, high: Any) -> Bounds:
    """Return bounds without nan: unbounded instead, as the values may be nan or not."""
    if isinstance(low, torch.Tensor) and isinstance(high, torch.Tensor) and low.is_floating_point():
        unknown = low.isnan() | high.isnan()
        return torch.where(unknown, -torch.inf, low), torch.where(unknown, torch.inf, high)
    return low, high


def _increasing(function: Callable[..., Any], *args: Bounds, **kwargs: Any) -> Bounds:
    return function(*[low for low, _ in args], **kwargs), function(*[high for _, high in args], **kwargs)


def _convert(function: Callable[..., Any], values: Bounds, **kwargs: Any) -> Bounds | None:
    low, high = values
    first, last = function(low, **kwargs), function(high, **kwargs)
    if first.dtype is torch.bool and low.dtype is not torch.bool:
        return (low > 0) | (high < 0), (low != 0) | (high != 0)
    if not first.is_floating_point() and (low.is_floating_point() or bool((first != low).any() | (last != high).any())):
        return None  # values that the integers cannot represent wrap around
    return first, last


def _subtract(function: Callable[..., Any], one: Bounds, other: Bounds, **kwargs: Any) -> Bounds:
    return function(one[0], other[1], **kwargs), function(one[1], other[0], **kwargs)


def _subtract_from(function: Callable[..., Any], one: Bounds, other: Bounds, **kwargs: Any) -> Bounds:
    return function(one[1], other[0], **kwargs), function(one[0], other[1], **kwargs)


def _multiply(function: Callable[..., Any], one: Bounds, other: Bounds) -> Bounds:
    products = torch.stack(torch.broadcast_tensors(*(function(a, b) for a in one for b in other)))
    if products.dtype is torch.bool:
        return products.all(0), products.any(0)
    return products.amin(0), products.amax(0)


def _negate(function: Callable[..., Any], values: Bounds) -> Bounds:
    return function(values[1]), function(values[0])


def _absolute(function: Callable[..., Any], values: Bounds) -> Bounds:
    low, high = values
    ends = torch.minimum(function(low), function(high)), torch.maximum(function(low), function(high))
    return torch.where((low <= 0) & (high >= 0), torch.zeros_like(ends[0]), ends[0]), ends[1]


def _divisor(one: Bounds, other: Bounds) -> Any:
    """Return a positive number by which integers are divided, else None."""
    if not isinstance(one[0], torch.Tensor) or one[0].is_floating_point():
        return None
    divisor = other[0]
    if isinstance(divisor, torch.Tensor) and divisor.numel() == 1 and bool((other[1] == divisor).all()):
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


def _compare(surely: Callable[[Any, Any, Any, Any], Any], possibly: Callable[[Any, Any, Any, Any], Any]) -> _Rule:
    """Bounds of a comparison, by functions of the two operands' low and high."""
    return lambda _, one, other: (surely(*one, *other), possibly(*one, *other))


def _not_equal(a: Any, b: Any, c: Any, d: Any) -> Any:
    return (a != b) | (c != d) | (a != c)


def _is_bool(bounds: Bounds) -> bool:
    return getattr(bounds[0], "dtype", type(bounds[0])) in (torch.bool, bool)


def _logical(combine: Callable[[Any, Any], Any]) -> _Rule:
    """Bounds of `and` or `or` of bools, one of which may be unknown."""

    def rule(_: Callable[..., Any], *args: Bounds | None) -> Bounds:
        (low, high), (other_low, other_high) = (arg or (False, True) for arg in args)
        return combine(low, other_low), combine(high, other_high)

    return rule


def _exclusive_or(_: Callable[..., Any], one: Bounds, other: Bounds) -> Bounds:
    undecided = (one[0] ^ one[1]) | (other[0] ^ other[1])
    return ~undecided & (one[0] ^ other[0]), undecided | (one[0] ^ other[0])


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
    one, other = (item if isinstance(item, torch.Tensor) else torch.tensor(item) for item in (one, other))
    return extreme(one, other)


_ADDITIVE: dict[str, _Rule] = {"add": _increasing, "rsub": _subtract_from, "sub": _subtract}
_ARITHMETIC: dict[str, _Rule] = {
    **_ADDITIVE,
    "abs": _absolute,
    "clamp_max": _increasing,
    "clamp_min": _increasing,
    "maximum": _increasing,
    "minimum": _increasing,
    "mul": _multiply,
    "neg": _negate,
}
_LOGICAL: dict[str, _Rule] = {
    "bitwise_and": _logical(operator.and_),
    "bitwise_or": _logical(operator.or_),
    "logical_and": _logical(operator.and_),
    "logical_or": _logical(operator.or_),
}
_BOOLEAN: dict[str, _Rule] = {
    "bitwise_not": lambda _, values: (~values[1], ~values[0]),
    "bitwise_xor": _exclusive_or,
    "logical_not": lambda _, values: (~values[1], ~values[0]),
    "logical_xor": _exclusive_or,
}
_RULES: dict[str, _Rule] = {
    **_ARITHMETIC,
    **_LOGICAL,
    **_BOOLEAN,
    "div": _divide,
    "eq": _compare(lambda *ends: ~_not_equal(*ends), lambda a, b, c, d: (a <= d) & (c <= b)),
    "floor_divide": _divide,
    "ge": _compare(lambda a, b, c, d: a >= d, lambda a, b, c, d: b >= c),
    "gt": _compare(lambda a, b, c, d: a > d, lambda a, b, c, d: b > c),
    "le": _compare(lambda a, b, c, d: b <= c, lambda a, b, c, d: a <= d),
    "lt": _compare(lambda a, b, c, d: b < c, lambda a, b, c, d: a < d),
    "masked_fill": lambda _, values, mask, value: _choose(mask, value, values),
    "ne": _compare(lambda a, b, c, d: (b < c) | (d < a), _not_equal),
    "remainder": _remainder,
    "to": _convert,
    "where": lambda _, condition, *values: _choose(condition, *values),
}
