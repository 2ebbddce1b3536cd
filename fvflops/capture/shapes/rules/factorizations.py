"""Shape rules of matrix factorizations and least squares."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fvflops.capture.shapes.shape_tensor import DataDependentError


def factor(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed factors of QR and the scales of the reflectors."""
    *batch, rows, columns = self.shape
    return _by_columns(self), self.new_empty((*batch, min(rows, columns)))


def solve_least_squares(
    self: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None, usual: str = "gels"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return solution, residuals, ranks and singular values; `usual` is the device's default driver.

    With the drivers gelsd and gelss the ranks decide whether there are residuals: for more rows than columns these
    raise DataDependentError.
    """
    driver = driver or usual
    *_, rows, columns = self.shape
    vector = self.ndim == b.ndim + 1 and b.shape == self.shape[:-1]
    right = b.unsqueeze(-1) if vector else b
    batch = torch.broadcast_shapes(self.shape[:-2], right.shape[:-2])
    if rows > columns and driver in ("gelsd", "gelss"):
        raise DataDependentError.of_op("aten::linalg_lstsq")
    # In place of the right-hand sides, which have as many rows as the matrix.
    solution = _by_columns(self.new_empty((*batch, max(rows, columns), right.shape[-1])))[..., :columns, :]
    residuals = (*batch, right.shape[-1]) if rows > columns and driver == "gels" else (0,)
    ranks = self.shape[:-2] if driver != "gels" else (0,)
    values = (*self.shape[:-2], min(rows, columns)) if driver in ("gelsd", "gelss") else (0,)
    return (
        solution.squeeze(-1) if vector else solution,
        self.new_empty(residuals, dtype=self.dtype.to_real()),
        self.new_empty(ranks, dtype=torch.int64),
        self.new_empty(values, dtype=self.dtype.to_real()),
    )


def decompose_singular(
    A: torch.Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return singular vectors and values; Vh is column-major from LAPACK, unlike cuSOLVER."""
    left, values, right = torch.ops.aten._linalg_svd(A, full_matrices, compute_uv)
    return left, values, _by_columns(right) if compute_uv else right


def decompose_eigen(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eigenvalues and eigenvectors, the latter column-major as from LAPACK."""
    values, vectors = torch.ops.aten.linalg_eig(self)
    return values, _by_columns(vectors)


def _by_columns(like: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor of column-major matrices, as LAPACK requires."""
    return torch.empty_like(like.mT, memory_format=torch.contiguous_format).mT


RULES: dict[str, Callable[..., Any]] = {
    "aten::geqrf": factor,
    "aten::linalg_lstsq": solve_least_squares,
}

CPU_RULES: dict[str, Callable[..., Any]] = {
    "aten::_linalg_svd": decompose_singular,
    "aten::linalg_eig": decompose_eigen,
    "aten::linalg_lstsq": partial(solve_least_squares, usual="gelsy"),
}
