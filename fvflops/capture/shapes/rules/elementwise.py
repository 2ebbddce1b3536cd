"""Strides of elementwise results, as allocated by TensorIterator.

torch's own meta rules emulate TensorIterator, but differ for broadcast operands and for sizes of 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fvflops.capture.lazy_values.run_values import is_dense
from fvflops.torch_internals import pytree

_META = torch.device("meta")
# Operand in place of a Python scalar.
SCALAR = torch.empty((), device=_META)


def elementwise_result(operands: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the result that an elementwise kernel allocates for broadcast operands.

    >>> flipped = torch.empty(5, 4, device="meta").t()
    >>> elementwise_result([flipped, torch.empty(1, 5, device="meta")], torch.float32).stride()
    (1, 4)
    """
    shapes = {tuple(operand.shape) for operand in operands}
    if len(shapes) == 1:
        result = _result_of_one_layout(operands, dtype)
        if result is not None:
            return result
    shape = _common_shape(shapes)
    strides = [_broadcast(operand, shape) for operand in operands]
    order = _inner_first(shape, strides)
    if order == list(reversed(range(len(shape)))):
        return torch.empty(shape, dtype=dtype, device=_META)
    result_strides, step = [0] * len(shape), 1
    for dim in order:
        result_strides[dim] = step
        step *= shape[dim]
    return torch.empty_strided(shape, result_strides, dtype=dtype, device=_META)


