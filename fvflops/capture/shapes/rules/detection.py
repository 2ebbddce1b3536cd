"""Shape rules of torchvision's operators, whose meta kernels need torchvision's Python package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def pool_regions(
    input: torch.Tensor, rois: torch.Tensor, spatial_scale: float, pooled_height: int, pooled_width: int, *_: Any
) -> torch.Tensor:
    """Return the pooled regions [regions, channels, height, width]."""
    return input.new_empty(len(rois), input.shape[1], pooled_height, pooled_width)


def pool_largest(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maxima of the regions and their indices."""
    pooled = pool_regions(*args)
    return pooled, torch.empty_like(pooled, dtype=torch.int32)


def pool_by_position(
    input: torch.Tensor, rois: torch.Tensor, spatial_scale: float, pooled_height: int, pooled_width: int, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the regions, pooled from separate channels for each position, and the channels read."""
    channels = input.shape[1] // (pooled_height * pooled_width)
    pooled = input.new_empty(len(rois), channels, pooled_height, pooled_width)
    return pooled, torch.empty_like(pooled, dtype=torch.int32)


def align_backward(grad: torch.Tensor, rois: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return the gradient of the features of `roi_align`, whose sizes are among the arguments."""
    return grad.new_empty(rest[3:7])


def pool_backward(grad: torch.Tensor, rois: torch.Tensor, picked: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return the gradient of the features of `roi_pool` and `ps_roi_pool`."""
    return grad.new_empty(rest[3:7])


def align_by_position_backward(
    grad: torch.Tensor, rois: torch.Tensor, picked: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """Return the gradient of the features of `ps_roi_align`."""
    return grad.new_empty(rest[4:8])


def convolve_deformed(
    input: torch.Tensor,
    weight: torch.Tensor,
    offset: torch.Tensor,
    mask: torch.Tensor,
    bias: torch.Tensor,
    *rest: Any,
) -> torch.Tensor:
    """Return the result [batch, channels, height, width] of a deformable convolution."""
    sizes = [
        (size + 2 * rest[2 + axis] - rest[4 + axis] * (kernel - 1) - 1) // rest[axis] + 1
        for axis, (size, kernel) in enumerate(zip(input.shape[2:], weight.shape[2:], strict=True))
    ]
    return input.new_empty(len(input), len(weight), *sizes)


def convolve_deformed_backward(grad: torch.Tensor, *tensors: Any) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the input, the weight, the offsets, the mask and the bias."""
    return tuple(torch.empty_like(tensor) for tensor in tensors[:5])


RULES: dict[str, Callable[..., Any]] = {
    "torchvision::_deform_conv2d_backward": convolve_deformed_backward,
    "torchvision::_ps_roi_align_backward": align_by_position_backward,
    "torchvision::_ps_roi_pool_backward": pool_backward,
    "torchvision::_roi_align_backward": align_backward,
    "torchvision::_roi_pool_backward": pool_backward,
    "torchvision::deform_conv2d": convolve_deformed,
    "torchvision::ps_roi_align": pool_by_position,
    "torchvision::ps_roi_pool": pool_by_position,
    "torchvision::roi_align": pool_regions,
    "torchvision::roi_pool": pool_largest,
}
