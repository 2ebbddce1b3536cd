"""Shape rules of flex attention; score and mask functions are not called, as they may be data-dependent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    """Return the output [batch, heads, queries, value width], its log-sum-exp and its maximum scores.

    As in the dense implementation: the output has the query's layout, the statistics the working precision.
    """
    shape = (*query.shape[:3], value.shape[3])
    working = torch.float64 if query.dtype is torch.float64 else torch.float32
    statistics = [query.new_empty(query.shape[:3], dtype=working) for _ in range(2)]
    return dense_strided(query, shape, query.stride(), rows=True), *statistics


def attend_backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """Return the gradients of query, key and value, and placeholders for the score function's captured buffers."""
    batch = query.shape[0]
    captured = rest[9] if len(rest) > 9 else ()
    return (
        dense_strided(query, query.shape, query.stride(), rows=True),
        dense_strided(key, (batch, *key.shape[1:]), key.stride(), rows=True),
        dense_strided(value, (batch, *value.shape[1:]), value.stride(), rows=True),
        tuple(torch.empty_like(item) if isinstance(item, torch.Tensor) else item for item in captured),
    )


def dense_strided(
    like: torch.Tensor, shape: Sequence[int], order: Sequence[int], *, rows: bool = False
) -> torch.Tensor:
    """Return a dense tensor whose dimensions are in memory in the order of these strides.

    `rows`: the last dimension is innermost regardless of the strides.
    """
    inner_first = sorted(range(len(shape)), key=lambda dim: order[dim])
    if rows and inner_first[0] != len(shape) - 1:
        inner_first.remove(len(shape) - 1)
        inner_first.insert(0, len(shape) - 1)
    strides, step = [0] * len(shape), 1
    for dim in inner_first:
        strides[dim] = step
        step *= shape[dim]
    return like.new_empty_strided(tuple(shape), tuple(strides))


RULES: dict[str, Callable[..., Any]] = {
    "higher_order::flex_attention": attend,
    "higher_order::flex_attention_backward": attend_backward,
}