def _common_shape(shapes: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Return the broadcast shape; torch.broadcast_shapes would import the compiler's symbolic shapes."""
    common: list[int] = []
    for shape in shapes:
        common = [1] * (len(shape) - len(common)) + common
        for dim, size in enumerate(shape, len(common) - len(shape)):
            if common[dim] == 1:
                common[dim] = size
            elif size not in (1, common[dim]):
                raise RuntimeError(f"shapes {', '.join(map(str, shapes))} cannot be broadcast together")
    return tuple(common)


def _result_of_one_layout(operands: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Return the result for operands of one shape with equal strides, ignoring dimensions of size 1, or None."""
    first = operands[0]
    if all(operand.is_contiguous() for operand in operands):
        return torch.empty(first.shape, dtype=dtype, device=_META)
    if first.ndim == 4 and all(operand.is_contiguous(memory_format=torch.channels_last) for operand in operands):
        return torch.empty(first.shape, dtype=dtype, device=_META, memory_format=torch.channels_last)
    if len({operand.stride() for operand in operands}) == 1 and is_dense(first.shape, first.stride()):
        return torch.empty_strided(first.shape, first.stride(), dtype=dtype, device=_META)
    return None


def _broadcast(operand: Tensor, shape: Sequence[int]) -> list[int]:
    """Return an operand's strides in the broadcast shape, 0 where it is expanded."""
    columns = zip(operand.shape, operand.stride(), shape[len(shape) - operand.ndim :], strict=True)
    strides = [0 if size == 1 and size != common else stride for size, stride, common in columns]
    return [0] * (len(shape) - len(strides)) + strides


def _inner_first(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[int]:
    """Return the dimensions ordered by stride, innermost first; earlier operands take precedence."""
    order = list(reversed(range(len(shape))))

    def compare(dim0: int, dim1: int) -> int:
        for stride in strides:
            if stride[dim0] == 0 or stride[dim1] == 0:
                continue
            if stride[dim0] != stride[dim1]:
                return -1 if stride[dim0] < stride[dim1] else 1
            if shape[dim0] > shape[dim1]:
                return 1
        return 0

    # An insertion sort as in TensorIterator, since the comparison is not transitive: after a tie it compares with the
    # next dimension.
    for start in range(1, len(order)):
        current = start
        for previous in reversed(range(start)):
            comparison = compare(order[previous], order[current])
            if comparison > 0:
                order[previous], order[current] = order[current], order[previous]
                current = previous
            elif comparison < 0:
                break
    return order


def with_elementwise_strides(func: Any, rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule that gives new tensors in another rule's result the strides of an elementwise kernel."""
    arguments = func._schema.arguments
    kinds = [(index, argument.name, str(argument.type)) for index, argument in enumerate(arguments)]
    operand_indices = {index for index, name, kind in kinds if kind == "Tensor" or (name, kind) == ("other", "number")}

    def operands(args: Sequence[Any]) -> Iterator[Tensor]:
        for index, value in enumerate(args):
            if isinstance(value, Tensor):
                yield value
            elif index in operand_indices and isinstance(value, (int, float, complex)):
                yield SCALAR

    def apply(*args: Any, **kwargs: Any) -> Any:
        result = rule(*args, **kwargs)
        tensors = [*operands(args), *(value for value in kwargs.values() if isinstance(value, Tensor))]
        argument_ids = {id(tensor) for tensor in tensors}

        def restride(tensor: Tensor) -> Tensor:
            if id(tensor) in argument_ids or tensor.device != _META or not tensors:
                return tensor
            like = elementwise_result(tensors, tensor.dtype)
            return like if like.shape == tensor.shape and like.stride() != tensor.stride() else tensor

        return pytree.tree_map_only(Tensor, restride, result)

    return apply


def glu(self: Tensor, dim: int = -1) -> Tensor:
    """Return the result of `glu`, an elementwise op on the two halves of a dimension."""
    if self.shape[dim] % 2:
        return torch.ops.aten.glu(self, dim)  # which raises
    return elementwise_result(self.chunk(2, dim), self.dtype)


def ldexp(self: Tensor, other: Tensor) -> Tensor:
    """Return the result of `ldexp`, which computes the powers of two first."""
    powers = torch.empty(other.shape, device=_META)
    return elementwise_result([self, powers], torch.ops.aten.ldexp.Tensor(self, other).dtype)


def pow_scalar(self: complex, exponent: Tensor) -> Tensor:
    dtype = torch.ops.aten.pow.Scalar(self, exponent).dtype
    return torch.empty(exponent.shape, dtype=dtype, device=_META)


def mvlgamma(self: Tensor, p: int) -> Tensor:
    """Return the result of `mvlgamma`, which sums over an added dimension."""
    dtype = torch.ops.aten.mvlgamma(self, p).dtype
    return elementwise_result([torch.empty(p, device=_META), self.unsqueeze(-1)], dtype).sum(-1)


def like_elementwise(positions: tuple[int, int], *args: Any, **_: Any) -> Tensor:
    """Return the result of an elementwise kernel on the arguments at two positions, in that order."""
    first, second = (args[position] for position in positions)
    return elementwise_result([first, second], first.dtype)


def rrelu_backward(grad_output: Tensor, self: Tensor, noise: Tensor, *rest: Any) -> Tensor:
    """Return the gradient of RReLU, which in training is multiplied by the noise."""
    lower, upper, training = rest[:3]
    factor = noise if training and upper - lower > 1e-6 else self
    return elementwise_result([factor, grad_output], factor.dtype)


def native_dropout(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    mask = torch.empty_like(input, dtype=torch.bool)
    return torch.clone(input) if train is False else elementwise_result([input, mask], input.dtype), mask


# Ops tagged pointwise whose kernels allocate the result otherwise: by `empty_like` or by cloning.
NOT_ELEMENTWISE = frozenset(
    {"aten::clone", "aten::hardtanh", "aten::masked_fill.Scalar", "aten::masked_fill.Tensor", "aten::nan_to_num"}
)

RULES: dict[str, Callable[..., Any]] = {
    "aten::floor_divide": with_elementwise_strides(
        torch.ops.aten.floor_divide.default, torch.ops.aten.floor_divide.default
    ),
    "aten::glu": glu,
    "aten::ldexp.Tensor": ldexp,
    "aten::mvlgamma": mvlgamma,
    "aten::pow.Scalar": pow_scalar,
}

# Gradients whose operand order determines their strides, and with them the ops that follow: a matrix product first
# copies a non-contiguous gradient.
CPU_RULES: dict[str, Callable[..., Any]] = {
    "aten::elu_backward": partial(like_elementwise, (0, 5)),
    "aten::hardtanh_backward": partial(like_elementwise, (0, 1)),
    "aten::log_sigmoid_backward": partial(like_elementwise, (0, 2)),
    "aten::native_dropout": native_dropout,
    "aten::rrelu_with_noise_backward": rrelu_backward,
    "aten::softplus_backward": partial(like_elementwise, (0, 1)),
    "aten::threshold_backward": partial(like_elementwise, (1, 0)),
}
