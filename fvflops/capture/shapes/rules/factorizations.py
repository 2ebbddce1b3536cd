"""Shape rules of matrix factorizations and least squares."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fvflops.capture.shapes.shape_tensor import DataDependentError


def geqrf(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed QR factors and the scales of the Householder reflectors."""
    *batch, rows, columns = self.shape
    return _column_major_like(self), self.new_empty((*batch, min(rows, columns)))


def linalg_lstsq(
    self: torch.Tensor,
    b: torch.Tensor,
    rcond: float | None = None,
    *,
    driver: str | None = None,
    default_driver: str = "gels",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
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
    A: torch.Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return U, the singular values and Vh, which is column-major from LAPACK, unlike from cuSOLVER."""
    u, values, vh = torch.ops.aten._linalg_svd(A, full_matrices, compute_uv)
    return u, values, _column_major_like(vh) if compute_uv else vh


def linalg_eig(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the eigenvalues and the eigenvectors, which are column-major from LAPACK."""
    values, vectors = torch.ops.aten.linalg_eig(self)
    return values, _column_major_like(vectors)


def _column_major_like(like: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor of column-major matrices with the same shape."""
    return torch.empty_like(like.mT, memory_format=torch.contiguous_format).mT


RULES: dict[str, Callable[..., Any]] = {
    "aten::geqrf": geqrf,
    "aten::linalg_lstsq": linalg_lstsq,
}

CPU_RULES: dict[str, Callable[..., Any]] = {
    "aten::_linalg_svd": linalg_svd,
    "aten::linalg_eig": linalg_eig,
    "aten::linalg_lstsq": partial(linalg_lstsq, default_driver="gelsy"),
}
