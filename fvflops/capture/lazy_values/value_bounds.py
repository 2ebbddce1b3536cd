"""Bounds of the results of elementwise ops, from bounds of their operands: interval arithmetic over many boxes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

# The lowest and the highest value, one of each for every box, or a number for all.
Bounds = tuple[Any, Any]
_NARROW = frozenset({torch.uint8, torch.int8, torch.int16})
# An op's function, the bounds of its arguments (None: unknown), its keyword arguments.
_Rule = Callable[[Callable[..., Any], Sequence["Bounds | None"], Mapping[str, Any]], "Bounds | None"]


def widened(low: Any, high: Any) -> Bounds:
    """Return bounds without nan: unbounded instead, as the values may be nan or not."""
    if isinstance(low, torch.Tensor) and isinstance(high, torch.Tensor) and low.is_floating_point():
        unknown = low.isnan() | high.isnan()
        return torch.where(unknown, -torch.inf, low), torch.where(unknown, torch.inf, high)
    return low, high


def _wraps(args: Sequence[Bounds | None]) -> bool:
    """Return whether arithmetic on operands of these dtypes may wrap around."""
    return any(getattr(arg[0], "dtype", None) in _NARROW for arg in args if arg is not None)


def _increasing(
    function: Callable[..., Any], args: Sequence[Bounds | None], kwargs: Mapping[str, Any]
) -> Bounds | None:
    """Bounds of an op that increases with each argument."""
    known = [arg for arg in args if arg is not None]
    if len(known) < len(args) or _wraps(args):
        return None
    return function(*[arg[0] for arg in known], **kwargs), function(*[arg[1] for arg in known], **kwargs)


def _convert(function: Callable[..., Any], args: Sequence[Bounds | None], kwargs: Mapping[str, Any]) -> Bounds | None:
    if args[0] is None:
        return None
    low, high = args[0]
    first, last = function(low, **kwargs), function(high, **kwargs)
    if first.dtype is torch.bool and low.dtype is not torch.bool:
        return (low > 0) | (high < 0), (low != 0) | (high != 0)
    if not first.is_floating_point() and (low.is_floating_point() or bool((first != low).any() | (last != high).any())):
        return None  # values that the integers cannot represent wrap around
    return first, last


def _add(function: Callable[..., Any], args: Sequence[Bounds | None], kwargs: Mapping[str, Any]) -> Bounds | None:
    return _increasing(function, args, kwargs) if kwargs.get("alpha", 1) >= 0 else None


def _subtract(function: Callable[..., Any], args: Sequence[Bounds | None], kwargs: Mapping[str, Any]) -> Bounds | None:
    if args[0] is None or args[1] is None or kwargs.get("alpha", 1) < 0 or _wraps(args):
        return None
    (low, high), (other_low, other_high) = args[0], args[1]
    return function(low, other_high, **kwargs), function(high, other_low, **kwargs)


def _subtract_from(function: Callable[..., Any], args: Sequence[Bounds | None], kwargs: Mapping[str, Any]) -> Any:
    bounds = _subtract(function, args, kwargs)
    return None if bounds is None else (bounds[1], bounds[0])


def _multiply(function: Callable[..., Any], args: Sequence[Bounds | None], kwargs: Mapping[str, Any]) -> Bounds | None:
    if args[0] is None or args[1] is None or _wraps(args):
        return None
    products = torch.stack(torch.broadcast_tensors(*(function(a, b) for a in args[0] for b in args[1])))
    return _extent(products)


def _extent(values: torch.Tensor) -> Bounds:
    if values.dtype is torch.bool:
        return values.all(0), values.any(0)
    return values.amin(0), values.amax(0)


def _negate(function: Callable[..., Any], args: Sequence[Bounds | None], _: Mapping[str, Any]) -> Bounds | None:
    return None if args[0] is None or _wraps(args) else (function(args[0][1]), function(args[0][0]))


def _absolute(function: Callable[..., Any], args: Sequence[Bounds | None], _: Mapping[str, Any]) -> Bounds | None:
    if args[0] is None or _wraps(args):
        return None
    low, high = args[0]
    ends = torch.minimum(function(low), function(high)), torch.maximum(function(low), function(high))
    return torch.where((low <= 0) & (high >= 0), torch.zeros_like(ends[0]), ends[0]), ends[1]


def _divisor(args: Sequence[Bounds | None]) -> Any:
    """Return a positive number by which integers are divided, else None."""
    if args[0] is None or args[1] is None or not isinstance(args[0][0], torch.Tensor):
        return None
    divisor = args[1][0]
    if isinstance(divisor, torch.Tensor) and divisor.numel() == 1 and bool((args[1][1] == divisor).all()):
        divisor = divisor.item()
    is_integral = isinstance(divisor, int) and not args[0][0].is_floating_point()
    return divisor if is_integral and divisor > 0 else None


def _divide(function: Callable[..., Any], args: Sequence[Bounds | None], kwargs: Mapping[str, Any]) -> Bounds | None:
    divisor = _divisor(args)
    if divisor is None or args[0] is None:
        return None
    low, high = args[0]
    return function(low, divisor, **kwargs), function(high, divisor, **kwargs)


def _remainder(function: Callable[..., Any], args: Sequence[Bounds | None], _: Mapping[str, Any]) -> Bounds | None:
    divisor = _divisor(args)
    if divisor is None or args[0] is None:
        return None
    low, high = args[0]
    same = torch.div(low, divisor, rounding_mode="floor") == torch.div(high, divisor, rounding_mode="floor")
    return torch.where(same, function(low, divisor), 0), torch.where(same, function(high, divisor), divisor - 1)


def _compare(surely: Callable[[Any, Any, Any, Any], Any], possibly: Callable[[Any, Any, Any, Any], Any]) -> _Rule:
    """Bounds of a comparison, by functions of the two operands' low and high."""

    def rule(_: Callable[..., Any], args: Sequence[Bounds | None], __: Mapping[str, Any]) -> Bounds | None:
        if args[0] is None or args[1] is None:
            return None
        operands = (*args[0], *args[1])
        return surely(*operands), possibly(*operands)

    return rule


