"""Shape rules of cuDNN's spatial transformer: affine grid and grid sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def affine_grid(theta: torch.Tensor, N: int, C: int, H: int, W: int) -> torch.Tensor:
    """Return the coordinates [batch, height, width, 2] of an affine grid."""
    return theta.new_empty(N, H, W, 2)


def affine_grid_backward(grad: torch.Tensor, N: int, C: int, H: int, W: int) -> torch.Tensor:
    """Return the gradient of the affine matrices [batch, 2, 3]."""
    return grad.new_empty(N, 2, 3)


def grid_sample(self: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Return the image [batch, channels, height, width] sampled at a grid's coordinates."""
    return self.new_empty(*self.shape[:2], *grid.shape[1:3])


def grid_sample_backward(
    self: torch.Tensor, grid: torch.Tensor, grad_output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the image and of the grid."""
    return torch.empty_like(self), torch.empty_like(grid)


RULES: dict[str, Callable[..., Any]] = {
    "aten::cudnn_affine_grid_generator": affine_grid,
    "aten::cudnn_affine_grid_generator_backward": affine_grid_backward,
    "aten::cudnn_grid_sampler": grid_sample,
    "aten::cudnn_grid_sampler_backward": grid_sample_backward,
}
