"""Shape rules of normalization: synchronized batch norm, and the CPU's kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fvflops.capture.shapes.rules.memory_formats import (
    contiguous_like,
    empty_with_format,
    format_of,
    like,
    suggested_format,
)

_Pair = tuple[Tensor, Tensor]
_HALF = (torch.float16, torch.bfloat16)


def statistics(input: Tensor, *_: Any) -> _Pair:
    """Return two statistics per channel, in single precision for half-precision input."""
    dtype = torch.float32 if input.dtype in _HALF else input.dtype
    return input.new_empty(input.shape[1], dtype=dtype), input.new_empty(input.shape[1], dtype=dtype)


def batch_norm_backward_reduce(grad_out: Tensor, input: Tensor, *rest: Any) -> tuple[Any, ...]:
    """Return per-channel sums of the gradient and of its product with the input, and the parameters' gradients."""
    mean, _, weight, input_g, weight_g, bias_g = rest
    parameter = mean if weight is None else weight
    sums = (mean, input_g), (mean, input_g), (parameter, weight_g), (parameter, bias_g)
    return tuple(torch.empty_like(item) if requested else None for item, requested in sums)


def batch_norm(name: str, *args: Any) -> tuple[Tensor, ...]:
    """Return the normalized input, the statistics saved for backward (empty in evaluation), and other results."""
    input, *rest = args
    # Inferred with twice the batch, which gives the same statistics: torch rejects one element per channel, since it
    # divides by the number of elements minus one.
    doubled = torch.empty((2 * input.shape[0], *input.shape[1:]), dtype=input.dtype, device=input.device)
    _, *others = getattr(torch.ops.aten, name)(doubled, *rest)
    running_statistics = args[3:5] if len(args) > 6 else ()
    dtype = statistics_dtype(*args[:3], *running_statistics)
    training = not name.endswith(("_no_training", "_no_update")) and bool(args[-3])
    saved = (item.new_empty(item.shape if training else 0, dtype=dtype) for item in others[:2])
    # A copy of each running statistic, or the reserve.
    running = zip(others[2:], running_statistics, strict=False)
    use_contiguous = input.is_contiguous() and not training
    memory_format = torch.contiguous_format if use_contiguous else suggested_format(input)
    output = empty_with_format(input, input.shape, memory_format)
    return (output, *saved, *(torch.empty_like(old if new.shape == old.shape else new) for new, old in running))


def native_layer_norm(input: Tensor, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    output, *saved = torch.ops.aten.native_layer_norm(input, normalized_shape, weight, bias, eps)
    dtype = statistics_dtype(input, weight, bias)
    return (output, *(torch.empty_like(item, dtype=dtype) for item in saved))


def group_norm(input: Tensor, *rest: Any) -> Tensor:
    """Return a tensor like the input, in the memory format that its strides suggest."""
    torch.ops.aten.group_norm(input, *rest)  # checks the arguments
    return empty_with_format(input, input.shape, suggested_format(input))


def native_group_norm(
    input: Tensor, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Tensor, ...]:
    """Return the normalized input, and the means and inverse standard deviations of the groups."""
    _, *saved = torch.ops.aten.native_group_norm(input, weight, bias, N, C, HxW, group, eps)
    return (empty_with_format(input, input.shape, suggested_format(input)), *saved)


def batch_norm_backward(name: str, grad_out: Tensor, input: Tensor, *rest: Any) -> tuple[Any, ...]:
    """Return the gradients of input, weight and bias, the first in the input's memory format."""
    grad_input, *others = getattr(torch.ops.aten, name)(grad_out, input, *rest)
    return (None if grad_input is None else format_of(0, input), *others)


def native_layer_norm_backward(*args: Any) -> tuple[Tensor | None, ...]:
    grads = torch.ops.aten.native_layer_norm_backward(*args)
    return tuple(None if item is None else contiguous_like(0, item) for item in grads)


def statistics_dtype(input: Tensor, *parameters: Any) -> torch.dtype:
    """Return the dtype of a CPU kernel's statistics: the input's, or float32 for mixed half precision."""
    dtypes = {item.dtype for item in parameters if isinstance(item, Tensor)} - {input.dtype}
    return torch.float32 if dtypes and input.dtype in _HALF else input.dtype


RULES: dict[str, Callable[..., Any]] = {
    "aten::batch_norm_backward_elemt": partial(like, (0,)),
    "aten::batch_norm_backward_reduce": batch_norm_backward_reduce,
    "aten::batch_norm_elemt": partial(like, (0,)),
    "aten::batch_norm_gather_stats": statistics,
    "aten::batch_norm_gather_stats_with_counts": statistics,
    "aten::batch_norm_stats": statistics,
    "aten::batch_norm_update_stats": statistics,
    "aten::native_layer_norm_backward": native_layer_norm_backward,
}

CPU_RULES: dict[str, Callable[..., Any]] = {
    **{
        f"aten::{name}": partial(batch_norm, name.partition(".")[0])
        for name in (
            *("_batch_norm_no_update", "_native_batch_norm_legit", "_native_batch_norm_legit.no_stats"),
            *("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "native_batch_norm"),
        )
    },
    **{
        f"aten::{name}": partial(batch_norm_backward, name)
        for name in ("batch_norm_backward", "native_batch_norm_backward")
    },
    "aten::group_norm": group_norm,
    "aten::native_group_norm": native_group_norm,
    "aten::native_layer_norm": native_layer_norm,
}
