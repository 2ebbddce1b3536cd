"""Shape rules for kernels that choose a memory format or a contiguous result, where torch's own rules differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

_CHANNELS_LAST = {4: (torch.channels_last, (1, 3, 2, 0)), 5: (torch.channels_last_3d, (1, 4, 3, 2, 0))}


def suggested_format(tensor: Tensor) -> torch.memory_format:
    """Return the memory format that a tensor's strides suggest, as C++'s `Tensor.suggest_memory_format`.

    >>> suggested_format(torch.empty(1, 2, 3, 3).to(memory_format=torch.channels_last))
    torch.channels_last
    """
    if tensor.ndim not in _CHANNELS_LAST:
        return torch.contiguous_format
    channels_last, inner_first = _CHANNELS_LAST[tensor.ndim]
    shape, stride = tensor.shape, tensor.stride()
    min_stride = 0
    if stride[1] == 0:
        return torch.contiguous_format
    for dim in inner_first:
        if shape[dim] == 0 or stride[dim] < min_stride or (dim == 0 and min_stride == stride[1]):
            return torch.contiguous_format
        min_stride = stride[dim] * max(shape[dim], 1)
    return channels_last


def empty_with_format(like: Tensor, shape: Sequence[int], memory_format: torch.memory_format) -> Tensor:
    """Return a tensor with the dtype and device of another, contiguous if the memory format is for another rank."""
    channels_last, _ = _CHANNELS_LAST.get(len(shape), (None, ()))
    if memory_format is not channels_last:
        memory_format = torch.contiguous_format
    return torch.empty(tuple(shape), dtype=like.dtype, device=like.device, memory_format=memory_format)


def preserve_format(rule: Callable[..., Any], self: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Return another rule's result in the memory format that the first argument's strides suggest."""
    # Called with a contiguous tensor, since torch's own rules create views, which other strides may not allow.
    result = rule(torch.empty(self.shape, dtype=self.dtype, device=self.device), *rest, **options)
    return empty_with_format(result, result.shape, suggested_format(self))


def make_contiguous(rule: Callable[..., Any], *args: Any, **options: Any) -> Tensor:
    result = rule(*args, **options)
    return torch.empty(result.shape, dtype=result.dtype, device=result.device)


def shrink(rule: Callable[..., Any], *args: Any, **options: Any) -> Tensor:
    """Return another rule's result, in a storage of the first two arguments' broadcast shape if that is larger."""
    result = rule(*args, **options)
    shape = torch.broadcast_shapes(*(item.shape for item in args[:2] if isinstance(item, Tensor)))
    if math.prod(shape) <= result.numel():
        return result
    return torch.empty(shape, dtype=result.dtype, device=result.device).resize_(result.shape)


def like(positions: tuple[int, ...], *args: Any, **_: Any) -> Any:
    results = tuple(torch.empty_like(args[position]) for position in positions)
    return results[0] if len(results) == 1 else results


def contiguous_like(position: int, *args: Any, **_: Any) -> Tensor:
    return torch.empty_like(args[position], memory_format=torch.contiguous_format)


def format_of(position: int, *args: Any, **_: Any) -> Tensor:
    """Return a tensor like an argument: channels last if the argument is, else contiguous."""
    tensor = args[position]
    channels_last = _CHANNELS_LAST[tensor.ndim][0] if tensor.ndim in _CHANNELS_LAST else torch.contiguous_format
    is_channels_last = not tensor.is_contiguous() and tensor.is_contiguous(memory_format=channels_last)
    return torch.empty_like(tensor, memory_format=channels_last if is_channels_last else torch.contiguous_format)


def roll(self: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """Return the result of the CPU's kernel, which concatenates two parts per dimension."""
    if not self.numel():
        return torch.clone(self)
    if not dims:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)
    for shift, dim in zip(shifts, dims, strict=True):
        size = self.shape[dim]
        start = (size - shift) % size
        self = torch.cat([self.narrow(dim, start, size - start), self.narrow(dim, 0, start)], dim)
    return self


def _wrap_rules(wrapper: Callable[..., Any], *names: str) -> dict[str, Callable[..., Any]]:
    rules: dict[str, Callable[..., Any]] = {}
    for name in names:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        rules[f"aten::{name}"] = partial(wrapper, op)
    return rules


# `shrink`: these kernels allocate a larger buffer and resize it to the result's shape.
RULES: dict[str, Callable[..., Any]] = {
    **_wrap_rules(shrink, "binary_cross_entropy", "col2im", "im2col", "mse_loss", "smooth_l1_loss", "soft_margin_loss"),
    **_wrap_rules(
        make_contiguous,
        *("_log_softmax_backward_data", "_softmax_backward_data"),
        *("normal.Tensor_Tensor", "normal.Tensor_float", "normal.float_Tensor"),
        *("_upsample_nearest_exact1d", "linalg_vector_norm", "upsample_linear1d", "upsample_nearest1d"),
    ),
    **_wrap_rules(
        preserve_format,
        *("replication_pad2d", "replication_pad3d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
        *("upsample_bicubic2d", "upsample_bilinear2d", "upsample_nearest2d", "upsample_nearest3d"),
        *("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "upsample_trilinear3d"),
    ),
    "aten::huber_loss_backward": partial(contiguous_like, 1),
    "aten::mse_loss_backward": partial(contiguous_like, 1),
    "aten::smooth_l1_loss_backward": partial(contiguous_like, 1),
}

CPU_RULES: dict[str, Callable[..., Any]] = {
    **_wrap_rules(
        preserve_format, *("max_unpool2d", "pixel_shuffle", "pixel_unshuffle", "reflection_pad2d", "reflection_pad3d")
    ),
    **_wrap_rules(make_contiguous, "max_pool1d"),
    "aten::binary_cross_entropy_backward": partial(like, (1,)),
    "aten::channel_shuffle": partial(format_of, 0),  # a copy even with one group
    "aten::log_sigmoid": partial(contiguous_like, 0),
    "aten::log_sigmoid_forward": lambda self: (contiguous_like(0, self), contiguous_like(0, self)),
    "aten::native_channel_shuffle": partial(format_of, 0),
    "aten::reflection_pad2d_backward": partial(format_of, 1),
    "aten::replication_pad2d_backward": partial(format_of, 1),
    "aten::roll": roll,
    "aten::rrelu": partial(contiguous_like, 0),
    "aten::rrelu_with_noise": partial(contiguous_like, 0),
}