def _not_equal(a: Any, b: Any, c: Any, d: Any) -> Any:
    return (a != b) | (c != d) | (a != c)


_LESS = _compare(lambda a, b, c, d: b < c, lambda a, b, c, d: a < d)
_LESS_EQUAL = _compare(lambda a, b, c, d: b <= c, lambda a, b, c, d: a <= d)
_GREATER = _compare(lambda a, b, c, d: a > d, lambda a, b, c, d: b > c)
_GREATER_EQUAL = _compare(lambda a, b, c, d: a >= d, lambda a, b, c, d: b >= c)
_EQUAL = _compare(lambda *ends: ~_not_equal(*ends), lambda a, b, c, d: (a <= d) & (c <= b))
_NOT_EQUAL = _compare(lambda a, b, c, d: (b < c) | (d < a), _not_equal)


def _is_bool(bounds: Bounds | None) -> bool:
    return bounds is None or getattr(bounds[0], "dtype", type(bounds[0])) in (torch.bool, bool)


def _logical(combine: Callable[[Any, Any], Any]) -> _Rule:
    """Bounds of `and` or `or` of bools, one of which may be unknown."""

    def rule(_: Callable[..., Any], args: Sequence[Bounds | None], __: Mapping[str, Any]) -> Bounds | None:
        if (args[0] is None and args[1] is None) or not all(map(_is_bool, args)):
            return None
        (low, high), (other_low, other_high) = (arg or (False, True) for arg in args)
        return combine(low, other_low), combine(high, other_high)

    return rule


def _exclusive_or(_: Callable[..., Any], args: Sequence[Bounds | None], __: Mapping[str, Any]) -> Bounds | None:
    if args[0] is None or args[1] is None or not all(map(_is_bool, args)):
        return None
    (low, high), (other_low, other_high) = args[0], args[1]
    undecided = (low ^ high) | (other_low ^ other_high)
    return ~undecided & (low ^ other_low), undecided | (low ^ other_low)


def _invert(_: Callable[..., Any], args: Sequence[Bounds | None], __: Mapping[str, Any]) -> Bounds | None:
    return None if args[0] is None or not _is_bool(args[0]) else (~args[0][1], ~args[0][0])


def _choose(condition: Bounds | None, if_true: Bounds | None, if_false: Bounds | None) -> Bounds | None:
    if condition is None or if_true is None or if_false is None or not _is_bool(condition):
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


def _where(_: Callable[..., Any], args: Sequence[Bounds | None], __: Mapping[str, Any]) -> Bounds | None:
    return _choose(args[0], args[1], args[2])


def _masked_fill(_: Callable[..., Any], args: Sequence[Bounds | None], __: Mapping[str, Any]) -> Bounds | None:
    return _choose(args[1], args[2], args[0])


# By name without overload and trailing underscore.
BOUND_RULES: dict[str, _Rule] = {
    "abs": _absolute,
    "add": _add,
    "bitwise_and": _logical(operator.and_),
    "bitwise_not": _invert,
    "bitwise_or": _logical(operator.or_),
    "bitwise_xor": _exclusive_or,
    "clamp_max": _increasing,
    "clamp_min": _increasing,
    "div": _divide,
    "eq": _EQUAL,
    "floor_divide": _divide,
    "ge": _GREATER_EQUAL,
    "gt": _GREATER,
    "le": _LESS_EQUAL,
    "logical_and": _logical(operator.and_),
    "logical_not": _invert,
    "logical_or": _logical(operator.or_),
    "logical_xor": _exclusive_or,
    "lt": _LESS,
    "masked_fill": _masked_fill,
    "maximum": _increasing,
    "minimum": _increasing,
    "mul": _multiply,
    "ne": _NOT_EQUAL,
    "neg": _negate,
    "remainder": _remainder,
    "rsub": _subtract_from,
    "sub": _subtract,
    "to": _convert,
    "where": _where,
}
