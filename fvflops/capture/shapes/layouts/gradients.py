"""Strides of gradients from CPU kernels, where torch's shape rules differ.

Strides decide which ops follow: a matrix product copies a non-contiguous gradient first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def iterate(positions: tuple[int, ...], *args: Any, **_: Any) -> torch.Tensor:
    """Return the result of an elementwise kernel on the arguments at two positions, in that order."""
    first, second = (args[position] for position in positions)
    return torch.add(first, second).to(first.dtype)


def make_contiguous(position: int, *args: Any, **_: Any) -> torch.Tensor:
    """Return a contiguous tensor like an argument."""
    return torch.empty_like(args[position], memory_format=torch.contiguous_format)


def keep_format(position: int, *args: Any, **_: Any) -> torch.Tensor:
    """Return a tensor like an argument, channels last if the argument is, else contiguous."""
    like = args[position]
    return torch.empty_like(like, memory_format=_format_of(like))


def rrelu_backward(
    grad_output: torch.Tensor,
    self: torch.Tensor,
    noise: torch.Tensor,
    lower: float,
    upper: float,
    training: bool,
    self_is_result: bool,
) -> torch.Tensor:
    """Return the gradient of RReLU, in training multiplied by the noise drawn."""
    return iterate((0, 1), noise if training and upper - lower > 1e-6 else self, grad_output)


def norm_batch(*args: Any, **options: Any) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of batch norm, the input's in the input's memory format."""
    gradient, *rest = torch.ops.aten.native_batch_norm_backward.default(*args, **options)
    return (None if gradient is None else keep_format(1, *args), *rest)


def norm_layer(*args: Any, **options: Any) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of layer norm, the input's contiguous."""
    gradient, *rest = torch.ops.aten.native_layer_norm_backward.default(*args, **options)
    return (None if gradient is None else make_contiguous(1, *args), *rest)


def shuffle_channels(self: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the shuffled channels: a copy, even with one group."""
    return keep_format(0, self)


def _format_of(tensor: torch.Tensor) -> torch.memory_format:
    last = _CHANNELS_LAST.get(tensor.ndim)
    inside = last is not None and tensor.is_contiguous(memory_format=last) and not tensor.is_contiguous()
    return last if last is not None and inside else torch.contiguous_format


CPU_RULES: dict[str, Callable[..., Any]] = {
    "aten::_log_softmax_backward_data": partial(make_contiguous, 0),
    "aten::binary_cross_entropy_backward": lambda *args: torch.empty_like(args[1]),
    "aten::channel_shuffle": shuffle_channels,
    "aten::elu_backward": partial(iterate, (0, 5)),
    "aten::hardtanh_backward": partial(iterate, (0, 1)),
    "aten::huber_loss_backward": partial(make_contiguous, 1),
    "aten::log_sigmoid_backward": partial(iterate, (0, 2)),
    "aten::mse_loss_backward": partial(make_contiguous, 1),
    "aten::native_batch_norm_backward": norm_batch,
    "aten::native_channel_shuffle": shuffle_channels,
    "aten::native_layer_norm_backward": norm_layer,
    "aten::reflection_pad2d_backward": partial(keep_format, 1),
    "aten::replication_pad2d_backward": partial(keep_format, 1),
    "aten::rrelu": partial(make_contiguous, 0),
    "aten::rrelu_with_noise": partial(make_contiguous, 0),
    "aten::rrelu_with_noise_backward": rrelu_backward,
    "aten::smooth_l1_loss_backward": partial(make_contiguous, 1),
    "aten::softplus_backward": partial(iterate, (0, 1)),
    "aten::threshold_backward": partial(iterate, (1, 0)),
}
