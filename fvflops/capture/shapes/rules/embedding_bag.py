"""Shape rules of embedding bags on the CPU, which saves different tensors for backward than CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_SUM, _MEAN, _MAX = range(3)
_FAST_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Bags = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def embedding_bag(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
    *,
    forward_only: bool = False,
) -> Bags:
    """Return the bags [bags, embedding_dim], the bag of each index, the bag sizes and the indices of the maxima.

    The kernels' fast path (sum, single or half precision, contiguous rows) does not compute the bag of each index.
    """
    if indices.dtype not in (torch.int64, torch.int32):  # with torch's message
        raise RuntimeError(f"expected indices to be long or int, got {indices.dtype}")
    bags = len(offsets) - include_last_offset
    width = weight.shape[1]
    uses_fast_path = (
        mode == _SUM
        and weight.dtype in _FAST_DTYPES
        and weight.stride(1) == 1
        and (per_sample_weights is None or per_sample_weights.stride(0) == 1)
        and padding_idx < 0
    )
    sizes = len(offsets) if forward_only and mode == _SUM else bags
    return (
        weight.new_empty(bags, width),
        indices.new_empty(0) if uses_fast_path else indices.new_empty(len(indices) + 1).resize_(len(indices)),
        indices.new_empty(len(offsets)).resize_(sizes),
        indices.new_empty((bags, width) if mode == _MAX else sizes),
    )


def embedding_bag_forward_only(*args: Any, **kwargs: Any) -> Bags:
    """Return the results of the op without gradients, whose bag sizes have another length."""
    return embedding_bag(*args, **kwargs, forward_only=True)


def embedding_bag_padding_idx(weight: torch.Tensor, *args: Any) -> Bags:
    """Return the results without gradients; a negative padding index counts from the end."""
    *rest, padding_idx = args
    return embedding_bag_forward_only(weight, *rest, -1 if padding_idx is None else padding_idx % len(weight))


CPU_RULES: dict[str, Callable[..., Any]] = {
    "aten::_embedding_bag": embedding_bag,
    "aten::_embedding_bag_forward_only": embedding_bag_forward_only,
    "aten::embedding_bag": embedding_bag_forward_only,
    "aten::embedding_bag.padding_idx": embedding_bag_padding_idx,
}
