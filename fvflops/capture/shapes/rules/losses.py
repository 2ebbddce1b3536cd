"""Shape rules of CTC loss and of per-pixel negative log likelihood."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fvflops.capture.shapes.shape_tensor import DataDependentError

_Lengths = torch.Tensor | Sequence[int]


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: _Lengths,
    target_lengths: _Lengths,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Return the loss, one per sequence if `reduction` is 0."""
    return log_probs.new_empty(log_probs.shape[1:2] if reduction == 0 and log_probs.ndim == 3 else ())


def ctc_loss_forward(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: _Lengths, target_lengths: _Lengths, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each sequence and the forward variables [batch, time, 2 * longest target + 1].

    Raises DataDependentError if the target lengths are unknown.
    """
    if isinstance(target_lengths, torch.Tensor):
        if target_lengths.device.type == "meta":
            raise DataDependentError.of_op("aten::_ctc_loss.Tensor")
        target_lengths = target_lengths.tolist()
    steps, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * max(target_lengths, default=0) + 1)


def ctc_loss_backward(grad: torch.Tensor, log_probs: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return the gradient of the log probabilities."""
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def cudnn_ctc_loss(log_probs: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each sequence and the gradient of the log probabilities."""
    return log_probs.new_empty(log_probs.shape[1]), torch.empty_like(log_probs)


def nll_loss2d_forward(
    self: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss per pixel if `reduction` is 0, else their mean or sum, and the total weight."""
    return self.new_empty(target.shape if reduction == 0 else ()), self.new_empty(())


RULES: dict[str, Callable[..., Any]] = {
    "aten::_ctc_loss": ctc_loss_forward,
    "aten::_ctc_loss.Tensor": ctc_loss_forward,
    "aten::_ctc_loss_backward": ctc_loss_backward,
    "aten::_ctc_loss_backward.Tensor": ctc_loss_backward,
    "aten::_cudnn_ctc_loss": cudnn_ctc_loss,
    "aten::_cudnn_ctc_loss.Tensor": cudnn_ctc_loss,
    "aten::ctc_loss.IntList": ctc_loss,
    "aten::ctc_loss.Tensor": ctc_loss,
    "aten::nll_loss2d_forward": nll_loss2d_forward,
}
