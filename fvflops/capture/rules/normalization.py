"""The rules of batch normalisation: over several processes, and on the CPU in evaluation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_Pair = tuple[torch.Tensor, torch.Tensor]


def statistics(input: torch.Tensor, *_: Any) -> _Pair:
    """Return two numbers for each channel, in single precision where the input has half."""
    half = input.dtype in (torch.float16, torch.bfloat16)
    return tuple(  # type: ignore[return-value]
        input.new_empty(input.shape[1], dtype=torch.float32 if half else input.dtype) for _ in range(2)
    )


def like_input(input: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return a tensor like the input."""
    return torch.empty_like(input)


def sums_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[torch.Tensor | None, ...]:
    """Return the channels' sums of the gradient and of its product with the input, and the parameters' gradients."""
    like = mean if weight is None else weight
    return (
        torch.empty_like(mean) if input_g else None,
        torch.empty_like(mean) if input_g else None,
        torch.empty_like(like) if weight_g else None,
        torch.empty_like(like) if bias_g else None,
    )


def normalise(name: str, trains: Callable[..., bool], *args: Any) -> tuple[torch.Tensor, ...]:
    """Return the normalised input, what is kept for the backward pass (nothing in evaluation), and the rest."""
    output, *kept = getattr(torch.ops.aten, name)(*args)
    return (output, *kept) if trains(*args) else (output, *(item.new_empty(0) for item in kept[:2]), *kept[2:])


def _says_so(*args: Any) -> bool:
    return bool(args[5])


def _never(*_: Any) -> bool:
    return False


RULES: dict[str, Callable[..., Any]] = {
    "aten::batch_norm_backward_reduce": sums_backward,
    "aten::batch_norm_elemt": like_input,
    "aten::batch_norm_stats": statistics,
    "aten::batch_norm_update_stats": statistics,
    "aten::batch_norm_gather_stats": statistics,
    "aten::batch_norm_gather_stats_with_counts": statistics,
    "aten::batch_norm_backward_elemt": like_input,
}

CPU_RULES: dict[str, Callable[..., Any]] = {
    "aten::_batch_norm_no_update": partial(normalise, "_batch_norm_no_update", _never),
    "aten::_native_batch_norm_legit": partial(normalise, "_native_batch_norm_legit", _says_so),
    "aten::_native_batch_norm_legit_functional": partial(normalise, "_native_batch_norm_legit_functional", _says_so),
    "aten::_native_batch_norm_legit_no_training": partial(normalise, "_native_batch_norm_legit_no_training", _never),
    "aten::native_batch_norm": partial(normalise, "native_batch_norm", _says_so),
}
