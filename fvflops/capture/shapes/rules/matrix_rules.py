"""Shape rules of grouped and quantized matrix products, factorizations, least squares and Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fvflops.capture.shapes.shape_tensor import DataDependentError

_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64, torch.float16: torch.complex32}
_REAL = {value: key for key, value in _COMPLEX.items()}
_HAS_MKL = torch.backends.mkl.is_available()


def grouped_mm(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the products of groups of rows, of columns, of parts of the contracted dimension, or of a batch.

    torch's own rule accepts fewer dtypes and layouts than kernels. Rows of the result are aligned to 16 bytes. Shapes:
    [rows, k] x [groups, k, n] gives [rows, n]; [groups, m, k] x [k, columns] gives [m, columns]; [m, k] x [k, n] and
    batches give [groups, m, n].
    """
    if self.ndim + mat2.ndim > 4 and self.shape[-1] != mat2.shape[-2]:
        raise ValueError(f"contraction dimension of mat_a and mat_b must match; got {self.shape} and {mat2.shape}")
    if self.ndim + mat2.ndim < 6 and offs is None:
        raise ValueError(f"groups of {self.ndim}D by {mat2.ndim}D matrices require offsets (offs)")
    rows, columns = self.shape[-2], mat2.shape[-1]
    groups = self if self.ndim == mat2.ndim == 3 else offs if self.ndim == mat2.ndim else None
    shape: tuple[int, ...] = (rows, columns) if groups is None else (len(groups), rows, columns)
    dtype = out_dtype or self.dtype
    alignment = 16 // dtype.itemsize
    row_stride = math.ceil(columns / alignment) * alignment
    return self.new_empty_strided(shape, (rows * row_stride, row_stride, 1)[-len(shape) :], dtype=dtype)


def scaled_grouped_mm(offsets: int, dtype: int, self: Tensor, mat2: Tensor, *rest: Any) -> Tensor:
    """Return grouped low-precision products, by default bfloat16; `offsets` and `dtype` are positions in `rest`."""
    given = (*rest, *[None] * (dtype + 1 - len(rest)))
    return grouped_mm(self, mat2, given[offsets], None, given[dtype] or torch.bfloat16)


def geqrf(self: Tensor) -> tuple[Tensor, Tensor]:
    *batch, rows, columns = self.shape
    return _column_major_like(self), self.new_empty((*batch, min(rows, columns)))


