"""Shape rules of torchvision's ops, whose own meta kernels need torchvision's Python package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def roi_align(
    input: torch.Tensor, rois: torch.Tensor, spatial_scale: float, pooled_height: int, pooled_width: int, *_: Any
) -> torch.Tensor:
    """Return the pooled regions [regions, channels, height, width]."""
    return input.new_empty(len(rois), input.shape[1], pooled_height, pooled_width)


def roi_pool(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum in each bin of the regions, and its index."""
    pooled = roi_align(*args)
    return pooled, torch.empty_like(pooled, dtype=torch.int32)


def ps_roi_pool(
    input: torch.Tensor, rois: torch.Tensor, spatial_scale: float, pooled_height: int, pooled_width: int, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pooled regions, each position from its own channels, and the indices of these channels."""
    channels = input.shape[1] // (pooled_height * pooled_width)
    pooled = input.new_empty(len(rois), channels, pooled_height, pooled_width)
    return pooled, torch.empty_like(pooled, dtype=torch.int32)


def roi_align_backward(grad: torch.Tensor, rois: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return the gradient of the features, whose shape is among the arguments."""
    return grad.new_empty(rest[3:7])


def roi_pool_backward(grad: torch.Tensor, rois: torch.Tensor, indices: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return the gradient of the features of `roi_pool` and `ps_roi_pool`."""
    return grad.new_empty(rest[3:7])


def ps_roi_align_backward(grad: torch.Tensor, rois: torch.Tensor, indices: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return the gradient of the features of `ps_roi_align`."""
    return grad.new_empty(rest[4:8])


def deform_conv2d(
    input: torch.Tensor,
    weight: torch.Tensor,
    offset: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor,
    *rest: Any,
) -> torch.Tensor:
    """Return the result [batch, channels, height, width]."""
    sizes = [
        (size + 2 * rest[2 + axis] - rest[4 + axis] * (kernel - 1) - 1) // rest[axis] + 1
        for axis, (size, kernel) in enumerate(zip(input.shape[2:], weight.shape[2:], strict=True))
    ]
    return input.new_empty(len(input), len(weight), *sizes)


def deform_conv2d_backward(grad: torch.Tensor, *tensors: Any) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the input, the weight, the offsets, the mask and the bias."""
    return tuple(torch.empty_like(tensor) for tensor in tensors[:5])


RULES: dict[str, Callable[..., Any]] = {
    "torchvision::_deform_conv2d_backward": deform_conv2d_backward,
    "torchvision::_ps_roi_align_backward": ps_roi_align_backward,
    "torchvision::_ps_roi_pool_backward": roi_pool_backward,
    "torchvision::_roi_align_backward": roi_align_backward,
    "torchvision::_roi_pool_backward": roi_pool_backward,
    "torchvision::deform_conv2d": deform_conv2d,
    "torchvision::ps_roi_align": ps_roi_pool,
    "torchvision::ps_roi_pool": ps_roi_pool,
    "torchvision::roi_align": roi_align,
    "torchvision::roi_pool": roi_pool,
}
