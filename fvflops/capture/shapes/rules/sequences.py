"""Shape rules for packing and padding sequences of known lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fvflops.capture.shapes.shape_tensor import DataDependentError


def pack_padded_sequence(
    input: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the packed elements [sum of lengths, *], and the batch size at each step, a real tensor with values."""
    _require_known(lengths, "aten::_pack_padded_sequence", "sequence lengths")
    one_feature = torch.empty(*input.shape[:2], 1)  # a real tensor, so that torch checks the lengths
    _, batch_sizes = torch.ops.aten._pack_padded_sequence(one_feature, lengths, batch_first)
    return input.new_empty((int(lengths.sum()), *input.shape[2:])), batch_sizes


def pad_packed_sequence(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding_value: Any, total_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the padded elements [steps, batch, *] or [batch, steps, *], and the lengths, a real tensor."""
    _require_known(batch_sizes, "aten::_pad_packed_sequence", "batch sizes")
    one_feature = torch.empty(data.shape[0], 1)
    padded, lengths = torch.ops.aten._pad_packed_sequence(one_feature, batch_sizes, batch_first, 0.0, total_length)
    steps, batch = (padded.shape[1], padded.shape[0]) if batch_first else padded.shape[:2]
    output = data.new_empty((steps, batch, *data.shape[1:]))
    return (output.transpose(0, 1) if batch_first else output), lengths


def pack_padded_sequence_backward(
    grad: torch.Tensor, input_size: Sequence[int], batch_sizes: torch.Tensor, batch_first: bool
) -> torch.Tensor:
    """Return the gradient of the padded input, [steps, batch, *] or [batch, steps, *]."""
    output = grad.new_empty(tuple(input_size) if not batch_first else (input_size[1], input_size[0], *input_size[2:]))
    return output.transpose(0, 1) if batch_first else output


def is_left_aligned(t: torch.Tensor, mask: torch.Tensor) -> bool:
    """Return whether the true elements of each row of the mask come first."""
    _require_known(mask, "aten::_nested_tensor_from_mask_left_aligned", "the mask's values")
    return bool(torch.ops.aten._nested_tensor_from_mask_left_aligned(torch.empty(*mask.shape, 1), mask))


def _require_known(tensor: torch.Tensor, name: str, what: str) -> None:
    if tensor.device.type == "meta":
        raise DataDependentError.of_op(name, what)


RULES: dict[str, Callable[..., Any]] = {
    "aten::_nested_tensor_from_mask_left_aligned": is_left_aligned,
    "aten::_pack_padded_sequence": pack_padded_sequence,
    "aten::_pack_padded_sequence_backward": pack_padded_sequence_backward,
    "aten::_pad_packed_sequence": pad_packed_sequence,
}
