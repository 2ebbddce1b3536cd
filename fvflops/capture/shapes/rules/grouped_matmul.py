"""Shape rules of grouped and quantized matrix products; torch's own accept fewer dtypes and layouts than kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def grouped_mm(
    self: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the products of groups of rows, of columns, of parts of the contracted dimension, or of a batch.

    Rows of the result are aligned to 16 bytes. Shapes: [rows, k] x [groups, k, n] gives [rows, n]; [groups, m, k] x
    [k, columns] gives [m, columns]; [m, k] x [k, n] and batches give [groups, m, n].
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


def scaled_grouped_mm(
    self: torch.Tensor,
    mat2: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Return the products of groups of low-precision matrices, in bfloat16 by default."""
    return grouped_mm(self, mat2, offs, bias, out_dtype or torch.bfloat16)


def scaled_grouped_mm_v2(self: torch.Tensor, mat2: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Return the products, as `scaled_grouped_mm` with the arguments of `_scaled_grouped_mm_v2`."""
    offs, bias, out_dtype = (*rest[6:9], None, None, None)[:3]
    return grouped_mm(self, mat2, offs, bias, out_dtype or torch.bfloat16)


def mixed_dtypes_linear(input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return the product of an input and an integer weight [k, n]."""
    return input.new_empty(*input.shape[:-1], weight.shape[-1])


def weight_int4pack_mm(self: torch.Tensor, mat2: torch.Tensor, qGroupSize: int, *_: Any) -> torch.Tensor:
    """Return the product with a weight packed in tiles of eight columns."""
    return self.new_empty(len(self), 8 * len(mat2))


RULES: dict[str, Callable[..., Any]] = {
    "aten::_grouped_mm": grouped_mm,
    "aten::_weight_int4pack_mm": weight_int4pack_mm,
    "aten::_mixed_dtypes_linear": mixed_dtypes_linear,
    "aten::_scaled_grouped_mm": scaled_grouped_mm,
    "aten::_scaled_grouped_mm_v2": scaled_grouped_mm_v2,
}
