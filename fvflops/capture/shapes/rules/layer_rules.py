"""Shape rules of recurrent layers, embedding bags, flex attention and losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fvflops.capture.shapes.rules.memory_formats import contiguous_like
from fvflops.capture.shapes.shape_tensor import DataDependentError

_Tensors = Sequence[Tensor]
_Lengths = Tensor | Sequence[int]
_SUM, _MEAN, _MAX = range(3)  # of embedding bags
_RECURRENT = ("gru", "lstm", "rnn_relu", "rnn_tanh")
_FAST_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def recurrent_layer(input: Tensor, hx: Any, params: _Tensors, has_biases: bool, layers: int, *options: Any) -> Any:
    """Return the outputs, time-major in memory, and the last states; torch's own rules run every time step."""
    bidirectional, batch_first = options[2:]
    hidden, *cell = [hx] if isinstance(hx, Tensor) else hx
    steps, batch = input.shape[1::-1] if batch_first else input.shape[:2]
    directions = _directions(hidden, layers, batch, bidirectional)
    output = input.new_empty(steps, batch, directions * hidden.shape[2])
    return output.transpose(0, 1) if batch_first else output, *(contiguous_like(0, state) for state in (hidden, *cell))


def packed_recurrent_layer(
    data: Tensor, batch_sizes: Tensor, hx: Any, params: _Tensors, has_biases: bool, layers: int, *rest: Any
) -> tuple[Tensor, ...]:
    """Return the outputs [elements, directions * hidden] of packed sequences, and the last states."""
    hidden, *cell = [hx] if isinstance(hx, Tensor) else hx
    directions = _directions(hidden, layers, hidden.shape[1], rest[2])
    output = data.new_empty(len(data), directions * hidden.shape[2])
    return output, *(contiguous_like(0, state) for state in (hidden, *cell))


def _directions(hidden: Tensor, layers: int, batch: int, bidirectional: bool) -> int:
    directions = 1 + bidirectional
    if tuple(hidden.shape[:2]) != (layers * directions, batch):
        raise ValueError(f"Expected hidden size ({layers * directions}, {batch}, ...), got {list(hidden.shape)}")
    return directions


def fused_gru_cell(input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return the new state and the workspace for backward: five values per state element."""
    return torch.empty_like(hx), input_gates.new_empty(len(hx), 5 * hx.shape[1])


def fused_gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    """Return the gradients of input gates, hidden gates, state and both biases."""
    batch, hidden = grad_hy.shape
    gates = [workspace.new_empty(batch, 3 * hidden) for _ in range(2)]
    biases = [workspace.new_empty(3 * hidden) if has_bias else None for _ in range(2)]
    return *gates, torch.empty_like(grad_hy), *biases


def cudnn_rnn(input: Tensor, weight: _Tensors, weight_stride0: int, weight_buf: Any, *rest: Any) -> Any:
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
    is_on_cuda: bool, input: Tensor, weight: _Tensors, weight_stride0: int, *args: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None, _Tensors]:
    """Return the gradients of input, hidden states, cell states and weights, where requested.

    The kernel returns the former three even if they are not requested, time-major in memory.
    """
    (_, hx, cx), batch_first, batch_sizes, output_mask = args[:3], args[11], args[15], args[-1]
    time_major = is_on_cuda and batch_first and not batch_sizes
    grad = contiguous_like(0, input.transpose(0, 1) if time_major else input)
    requested = [True] * 3 if is_on_cuda else output_mask
    return (
        (grad.transpose(0, 1) if time_major else grad) if requested[0] else None,
        contiguous_like(0, hx) if requested[1] else None,
        contiguous_like(0, cx) if requested[2] and cx is not None else None,
        # Undefined tensors are invalid list items.
        [torch.empty_like(item) for item in weight] if output_mask[3] else [],
    )


def embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    *rest: Any,
    forward_only: bool = False,
) -> tuple[Tensor, ...]:
    """Return the bags [bags, embedding_dim], the bag of each index, the bag sizes and the indices of the maxima.

    The kernels' fast path (sum, single or half precision, contiguous rows) does not compute the bag of each index.
    """
    defaults: tuple[Any, ...] = (False, None, False, -1)
    _, per_sample_weights, include_last_offset, padding_idx = (*rest, *defaults[len(rest) :])
    if indices.dtype not in (torch.int64, torch.int32):  # with torch's message
        raise RuntimeError(f"expected indices to be long or int, got {indices.dtype}")
    bags = len(offsets) - include_last_offset
    width = weight.shape[1]
    uses_fast_path = (
        mode == _SUM
        and weight.dtype in _FAST_DTYPES
        and weight.stride(1) == 1
        and (per_sample_weights is None or per_sample_weights.stride(0) == 1)
        and padding_idx < 0
    )
    sizes = len(offsets) if forward_only and mode == _SUM else bags
    return (
        weight.new_empty(bags, width),
        indices.new_empty(0) if uses_fast_path else indices.new_empty(len(indices) + 1).resize_(len(indices)),
        indices.new_empty(len(offsets)).resize_(sizes),
        indices.new_empty((bags, width) if mode == _MAX else sizes),
    )


def embedding_bag_forward_only(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    return embedding_bag(*args, **kwargs, forward_only=True)


def embedding_bag_padding_idx(weight: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the results without gradients; a negative padding index counts from the end."""
    *rest, padding_idx = args
    return embedding_bag_forward_only(weight, *rest, -1 if padding_idx is None else padding_idx % len(weight))


def flex_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    """Return the output [batch, heads, queries, value_dim], its log-sum-exp and its maximum scores.

    As in the dense implementation, the output has the query's layout, and the statistics are float32 or float64.
    """
    shape = (*query.shape[:3], value.shape[3])
    statistics_dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    statistics = [query.new_empty(query.shape[:3], dtype=statistics_dtype) for _ in range(2)]
    return dense_strided(query, shape, query.stride(), last_innermost=True), *statistics


def flex_attention_backward(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, tuple[Any, ...]]:
    """Return the gradients of query, key and value, and placeholders for the score function's captured buffers."""
    batch = query.shape[0]
    captured = rest[9] if len(rest) > 9 else ()
    return (
        dense_strided(query, query.shape, query.stride(), last_innermost=True),
        dense_strided(key, (batch, *key.shape[1:]), key.stride(), last_innermost=True),
        dense_strided(value, (batch, *value.shape[1:]), value.stride(), last_innermost=True),
        tuple(torch.empty_like(item) if isinstance(item, Tensor) else item for item in captured),
    )


def dense_strided(
    like: Tensor, shape: Sequence[int], stride_order: Sequence[int], *, last_innermost: bool = False
) -> Tensor:
    """Return a dense tensor with dimensions in memory by `stride_order`, the last innermost if `last_innermost`."""
    inner_first = sorted(range(len(shape)), key=lambda dim: stride_order[dim])
    if last_innermost and inner_first[0] != len(shape) - 1:
        inner_first.remove(len(shape) - 1)
        inner_first.insert(0, len(shape) - 1)
    strides, step = [0] * len(shape), 1
    for dim in inner_first:
        strides[dim] = step
        step *= shape[dim]
    return like.new_empty_strided(tuple(shape), tuple(strides))


def ctc_loss(log_probs: Tensor, *rest: Any) -> Tensor:
    """Return the loss, one per sequence if the reduction is 0."""
    reduction = rest[4] if len(rest) > 4 else 1
    return log_probs.new_empty(log_probs.shape[1:2] if reduction == 0 and log_probs.ndim == 3 else ())


def ctc_loss_forward(
    log_probs: Tensor, targets: Tensor, input_lengths: _Lengths, target_lengths: _Lengths, *_: Any
) -> tuple[Tensor, Tensor]:
    """Return the loss of each sequence and the forward variables [batch, time, 2 * longest target + 1].

    Raises DataDependentError if the target lengths are unknown.
    """
    if isinstance(target_lengths, Tensor):
        if target_lengths.device.type == "meta":
            raise DataDependentError.of_op("aten::_ctc_loss.Tensor")
        target_lengths = target_lengths.tolist()
    steps, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * max(target_lengths, default=0) + 1)


