"""Shape rules of FFTs on the CPU, with the strides of MKL's results, which torch's own rules lack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64, torch.float16: torch.complex32}
_REAL = {value: key for key, value in _COMPLEX.items()}
_HAS_MKL = torch.backends.mkl.is_available()


def fft_r2c(self: torch.Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> torch.Tensor:
    """Return the transform of a real tensor; `onesided` halves the last dimension."""
    sizes = list(self.shape)
    if onesided:
        sizes[dim[-1]] = sizes[dim[-1]] // 2 + 1
    return _transform(self, sizes, [*_outer_first(self, dim[:-1]), dim[-1]], _COMPLEX[self.dtype])


def fft_c2r(self: torch.Tensor, dim: Sequence[int], normalization: int, last_dim_size: int) -> torch.Tensor:
    """Return the real inverse transform; in several dimensions the last one is transformed separately."""
    inner = fft_c2c(self, dim[:-1], normalization, False) if len(dim) > 1 and _HAS_MKL else self
    sizes = list(self.shape)
    sizes[dim[-1]] = last_dim_size
    return _transform(inner, sizes, dim[-1:], _REAL[self.dtype])


def fft_c2c(self: torch.Tensor, dim: Sequence[int], normalization: int, forward: bool) -> torch.Tensor:
    """Return the transform of a complex tensor."""
    return _transform(self, self.shape, _outer_first(self, dim), self.dtype) if dim else torch.clone(self)


def _outer_first(self: torch.Tensor, dim: Sequence[int]) -> list[int]:
    return sorted((axis % self.ndim for axis in dim), key=lambda axis: -self.stride()[axis])


def _transform(self: torch.Tensor, sizes: Sequence[int], dim: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a result with the transformed dimensions innermost, and the others in the order of their strides."""
    if not _HAS_MKL:
        return torch.empty(tuple(sizes), dtype=dtype, device=self.device)
    inner = [axis % self.ndim for axis in dim]
    order = [*sorted(_partition(self.ndim, inner), key=lambda axis: -self.stride()[axis]), *inner]
    contiguous = torch.empty([sizes[axis] for axis in order], dtype=dtype, device=self.device)
    return contiguous.permute([order.index(axis) for axis in range(self.ndim)])


def _partition(rank: int, inner: Sequence[int]) -> list[int]:
    """Return the untransformed dimensions, in the order in which C++'s std::partition leaves them.

    The order matters where strides are equal, as in an expanded gradient.
    """
    axes, last = list(range(rank)), rank
    for first in range(rank):
        if first < last and axes[first] in inner:
            last = max((index for index in range(first, last) if axes[index] not in inner), default=first)
            axes[first], axes[last] = axes[last], axes[first]
    return [axis for axis in axes if axis not in inner]


CPU_RULES: dict[str, Callable[..., Any]] = {
    "aten::_fft_c2c": fft_c2c,
    "aten::_fft_c2r": fft_c2r,
    "aten::_fft_r2c": fft_r2c,
}
