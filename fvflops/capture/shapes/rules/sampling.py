"""Shape rules of cuDNN's spatial transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def make_grid(theta: torch.Tensor, N: int, C: int, H: int, W: int) -> torch.Tensor:
    """Return the coordinates [batch, height, width, 2] of an affine grid."""
    return theta.new_empty(N, H, W, 2)


def make_grid_backward(grad: torch.Tensor, N: int, C: int, H: int, W: int) -> torch.Tensor:
    """Return the gradient of the affine maps [batch, 2, 3]."""
    return grad.new_empty(N, 2, 3)


def sample(self: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Return the image [batch, channels, height, width] at the positions of a grid."""
    return self.new_empty(*self.shape[:2], *grid.shape[1:3])


def sample_backward(
    self: torch.Tensor, grid: torch.Tensor, grad_output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the image and of the grid."""
    return torch.empty_like(self), torch.empty_like(grid)


RULES: dict[str, Callable[..., Any]] = {
    "aten::cudnn_affine_grid_generator": make_grid,
    "aten::cudnn_affine_grid_generator_backward": make_grid_backward,
    "aten::cudnn_grid_sampler": sample,
    "aten::cudnn_grid_sampler_backward": sample_backward,
}