def uses_cudnn_for_ctc(log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int) -> bool:
    """Return False; raise DataDependentError where cuDNN is used for some sequence lengths."""
    dtypes = log_probs.dtype, targets.dtype
    cudnn_supported = blank == 0 and targets.ndim == 1 and dtypes == (torch.float32, torch.int32)
    if cudnn_supported and torch.backends.cudnn.enabled:
        raise DataDependentError.of_op("aten::_use_cudnn_ctc_loss", "sequence lengths")
    return False


def nll_loss2d_forward(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return the loss per pixel if `reduction` is 0, else their mean or sum, and the total weight."""
    return self.new_empty(target.shape if reduction == 0 else ()), self.new_empty(())


def _with_tensor_lengths(rules: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return rules of CTC loss, and the same for overloads whose lengths are tensors."""
    return {**rules, **{f"{name.partition('.')[0]}.Tensor": rule for name, rule in rules.items()}}


RULES: dict[str, Callable[..., Any]] = {
    **{f"aten::{kind}.input": recurrent_layer for kind in _RECURRENT},
    **{f"aten::{kind}.data": packed_recurrent_layer for kind in _RECURRENT},
    **_with_tensor_lengths(
        {
            "aten::_ctc_loss": ctc_loss_forward,
            "aten::_ctc_loss_backward": partial(contiguous_like, 1),
            # The loss of each sequence and the gradient of the log probabilities.
            "aten::_cudnn_ctc_loss": lambda probs, *_: (probs.new_empty(probs.shape[1]), torch.empty_like(probs)),
            "aten::ctc_loss.IntList": ctc_loss,
        }
    ),
    "aten::_cudnn_rnn_backward": partial(cudnn_rnn_backward, False),
    "aten::_thnn_fused_gru_cell": fused_gru_cell,
    "aten::_thnn_fused_gru_cell_backward": fused_gru_cell_backward,
    "aten::nll_loss2d_forward": nll_loss2d_forward,
    "higher_order::flex_attention": flex_attention,
    "higher_order::flex_attention_backward": flex_attention_backward,
}

# Embedding bags on the CPU save other tensors for backward than on CUDA.
CPU_RULES: dict[str, Callable[..., Any]] = {
    "aten::_embedding_bag": embedding_bag,
    "aten::_embedding_bag_forward_only": embedding_bag_forward_only,
    "aten::embedding_bag": embedding_bag_forward_only,
    "aten::embedding_bag.padding_idx": embedding_bag_padding_idx,
}

CUDA_RULES: dict[str, Callable[..., Any]] = {
    **_with_tensor_lengths(
        {"aten::_use_cudnn_ctc_loss": uses_cudnn_for_ctc, "aten::_use_miopen_ctc_loss": lambda *_, **__: False}
    ),
    "aten::_cudnn_rnn": cudnn_rnn,
    "aten::_cudnn_rnn_backward": partial(cudnn_rnn_backward, True),
    "aten::log_sigmoid_forward": lambda self: (torch.empty_like(self), self.new_empty(0)),  # an empty buffer
}
