"""Shape rules for CUDA, where results differ from torch's shape rules or from the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fvflops.capture.shapes.shape_tensor import DataDependentError


def log_sigmoid_forward(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result, and a buffer that is empty on CUDA."""
    return torch.empty_like(self), self.new_empty(0)


def uses_cudnn_for_ctc(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, blank: int
) -> bool:
    """Return False, or raise DataDependentError where cuDNN's choice depends on the sequence lengths."""
    fits = blank == 0 and targets.ndim == 1 and log_probs.dtype is torch.float32 and targets.dtype is torch.int32
    if fits and torch.backends.cudnn.enabled:
        raise DataDependentError.of_op("aten::_use_cudnn_ctc_loss", "sequence lengths")
    return False


def never(*_: Any, **__: Any) -> bool:
    """Return False."""
    return False


def recurrent(
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_stride0: int,
    weight_buf: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    """Return outputs, last states and cells, reserve (its size is known to cuDNN only) and the weight buffer.

    Unless given, the buffer is allocated for all weights, with space for biases whether there are any or not.
    """
    *found, _ = torch.ops.aten._cudnn_rnn(input, weight, weight_stride0, weight_buf, *rest)
    if weight_buf is None:
        gates = weight[0].shape[0]
        missing = 0 if weight_stride0 > 3 else 2 * gates * (len(weight) // weight_stride0)
        weight_buf = weight[0].new_empty(sum(item.numel() for item in weight) + missing)
    return (*found, weight_buf)


def recurrent_backward(
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_stride0: int,
    weight_buf: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, list[torch.Tensor]]:
    """Return the gradients of input, states and cells, requested or not, and those of the weights if requested."""
    batch_first, packed, mask = rest[8], bool(rest[12]), rest[-1]
    swapped = batch_first and not packed
    of_input = torch.empty_like(input.transpose(0, 1) if swapped else input, memory_format=torch.contiguous_format)
    return (
        of_input.transpose(0, 1) if swapped else of_input,
        torch.empty_like(hx, memory_format=torch.contiguous_format),
        None if cx is None else torch.empty_like(cx, memory_format=torch.contiguous_format),
        [torch.empty_like(item) for item in weight] if mask[3] else [],  # undefined tensors are invalid list items
    )


CUDA_RULES: dict[str, Callable[..., Any]] = {
    "aten::_cudnn_rnn": recurrent,
    "aten::_cudnn_rnn_backward": recurrent_backward,
    "aten::_use_cudnn_ctc_loss": uses_cudnn_for_ctc,
    "aten::_use_cudnn_ctc_loss.Tensor": uses_cudnn_for_ctc,
    "aten::_use_miopen_ctc_loss": never,
    "aten::_use_miopen_ctc_loss.Tensor": never,
    "aten::log_sigmoid_forward": log_sigmoid_forward,
}
