"""Shape rules for CUDA, where results differ from those of torch's rules or of the CPU."""

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
    """Return False; raise DataDependentError where cuDNN is used for some sequence lengths."""
    cudnn_supported = (
        blank == 0 and targets.ndim == 1 and log_probs.dtype is torch.float32 and targets.dtype is torch.int32
    )
    if cudnn_supported and torch.backends.cudnn.enabled:
        raise DataDependentError.of_op("aten::_use_cudnn_ctc_loss", "sequence lengths")
    return False


def return_false(*_: Any, **__: Any) -> bool:
    """Return False."""
    return False


def cudnn_rnn(
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_stride0: int,
    weight_buf: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    """Return outputs, last hidden and cell states, reserve (only cuDNN knows its size) and the weight buffer.

    Without `weight_buf` a buffer is allocated for all weights, with space for biases even if there are none.
    """
    *results, _ = torch.ops.aten._cudnn_rnn(input, weight, weight_stride0, weight_buf, *rest)
    if weight_buf is None:
        gates = weight[0].shape[0]
        bias_elements = 0 if weight_stride0 > 3 else 2 * gates * (len(weight) // weight_stride0)
        weight_buf = weight[0].new_empty(sum(item.numel() for item in weight) + bias_elements)
    return (*results, weight_buf)


def cudnn_rnn_backward(
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    weight_stride0: int,
    weight_buf: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, list[torch.Tensor]]:
    """Return the gradients of input, hidden and cell states, even if not requested, and of the weights if requested."""
    batch_first, is_packed, output_mask = rest[8], bool(rest[12]), rest[-1]
    time_major = batch_first and not is_packed
    grad = torch.empty_like(input.transpose(0, 1) if time_major else input, memory_format=torch.contiguous_format)
    return (
        grad.transpose(0, 1) if time_major else grad,
        torch.empty_like(hx, memory_format=torch.contiguous_format),
        None if cx is None else torch.empty_like(cx, memory_format=torch.contiguous_format),
        [torch.empty_like(item) for item in weight]
        if output_mask[3]
        else [],  # undefined tensors are invalid list items
    )


CUDA_RULES: dict[str, Callable[..., Any]] = {
    "aten::_cudnn_rnn": cudnn_rnn,
    "aten::_cudnn_rnn_backward": cudnn_rnn_backward,
    "aten::_use_cudnn_ctc_loss": uses_cudnn_for_ctc,
    "aten::_use_cudnn_ctc_loss.Tensor": uses_cudnn_for_ctc,
    "aten::_use_miopen_ctc_loss": return_false,
    "aten::_use_miopen_ctc_loss.Tensor": return_false,
    "aten::log_sigmoid_forward": log_sigmoid_forward,
}
