"""Shape rules of embedding bags on the CPU, which saves other tensors for backward than CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_SUM, _MEAN, _MAX = range(3)
_FAST = (torch.float32, torch.float16, torch.bfloat16)

Bags = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def embed(
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
    """Return the bags [bags, width], the bag of each index, the bag sizes and the positions of maxima.

    The fast path (sum, single or half precision, contiguous rows) does not compute the bag of each index.
    """
    bags = len(offsets) - include_last_offset
    width = weight.shape[1]
    fast = (
        mode == _SUM
        and weight.dtype in _FAST
        and weight.stride(1) == 1
        and (per_sample_weights is None or per_sample_weights.stride(0) == 1)
        and padding_idx < 0
    )
    sizes = len(offsets) if forward_only and mode == _SUM else bags
    return (
        weight.new_empty(bags, width),
        indices.new_empty(0) if fast else indices.new_empty(len(indices) + 1).resize_(len(indices)),
        indices.new_empty(len(offsets)).resize_(sizes),
        indices.new_empty((bags, width) if mode == _MAX else sizes),
    )


def embed_forward(*args: Any, **kwargs: Any) -> Bags:
    """Return what `embed` does without gradients."""
    return embed(*args, **kwargs, forward_only=True)


def embed_padded(weight: torch.Tensor, *args: Any) -> Bags:
    """Return what `embed_forward` does, with a padding index that may be negative, counted from the end."""
    *others, padding_idx = args
    return embed_forward(weight, *others, -1 if padding_idx is None else padding_idx % len(weight))


CPU_RULES: dict[str, Callable[..., Any]] = {
    "aten::_embedding_bag": embed,
    "aten::_embedding_bag_forward_only": embed_forward,
    "aten::embedding_bag": embed_forward,
    "aten::embedding_bag.padding_idx": embed_padded,
}
