"""Shape rules of grouped matrix products: torch's accept fewer dtypes and layouts than the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def multiply_groups(
    self: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return products of groups of rows, of columns, of slices of the contracted dimension, or of a batch.

    Rows of the result are aligned to 16 bytes. Shapes: [rows, k] x [groups, k, n] gives [rows, n]; [groups, m, k] x
    [k, columns] gives [m, columns]; [m, k] x [k, n] and batches give [groups, m, n].
    """
    if self.ndim + mat2.ndim > 4 and self.shape[-1] != mat2.shape[-2]:
        raise ValueError(f"contraction dimension of mat_a and mat_b must match, not {self.shape} and {mat2.shape}")
    if self.ndim + mat2.ndim < 6 and offs is None:
        raise ValueError(f"the groups of {self.ndim}D by {mat2.ndim}D matrices need offsets")
    rows, columns = self.shape[-2], mat2.shape[-1]
    groups = self if self.ndim == mat2.ndim == 3 else offs if self.ndim == mat2.ndim else None
    shape: tuple[int, ...] = (rows, columns) if groups is None else (len(groups), rows, columns)
    dtype = out_dtype or self.dtype
    aligned = 16 // dtype.itemsize
    width = math.ceil(columns / aligned) * aligned
    return self.new_empty_strided(shape, (rows * width, width, 1)[-len(shape) :], dtype=dtype)


def multiply_scaled_groups(
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
    """Return products of groups of low-precision matrices, in bfloat16 by default."""
    return multiply_groups(self, mat2, offs, bias, out_dtype or torch.bfloat16)


def multiply_scaled_groups_2(self: torch.Tensor, mat2: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Apply `multiply_scaled_groups` to the arguments of `_scaled_grouped_mm_v2`."""
    offs, bias, out_dtype = (*rest[6:9], None, None, None)[:3]
    return multiply_groups(self, mat2, offs, bias, out_dtype or torch.bfloat16)


def multiply_mixed(input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Return the product of an input and an integer weight [k, n]."""
    return input.new_empty(*input.shape[:-1], weight.shape[-1])


def multiply_int4(self: torch.Tensor, mat2: torch.Tensor, qGroupSize: int, *_: Any) -> torch.Tensor:
    """Return the product with a weight packed in tiles of eight columns."""
    return self.new_empty(len(self), 8 * len(mat2))


RULES: dict[str, Callable[..., Any]] = {
    "aten::_grouped_mm": multiply_groups,
    "aten::_weight_int4pack_mm": multiply_int4,
    "aten::_mixed_dtypes_linear": multiply_mixed,
    "aten::_scaled_grouped_mm": multiply_scaled_groups,
    "aten::_scaled_grouped_mm_v2": multiply_scaled_groups_2,
}
