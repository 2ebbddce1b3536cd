"""Shape rules of recurrent layers that do not run every time step, as torch's own rules do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_Tensors = Sequence[torch.Tensor]


def lstm(
    input: torch.Tensor,
    hx: _Tensors,
    params: _Tensors,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the outputs [time, batch, directions * hidden], the last hidden states and the last cell states."""
    output, hidden = rnn(input, hx[0], params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
    return output, hidden, _contiguous_like(hx[1])


def packed_lstm(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    hx: _Tensors,
    params: _Tensors,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the outputs [elements, directions * hidden] of packed sequences and the last hidden and cell states."""
    output, hidden = packed_rnn(data, batch_sizes, hx[0], params, has_biases, num_layers, dropout, train, bidirectional)
    return output, hidden, _contiguous_like(hx[1])


def rnn(
    input: torch.Tensor,
    hx: torch.Tensor,
    params: _Tensors,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of a GRU or Elman RNN, time-major in memory, and the last states."""
    steps, batch = input.shape[1::-1] if batch_first else input.shape[:2]
    _check_state(hx, num_layers * (1 + bidirectional), batch)
    output = input.new_empty(steps, batch, (1 + bidirectional) * hx.shape[2])
    return output.transpose(0, 1) if batch_first else output, _contiguous_like(hx)


def packed_rnn(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    hx: torch.Tensor,
    params: _Tensors,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of a GRU or Elman RNN on packed sequences, and the last states."""
    _check_state(hx, num_layers * (1 + bidirectional), hx.shape[1])
    return data.new_empty(len(data), (1 + bidirectional) * hx.shape[2]), _contiguous_like(hx)


def fused_gru_cell(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the new state and the workspace for backward: five values per state element."""
    return torch.empty_like(hx), input_gates.new_empty(len(hx), 5 * hx.shape[1])


def fused_gru_cell_backward(
    grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of input gates, hidden gates, state and both biases."""
    batch, hidden = grad_hy.shape
    gates = [workspace.new_empty(batch, 3 * hidden) for _ in range(2)]
    biases = [workspace.new_empty(3 * hidden) if has_bias else None for _ in range(2)]
    return *gates, torch.empty_like(grad_hy), *biases


def cudnn_rnn_backward(
    input: torch.Tensor,
    weight: _Tensors,
    weight_stride0: int,
    weight_buf: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, list[torch.Tensor]]:
    """Return the gradients of input, hidden states, cell states and weights, where requested."""
    output_mask = rest[-1]
    return (
        _contiguous_like(input) if output_mask[0] else None,
        _contiguous_like(hx) if output_mask[1] else None,
        _contiguous_like(cx) if output_mask[2] and cx is not None else None,
        [torch.empty_like(item) for item in weight]
        if output_mask[3]
        else [],  # undefined tensors are invalid list items
    )


def _check_state(hx: torch.Tensor, layers: int, batch: int) -> None:
    if tuple(hx.shape[:2]) != (layers, batch):
        raise ValueError(f"Expected hidden size ({layers}, {batch}, ...), got {list(hx.shape)}")


def _contiguous_like(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


RULES: dict[str, Callable[..., Any]] = {
    "aten::_cudnn_rnn_backward": cudnn_rnn_backward,
    "aten::_thnn_fused_gru_cell": fused_gru_cell,
    "aten::_thnn_fused_gru_cell_backward": fused_gru_cell_backward,
    "aten::gru.data": packed_rnn,
    "aten::gru.input": rnn,
    "aten::lstm.data": packed_lstm,
    "aten::lstm.input": lstm,
    "aten::rnn_relu.data": packed_rnn,
    "aten::rnn_relu.input": rnn,
    "aten::rnn_tanh.data": packed_rnn,
    "aten::rnn_tanh.input": rnn,
}
