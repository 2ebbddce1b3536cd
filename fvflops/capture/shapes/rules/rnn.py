"""Shape rules of recurrent layers in closed form, where torch's rule runs every time step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_Tensors = Sequence[torch.Tensor]


def run_lstm(
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
    """Return the outputs [time, batch, directions x hidden] and the last states and cells."""
    output, hidden = run_layers(
        input, hx[0], params, has_biases, num_layers, dropout, train, bidirectional, batch_first
    )
    return output, hidden, _contiguous_like(hx[1])


def run_packed_lstm(
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
    """Return the outputs [elements, directions x hidden] of packed sequences and the last states and cells."""
    output, hidden = run_packed_layers(
        data, batch_sizes, hx[0], params, has_biases, num_layers, dropout, train, bidirectional
    )
    return output, hidden, _contiguous_like(hx[1])


def run_layers(
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
    """Return the outputs of a GRU or plain RNN, time-major in memory, and the last states."""
    steps, batch = input.shape[1::-1] if batch_first else input.shape[:2]
    _check_state(hx, num_layers * (1 + bidirectional), batch)
    output = input.new_empty(steps, batch, (1 + bidirectional) * hx.shape[2])
    return output.transpose(0, 1) if batch_first else output, _contiguous_like(hx)


def run_packed_layers(
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
    """Return the outputs of a GRU or plain RNN on packed sequences, and the last states."""
    _check_state(hx, num_layers * (1 + bidirectional), hx.shape[1])
    return data.new_empty(len(data), (1 + bidirectional) * hx.shape[2]), _contiguous_like(hx)


def fuse_gru_cell(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the new state and the workspace for backward: five values per state element."""
    return torch.empty_like(hx), input_gates.new_empty(len(hx), 5 * hx.shape[1])


def fuse_gru_cell_backward(
    grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of both sums of gates, of the state and of both biases."""
    batch, hidden = grad_hy.shape
    gates = [workspace.new_empty(batch, 3 * hidden) for _ in range(2)]
    biases = [workspace.new_empty(3 * hidden) if has_bias else None for _ in range(2)]
    return *gates, torch.empty_like(grad_hy), *biases


def cudnn_backward(
    input: torch.Tensor,
    weight: _Tensors,
    weight_stride0: int,
    weight_buf: torch.Tensor,
    hx: torch.Tensor,
    cx: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, list[torch.Tensor]]:
    """Return the gradients of input, states, cells and weights, where requested."""
    mask = rest[-1]
    return (
        _contiguous_like(input) if mask[0] else None,
        _contiguous_like(hx) if mask[1] else None,
        _contiguous_like(cx) if mask[2] and cx is not None else None,
        [torch.empty_like(item) for item in weight] if mask[3] else [],  # undefined tensors are invalid list items
    )


def _check_state(hx: torch.Tensor, layers: int, batch: int) -> None:
    if tuple(hx.shape[:2]) != (layers, batch):
        raise ValueError(f"Expected hidden size ({layers}, {batch}, ...), got {list(hx.shape)}")


def _contiguous_like(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


RULES: dict[str, Callable[..., Any]] = {
    "aten::_cudnn_rnn_backward": cudnn_backward,
    "aten::_thnn_fused_gru_cell": fuse_gru_cell,
    "aten::_thnn_fused_gru_cell_backward": fuse_gru_cell_backward,
    "aten::gru.data": run_packed_layers,
    "aten::gru.input": run_layers,
    "aten::lstm.data": run_packed_lstm,
    "aten::lstm.input": run_lstm,
    "aten::rnn_relu.data": run_packed_layers,
    "aten::rnn_relu.input": run_layers,
    "aten::rnn_tanh.data": run_packed_layers,
    "aten::rnn_tanh.input": run_layers,
}
