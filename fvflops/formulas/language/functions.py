"""Functions that expressions may call."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from fvflops.trace import TensorSpec, Value

# An argument of a function: its value, and an object whose `str` is its source text, used in errors only.
Argument = tuple[Value, object]


class FunctionError(ValueError):
    """An invalid operand of a function or an operator."""


class UnknownValues(FunctionError):
    """The values of a tensor were not recorded."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function: its usage, its minimum and maximum number of arguments, its implementation."""

    usage: str
    arity: tuple[int, int]
    function: Callable[..., Value]


def as_integer(value: Value, text: object) -> int:
    """Return an integer, True and False as 1 and 0; any other value raises FunctionError.

    `text` is the source text of the value; only an error converts it by `str`, also in the next two functions.
    """
    if isinstance(value, int):
        return int(value)
    if isinstance(value, TensorSpec):
        raise FunctionError(f"{text} is a tensor, not a number (write numel({text}) or size({text}, 0))")
    if value is None:
        raise FunctionError(f"{text} is None where a number is needed (check is_none({text}) first)")
    raise FunctionError(f"{text} is {value!r}, not an integer")


def as_tensor(value: Value, text: object) -> TensorSpec:
    """Return a tensor; any other value raises FunctionError."""
    if isinstance(value, TensorSpec):
        return value
    if value is None:
        raise FunctionError(f"{text} is None where a tensor is needed (check is_none({text}) first)")
    raise FunctionError(f"{text} is {value!r}, not a tensor")


def as_list(value: Value, text: object) -> tuple[Value, ...]:
    """Return a list, or the values of a tensor; unknown values raise UnknownValues, anything else FunctionError."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, TensorSpec) and value.layout != "nested":
        if value.values is None:
            raise UnknownValues(f"the values of {text} are unknown")
        return value.values
    raise FunctionError(f"{text} is {value!r} where a list is needed")


def _integers(value: Value, text: object) -> list[int]:
    items = as_list(value, text)
    return [
        int(item) if isinstance(item, int) else as_integer(item, f"{text}[{index}]") for index, item in enumerate(items)
    ]


def _numel(argument: Argument) -> Value:
    value, text = argument
    if isinstance(value, tuple):
        tensors = [item for item in value if item is not None]
        return tuple(
            item.numel if isinstance(item, TensorSpec) else as_tensor(item, f"an item of {text}").numel
            for item in tensors
        )
    return as_tensor(value, text).numel


def _nnz(argument: Argument) -> Value:
    tensor = as_tensor(*argument)
    return tensor.numel if tensor.nnz is None else tensor.nnz


def _size(argument: Argument, axis: Argument) -> Value:
    tensor = as_tensor(*argument)
    if isinstance(axis[0], tuple):
        return tuple(_size(argument, (item, axis[1])) for item in axis[0])
    index = as_integer(*axis)
    if not -tensor.ndim <= index < tensor.ndim:
        raise FunctionError(f"{argument[1]} is {tensor.ndim}-D: it has no size at {index}")
    return tensor.shape[index]


def _dot(a: Argument, b: Argument) -> Value:
    left, right = _integers(*a), _integers(*b)
    if len(left) != len(right):
        raise FunctionError(f"{a[1]} has {len(left)} items and {b[1]} has {len(right)}")
    return sum(first * second for first, second in zip(left, right, strict=True))


def _extreme(choose: Callable[[list[int]], int]) -> Callable[..., Value]:
    def pick(*arguments: Argument) -> Value:
        only = arguments[0]
        numbers = _integers(*only) if len(arguments) == 1 else [as_integer(*argument) for argument in arguments]
        if not numbers:
            raise FunctionError(f"{only[1]} is empty")
        return choose(numbers)

    return pick


FUNCTIONS: dict[str, Function] = {
    # number of elements of a tensor; for a list of tensors a tuple, without None
    "numel": Function("numel(tensor)", (1, 1), _numel),
    # number of stored elements of a sparse tensor, numel of any other tensor
    "nnz": Function("nnz(tensor)", (1, 1), _nnz),
    # number of values packed into one element: 2 for float4_e2m1fn_x2, else 1
    "packed": Function(
        "packed(tensor)", (1, 1), lambda argument: 2 if as_tensor(*argument).dtype == "float4_e2m1fn_x2" else 1
    ),
    # size of one dimension; for a list of dimensions a tuple
    "size": Function("size(tensor, axis)", (2, 2), _size),
    "ndim": Function("ndim(tensor)", (1, 1), lambda argument: as_tensor(*argument).ndim),
    "prod": Function("prod(list)", (1, 1), lambda argument: math.prod(_integers(*argument))),
    "sum": Function("sum(list)", (1, 1), lambda argument: sum(_integers(*argument))),
    "len": Function("len(list)", (1, 1), lambda argument: len(as_list(*argument))),
    # differences of consecutive items: the segment lengths of offsets
    "differences": Function(
        "differences(list)",
        (1, 1),
        lambda argument: tuple(after - before for before, after in pairwise(_integers(*argument))),
    ),
    # dot product of two lists
    "dot": Function("dot(list, list)", (2, 2), _dot),
    # whether a tensor that the row lists in `values` has known values
    "is_known": Function("is_known(tensor)", (1, 1), lambda argument: as_tensor(*argument).values is not None),
    "min": Function("min(a, b, ...)", (1, 8), _extreme(min)),
    "max": Function("max(a, b, ...)", (1, 8), _extreme(max)),
    # rounded up: the least k with 2**k >= n, and 0 for n = 0
    "log2": Function("log2(n)", (1, 1), lambda argument: max(as_integer(*argument) - 1, 0).bit_length()),
    "is_none": Function("is_none(x)", (1, 1), lambda argument: argument[0] is None),
    "is_complex": Function("is_complex(tensor)", (1, 1), lambda argument: as_tensor(*argument).is_complex),
    "is_floating": Function("is_floating(tensor)", (1, 1), lambda argument: as_tensor(*argument).is_floating_point),
}
