"""Strides of gradients from CPU kernels, where torch's shape rules differ.

Strides affect which ops follow: a matrix product first copies a non-contiguous gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def like_elementwise(positions: tuple[int, ...], *args: Any, **_: Any) -> torch.Tensor:
    """Return the result of an elementwise kernel on the arguments at two positions, in that order."""
    first, second = (args[position] for position in positions)
    return torch.add(first, second).to(first.dtype)


def contiguous_like(position: int, *args: Any, **_: Any) -> torch.Tensor:
    """Return a contiguous tensor like an argument."""
    return torch.empty_like(args[position], memory_format=torch.contiguous_format)


def preserve_format(position: int, *args: Any, **_: Any) -> torch.Tensor:
    """Return a tensor like an argument: channels last if the argument is, else contiguous."""
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
    """Return the gradient of RReLU, which in training is multiplied by the noise."""
    return like_elementwise((0, 1), noise if training and upper - lower > 1e-6 else self, grad_output)


def native_batch_norm_backward(*args: Any, **options: Any) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of input, weight and bias, the first in the input's memory format."""
    gradient, *rest = torch.ops.aten.native_batch_norm_backward.default(*args, **options)
    return (None if gradient is None else preserve_format(1, *args), *rest)


def native_layer_norm_backward(*args: Any, **options: Any) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of input, weight and bias, the first contiguous."""
    gradient, *rest = torch.ops.aten.native_layer_norm_backward.default(*args, **options)
    return (None if gradient is None else contiguous_like(1, *args), *rest)


def channel_shuffle(self: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the shuffled channels, a copy even with one group."""
    return preserve_format(0, self)


def _format_of(tensor: torch.Tensor) -> torch.memory_format:
    channels_last = _CHANNELS_LAST.get(tensor.ndim)
    if channels_last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=channels_last):
        return torch.contiguous_format
    return channels_last


CPU_RULES: dict[str, Callable[..., Any]] = {
    "aten::_log_softmax_backward_data": partial(contiguous_like, 0),
    "aten::binary_cross_entropy_backward": lambda *args: torch.empty_like(args[1]),
    "aten::channel_shuffle": channel_shuffle,
    "aten::elu_backward": partial(like_elementwise, (0, 5)),
    "aten::hardtanh_backward": partial(like_elementwise, (0, 1)),
    "aten::huber_loss_backward": partial(contiguous_like, 1),
    "aten::log_sigmoid_backward": partial(like_elementwise, (0, 2)),
    "aten::mse_loss_backward": partial(contiguous_like, 1),
    "aten::native_batch_norm_backward": native_batch_norm_backward,
    "aten::native_channel_shuffle": channel_shuffle,
    "aten::native_layer_norm_backward": native_layer_norm_backward,
    "aten::reflection_pad2d_backward": partial(preserve_format, 1),
    "aten::replication_pad2d_backward": partial(preserve_format, 1),
    "aten::rrelu": partial(contiguous_like, 0),
    "aten::rrelu_with_noise": partial(contiguous_like, 0),
    "aten::rrelu_with_noise_backward": rrelu_backward,
    "aten::smooth_l1_loss_backward": partial(contiguous_like, 1),
    "aten::softplus_backward": partial(like_elementwise, (0, 1)),
    "aten::threshold_backward": partial(like_elementwise, (1, 0)),
}
