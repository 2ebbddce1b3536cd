"""Shape rules of vision ops: torchvision's, whose meta kernels need its Python package, and cuDNN's grid sampling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fvflops.capture.shapes.rules.memory_formats import like


def roi_align(
    input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int, *_: Any
) -> Tensor:
    """Return the pooled regions [regions, channels, height, width]."""
    return input.new_empty(len(rois), input.shape[1], pooled_height, pooled_width)


def roi_pool(*args: Any) -> tuple[Tensor, Tensor]:
    """Return the maximum in each bin of the regions, and its index."""
    pooled = roi_align(*args)
    return pooled, torch.empty_like(pooled, dtype=torch.int32)


def ps_roi_pool(input: Tensor, rois: Tensor, spatial_scale: float, *size: Any) -> Any:
    """Return the pooled regions, each position from its own channels, and the indices of these channels."""
    channels = input.shape[1] // (size[0] * size[1])
    return roi_pool(input[:, :channels], rois, spatial_scale, *size)


def gradient_of_features(position: int, grad: Tensor, *args: Any) -> Tensor:
    """Return the gradient of pooled features, whose shape is among the other arguments from a position on."""
    return grad.new_empty(args[position : position + 4])


def deform_conv2d(input: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor, *rest: Any) -> Tensor:
    """Return the result [batch, channels, height, width]."""
    axes = zip(input.shape[2:], weight.shape[2:], rest[:2], rest[2:4], rest[4:6], strict=True)
    sizes = [(size + 2 * pad - gap * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, gap in axes]
    return input.new_empty(len(input), len(weight), *sizes)


RULES: dict[str, Callable[..., Any]] = {
    # The coordinates [batch, height, width, 2] of an affine grid, and the gradient of its matrices.
    "aten::cudnn_affine_grid_generator": lambda theta, N, C, H, W: theta.new_empty(N, H, W, 2),
    "aten::cudnn_affine_grid_generator_backward": lambda grad, N, *_: grad.new_empty(N, 2, 3),
    "aten::cudnn_grid_sampler": lambda self, grid: self.new_empty(*self.shape[:2], *grid.shape[1:3]),
    "aten::cudnn_grid_sampler_backward": partial(like, (0, 1)),
    "torchvision::_deform_conv2d_backward": partial(like, (1, 2, 3, 4, 5)),
    "torchvision::_ps_roi_align_backward": partial(gradient_of_features, 6),
    "torchvision::_ps_roi_pool_backward": partial(gradient_of_features, 5),
    "torchvision::_roi_align_backward": partial(gradient_of_features, 4),
    "torchvision::_roi_pool_backward": partial(gradient_of_features, 5),
    "torchvision::deform_conv2d": deform_conv2d,
    "torchvision::ps_roi_align": ps_roi_pool,
    "torchvision::ps_roi_pool": ps_roi_pool,
    "torchvision::roi_align": roi_align,
    "torchvision::roi_pool": roi_pool,
}