def linalg_lstsq(
    self: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None, default_driver: str = "gels"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return solution, residuals, ranks and singular values.

    Raises DataDependentError for the drivers gelsd and gelss if there are more rows than columns: whether there are
    residuals then depends on the ranks.
    """
    driver = driver or default_driver
    *_, rows, columns = self.shape
    is_vector = self.ndim == b.ndim + 1 and b.shape == self.shape[:-1]
    rhs = b.unsqueeze(-1) if is_vector else b
    batch = torch.broadcast_shapes(self.shape[:-2], rhs.shape[:-2])
    if rows > columns and driver in ("gelsd", "gelss"):
        raise DataDependentError.of_op("aten::linalg_lstsq")
    # The kernels overwrite the right-hand sides, which have as many rows as the matrix.
    solution = _column_major_like(self.new_empty((*batch, max(rows, columns), rhs.shape[-1])))[..., :columns, :]
    residuals = (*batch, rhs.shape[-1]) if rows > columns and driver == "gels" else (0,)
    ranks = self.shape[:-2] if driver != "gels" else (0,)
    values = (*self.shape[:-2], min(rows, columns)) if driver in ("gelsd", "gelss") else (0,)
    return (
        solution.squeeze(-1) if is_vector else solution,
        self.new_empty(residuals, dtype=self.dtype.to_real()),
        self.new_empty(ranks, dtype=torch.int64),
        self.new_empty(values, dtype=self.dtype.to_real()),
    )


def linalg_svd(
    A: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, the singular values and Vh, which is column-major from LAPACK, unlike from cuSOLVER."""
    u, values, vh = torch.ops.aten._linalg_svd(A, full_matrices, compute_uv)
    return u, values, _column_major_like(vh) if compute_uv else vh


def linalg_eig(self: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues and the eigenvectors, which are column-major from LAPACK."""
    values, vectors = torch.ops.aten.linalg_eig(self)
    return values, _column_major_like(vectors)


def _column_major_like(like: Tensor) -> Tensor:
    return torch.empty_like(like.mT, memory_format=torch.contiguous_format).mT


# Strides of MKL's results, which torch's own rules lack.


def fft_r2c(self: Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> Tensor:
    """Return the transform of a real tensor; `onesided` halves the last dimension."""
    sizes = list(self.shape)
    if onesided:
        sizes[dim[-1]] = sizes[dim[-1]] // 2 + 1
    return _transform(self, sizes, [*_outer_first(self, dim[:-1]), dim[-1]], _COMPLEX[self.dtype])


def fft_c2r(self: Tensor, dim: Sequence[int], normalization: int, last_dim_size: int) -> Tensor:
    """Return the real inverse transform; in several dimensions the last one is transformed separately."""
    inner = fft_c2c(self, dim[:-1], normalization, False) if len(dim) > 1 and _HAS_MKL else self
    sizes = list(self.shape)
    sizes[dim[-1]] = last_dim_size
    return _transform(inner, sizes, dim[-1:], _REAL[self.dtype])


def fft_c2c(self: Tensor, dim: Sequence[int], normalization: int, forward: bool) -> Tensor:
    """Return the transform of a complex tensor."""
    return _transform(self, self.shape, _outer_first(self, dim), self.dtype) if dim else torch.clone(self)


def _outer_first(self: Tensor, dim: Sequence[int]) -> list[int]:
    return sorted((axis % self.ndim for axis in dim), key=lambda axis: -self.stride()[axis])


def _transform(self: Tensor, sizes: Sequence[int], dim: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a result with the transformed dimensions innermost, and the others in the order of their strides."""
    if not _HAS_MKL:
        return torch.empty(tuple(sizes), dtype=dtype, device=self.device)
    inner = [axis % self.ndim for axis in dim]
    order = [*sorted(_partition(self.ndim, inner), key=lambda axis: -self.stride()[axis]), *inner]
    contiguous = torch.empty([sizes[axis] for axis in order], dtype=dtype, device=self.device)
    return contiguous.permute([order.index(axis) for axis in range(self.ndim)])


def _partition(rank: int, inner: Sequence[int]) -> list[int]:
    """Return the untransformed dimensions in std::partition's order, which matters where strides are equal."""
    axes, last = list(range(rank)), rank
    for first in range(rank):
        if first < last and axes[first] in inner:
            last = max((index for index in range(first, last) if axes[index] not in inner), default=first)
            axes[first], axes[last] = axes[last], axes[first]
    return [axis for axis in axes if axis not in inner]


RULES: dict[str, Callable[..., Any]] = {
    "aten::_grouped_mm": grouped_mm,
    "aten::_mixed_dtypes_linear": lambda input, weight, *_, **__: input.new_empty(*input.shape[:-1], weight.shape[-1]),
    "aten::_scaled_grouped_mm": partial(scaled_grouped_mm, 2, 5),
    "aten::_scaled_grouped_mm_v2": partial(scaled_grouped_mm, 6, 8),
    # A weight packed in tiles of eight columns.
    "aten::_weight_int4pack_mm": lambda self, mat2, *_: self.new_empty(len(self), 8 * len(mat2)),
    "aten::geqrf": geqrf,
    "aten::linalg_lstsq": linalg_lstsq,
}

CPU_RULES: dict[str, Callable[..., Any]] = {
    "aten::_fft_c2c": fft_c2c,
    "aten::_fft_c2r": fft_c2r,
    "aten::_fft_r2c": fft_r2c,
    "aten::_linalg_svd": linalg_svd,
    "aten::linalg_eig": linalg_eig,
    "aten::linalg_lstsq": partial(linalg_lstsq, default_driver="gelsy"),
}
