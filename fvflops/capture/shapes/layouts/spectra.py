"""Shape rules of FFTs on the CPU: the strides of MKL's results, which torch's rules lack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64, torch.float16: torch.complex32}
_REAL = {value: key for key, value in _COMPLEX.items()}
_BY_MKL = torch.backends.mkl.is_available()


def transform_real(self: torch.Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> torch.Tensor:
    """Return the transform of a real tensor; `onesided` halves the last dimension."""
    sizes = list(self.shape)
    if onesided:
        sizes[dim[-1]] = sizes[dim[-1]] // 2 + 1
    return _transform(self, sizes, [*_outer_first(self, dim[:-1]), dim[-1]], _COMPLEX[self.dtype])


def transform_to_real(self: torch.Tensor, dim: Sequence[int], normalization: int, last_dim_size: int) -> torch.Tensor:
    """Return the real inverse transform; in several dimensions the last one is transformed separately."""
    inner = transform(self, dim[:-1], normalization, False) if len(dim) > 1 and _BY_MKL else self
    sizes = list(self.shape)
    sizes[dim[-1]] = last_dim_size
    return _transform(inner, sizes, dim[-1:], _REAL[self.dtype])


def transform(self: torch.Tensor, dim: Sequence[int], normalization: int, forward: bool) -> torch.Tensor:
    """Return the transform of a complex tensor."""
    return _transform(self, self.shape, _outer_first(self, dim), self.dtype) if dim else torch.clone(self)


def _outer_first(self: torch.Tensor, dim: Sequence[int]) -> list[int]:
    return sorted((position % self.ndim for position in dim), key=lambda position: -self.stride()[position])


def _transform(self: torch.Tensor, sizes: Sequence[int], dim: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a result with the transformed dimensions innermost, the others in the order of their strides."""
    if not _BY_MKL:
        return torch.empty(tuple(sizes), dtype=dtype, device=self.device)
    inner = [position % self.ndim for position in dim]
    order = [*sorted(_partition(self.ndim, inner), key=lambda position: -self.stride()[position]), *inner]
    laid = torch.empty([sizes[position] for position in order], dtype=dtype, device=self.device)
    return laid.permute([order.index(position) for position in range(self.ndim)])


def _partition(rank: int, inner: Sequence[int]) -> list[int]:
    """Return the untransformed dimensions, in the order in which C++'s std::partition leaves them.

    The order matters where strides are equal, as in an expanded gradient.
    """
    found, last = list(range(rank)), rank
    for first in range(rank):
        if first < last and found[first] in inner:
            last = max((position for position in range(first, last) if found[position] not in inner), default=first)
            found[first], found[last] = found[last], found[first]
    return [position for position in found if position not in inner]


CPU_RULES: dict[str, Callable[..., Any]] = {
    "aten::_fft_c2c": transform,
    "aten::_fft_c2r": transform_to_real,
    "aten::_fft_r2c": transform_real,
}
