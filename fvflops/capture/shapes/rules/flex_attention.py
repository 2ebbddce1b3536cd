"""Shape rules of flex attention, without calling its score and mask functions, which may be data-dependent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def flex_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    """Return the output [batch, heads, queries, value_dim], its log-sum-exp and its maximum scores.

    As in the dense implementation, the output has the query's layout, and the statistics are float32 or float64.
    """
    shape = (*query.shape[:3], value.shape[3])
    statistics_dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    statistics = [query.new_empty(query.shape[:3], dtype=statistics_dtype) for _ in range(2)]
    return dense_strided(query, shape, query.stride(), last_innermost=True), *statistics


def flex_attention_backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Return the gradients of query, key and value, and placeholders for the score function's captured buffers."""
    batch = query.shape[0]
    captured = rest[9] if len(rest) > 9 else ()
    return (
        dense_strided(query, query.shape, query.stride(), last_innermost=True),
        dense_strided(key, (batch, *key.shape[1:]), key.stride(), last_innermost=True),
        dense_strided(value, (batch, *value.shape[1:]), value.stride(), last_innermost=True),
        tuple(torch.empty_like(item) if isinstance(item, torch.Tensor) else item for item in captured),
    )


def dense_strided(
    like: torch.Tensor, shape: Sequence[int], stride_order: Sequence[int], *, last_innermost: bool = False
) -> torch.Tensor:
    """Return a dense tensor whose dimensions are ordered in memory by `stride_order`.

    `last_innermost`: the last dimension is innermost regardless of that order.
    """
    inner_first = sorted(range(len(shape)), key=lambda dim: stride_order[dim])
    if last_innermost and inner_first[0] != len(shape) - 1:
        inner_first.remove(len(shape) - 1)
        inner_first.insert(0, len(shape) - 1)
    strides, step = [0] * len(shape), 1
    for dim in inner_first:
        strides[dim] = step
        step *= shape[dim]
    return like.new_empty_strided(tuple(shape), tuple(strides))


RULES: dict[str, Callable[..., Any]] = {
    "higher_order::flex_attention": flex_attention,
    "higher_order::flex_attention_backward": flex_attention_backward,
}
