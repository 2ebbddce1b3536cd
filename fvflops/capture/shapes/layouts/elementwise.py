"""Strides of elementwise results, as allocated by TensorIterator, which all such kernels use.

torch's own meta rules imitate it, but differ for broadcast operands and for sizes of 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from fvflops.torch_internals import pytree

_META = torch.device("meta")
# Replaces a Python scalar among the operands.
SCALAR = torch.empty((), device=_META)


def iterate(operands: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the result that an elementwise kernel allocates for broadcast operands.

    >>> flipped = torch.empty(5, 4, device="meta").t()
    >>> iterate([flipped, torch.empty(1, 5, device="meta")], torch.float32).stride()
    (1, 4)
    """
    shapes = {tuple(operand.shape) for operand in operands}
    if len(shapes) == 1:
        known = _of_one_shape(operands, dtype)
        if known is not None:
            return known
    shape = _common_shape(shapes)
    strides = [_broadcast(operand, shape) for operand in operands]
    order = _inner_first(shape, strides)
    if order == list(reversed(range(len(shape)))):
        return torch.empty(shape, dtype=dtype, device=_META)
    laid, step = [0] * len(shape), 1
    for dim in order:
        laid[dim] = step
        step *= shape[dim]
    return torch.empty_strided(shape, laid, dtype=dtype, device=_META)


def _common_shape(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the broadcast shape; torch.broadcast_shapes would import the compiler's symbolic shapes."""
    whole: list[int] = []
    for shape in shapes:
        whole = [1] * (len(shape) - len(whole)) + whole
        for position, size in enumerate(shape, len(whole) - len(shape)):
            if whole[position] == 1:
                whole[position] = size
            elif size not in (1, whole[position]):
                raise RuntimeError(f"shapes {', '.join(map(str, shapes))} cannot be broadcast together")
    return tuple(whole)


def _of_one_shape(operands: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor | None:
    """Return the result if all operands have one layout, ignoring strides of dimensions of size 1."""
    first = operands[0]
    if all(operand.is_contiguous() for operand in operands):
        return torch.empty(first.shape, dtype=dtype, device=_META)
    if first.ndim == 4 and all(operand.is_contiguous(memory_format=torch.channels_last) for operand in operands):
        return torch.empty(first.shape, dtype=dtype, device=_META, memory_format=torch.channels_last)
    if len({operand.stride() for operand in operands}) == 1 and is_dense(first):
        return torch.empty_strided(first.shape, first.stride(), dtype=dtype, device=_META)
    return None


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is non-overlapping and dense."""
    step = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1:
            if stride != step:
                return False
            step *= size
    return True


def _broadcast(operand: torch.Tensor, shape: Sequence[int]) -> list[int]:
    """Return an operand's strides in the broadcast shape, 0 where it is expanded."""
    own = [
        0 if size == 1 and size != whole else stride
        for size, stride, whole in zip(operand.shape, operand.stride(), shape[len(shape) - operand.ndim :], strict=True)
    ]
    return [0] * (len(shape) - len(own)) + own


def _inner_first(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[int]:
    """Return the dimensions ordered by stride, innermost first; earlier operands take precedence."""
    order = list(reversed(range(len(shape))))

    def compare(dim0: int, dim1: int) -> int:
        for own in strides:
            if own[dim0] == 0 or own[dim1] == 0:
                continue
            if own[dim0] != own[dim1]:
                return -1 if own[dim0] < own[dim1] else 1
            if shape[dim0] > shape[dim1]:
                return 1
        return 0

    # An insertion sort, as in TensorIterator: the comparison is not transitive, and an undecided pair moves on to the
    # next.
    for last in range(1, len(order)):
        here = last
        for before in reversed(range(last)):
            found = compare(order[before], order[here])
            if found > 0:
                order[before], order[here] = order[here], order[before]
                here = before
            elif found < 0:
                break
    return order


def with_elementwise_strides(func: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule with another's result, new tensors with the strides of an elementwise kernel."""
    arguments = func._schema.arguments
    wrapped = {
        index
        for index, argument in enumerate(arguments)
        if str(argument.type) == "Tensor" or (argument.name == "other" and str(argument.type) == "number")
    }

    def operands(args: Sequence[Any]) -> Iterator[torch.Tensor]:
        for index, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                yield value
            elif index in wrapped and isinstance(value, (int, float, complex)):
                yield SCALAR

    def apply(*args: Any, **kwargs: Any) -> Any:
        result = rule(*args, **kwargs)
        given = [*operands(args), *(value for value in kwargs.values() if isinstance(value, torch.Tensor))]
        taken = {id(tensor) for tensor in given}

        def lay(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in taken or tensor.device != _META or not given:
                return tensor
            like = iterate(given, tensor.dtype)
            return like if like.shape == tensor.shape and like.stride() != tensor.stride() else tensor

        return pytree.tree_map_only(torch.Tensor, lay, result)

    return apply


def glu(self: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Return the result of `glu`, an elementwise op on the two halves of a dimension."""
    return iterate(self.chunk(2, dim), self.dtype) if self.shape[dim] % 2 == 0 else torch.ops.aten.glu(self, dim)


def scale_by_power(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the result of `ldexp`, which computes the powers of two first."""
    powers = torch.empty(other.shape, device=_META)
    return iterate([self, powers], torch.ops.aten.ldexp.Tensor(self, other).dtype)


def raise_number(self: complex, exponent: torch.Tensor) -> torch.Tensor:
    """Return the powers of a scalar, contiguous."""
    dtype = torch.ops.aten.pow.Scalar(self, exponent).dtype
    return torch.empty(exponent.shape, dtype=dtype, device=_META)


def sum_of_gammas(self: torch.Tensor, p: int) -> torch.Tensor:
    """Return the result of `mvlgamma`, which sums over an added dimension."""
    dtype = torch.ops.aten.mvlgamma(self, p).dtype
    return iterate([torch.empty(p, device=_META), self.unsqueeze(-1)], dtype).sum(-1)


def log_sigmoid(self: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor like the first."""
    return torch.empty_like(self, memory_format=torch.contiguous_format)


def log_sigmoid_forward(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two contiguous tensors like the first."""
    return log_sigmoid(self), log_sigmoid(self)


def native_dropout(input: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result and mask of a dropout."""
    kept = torch.empty_like(input, dtype=torch.bool)
    return torch.clone(input) if train is False else iterate([input, kept], input.dtype), kept


# Tagged pointwise, but allocated differently: like `empty_like`, or a clone written in place.
NOT_ELEMENTWISE = frozenset(
    {"aten::clone", "aten::hardtanh", "aten::masked_fill.Scalar", "aten::masked_fill.Tensor", "aten::nan_to_num"}
)

RULES: dict[str, Callable[..., Any]] = {
    "aten::floor_divide": with_elementwise_strides(
        torch.ops.aten.floor_divide.default, torch.ops.aten.floor_divide.default
    ),
    "aten::glu": glu,
    "aten::ldexp.Tensor": scale_by_power,
    "aten::mvlgamma": sum_of_gammas,
    "aten::pow.Scalar": raise_number,
}

CPU_RULES: dict[str, Callable[..., Any]] = {
    "aten::log_sigmoid": log_sigmoid,
    "aten::log_sigmoid_forward": log_sigmoid_forward,
    "aten::native_dropout": native_dropout,
}
