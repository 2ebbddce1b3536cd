"""Shape rules that torch lacks, for collectives, histograms, fused optimizer steps and others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from fvflops.capture.lazy_values.run_values import is_dense
from fvflops.capture.shapes.rules.memory_formats import contiguous_like, like
from fvflops.capture.shapes.shape_tensor import DataDependentError, UnsupportedError
from fvflops.torch_internals import work_from_future

_Rules = dict[str, Callable[..., Any]]
_WORK = "__torch__.torch.classes.c10d.Work"


def is_work(value: Any) -> bool:
    return type(value) is torch.ScriptObject and value._type().qualified_name() == _WORK


def completed_work(results: Sequence[Tensor]) -> Any:
    """Return a completed work handle whose future has the results, as DDP's reducer expects."""
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(list(results))
    return work_from_future(future).boxed()


def written_and_work(*args: Any) -> tuple[Any, Any]:
    """Return the argument that a collective writes, and its work handle."""
    return args[0], completed_work([])


def preserve_strides(rule: Callable[..., Any], self: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Return torch's result with a dense argument's strides: torch's rule changes the strides of size-1 dimensions."""
    result = rule(self, *rest, **options)
    preserves = options.get("memory_format") in (None, torch.preserve_format)
    if preserves and result.layout is self.layout is torch.strided and is_dense(self.shape, self.stride()):
        return torch.empty_strided(self.shape, self.stride(), dtype=result.dtype, device=result.device)
    return result


def embedding(weight: Tensor, indices: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Return torch's result, but check the index dtype: the meta kernels of torch 2.8 to 2.12 accept any."""
    if indices.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(
            "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; "
            f"but got {indices.dtype} instead"
        )
    return torch.ops.aten.embedding.default(weight, indices, *rest, **options)


def aminmax_dim(self: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    values = torch.amin(self, dim, keepdim)
    return values, torch.empty_like(values)


def fake_quantize(self: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(self), torch.empty_like(self, dtype=torch.bool)


def transform_bias_rescale_qkv(qkv: Tensor, qkv_bias: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [batch, heads, tokens, head_dim], split from one tensor."""
    batch, length, width = qkv.shape
    query, key, value = qkv.new_empty(3, batch, num_heads, length, width // 3 // num_heads).unbind(0)
    return query, key, value


def padded_dense_to_jagged(dense: Tensor, offsets: list[Tensor], total_L: int | None = None) -> Tensor:
    """Return the rows of sequences without padding; raise DataDependentError without their number `total_L`."""
    if total_L is None:
        raise DataDependentError.of_op("aten::_padded_dense_to_jagged_forward")
    return dense.new_empty(total_L, *dense.shape[1 + len(offsets) :])


def reject_quantized(name: str, *_: Any, **__: Any) -> NoReturn:
    """Raise UnsupportedError for quantized tensors; torch's rules would silently return unquantized ones."""
    raise UnsupportedError("shape execution does not support quantized tensors")


# torch 2.10 and older have no meta kernels for these; newer meta kernels draw a random number on each call.
_COLLECTIVES: _Rules = {
    **dict.fromkeys(
        (
            *("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allgather_", "c10d::allreduce_"),
            *("c10d::alltoall_", "c10d::broadcast_", "c10d::reduce_scatter_", "c10d::scatter_"),
        ),
        written_and_work,
    ),
    **dict.fromkeys(
        (
            *("c10d::alltoall_base_", "c10d::barrier", "c10d::gather_", "c10d::recv_", "c10d::recv_any_source_"),
            *("c10d::reduce_", "c10d::send"),
        ),
        lambda *_: completed_work([]),
    ),
}

_QUANTIZED: _Rules = {
    name: partial(reject_quantized, name)
    for name in (
        *("aten::dequantize.self", "aten::dequantize.tensors", "aten::quantize_per_channel"),
        *("aten::quantize_per_tensor", "aten::quantize_per_tensor.tensor_qparams"),
        *("aten::quantize_per_tensor.tensors", "aten::quantize_per_tensor_dynamic"),
    )
}

_HISTOGRAMS: _Rules = {  # for a number of bins or for their edges; histogram returns the edges too
    "aten::_histogramdd_bin_edges": lambda self, bins, **_: [self.new_empty(number + 1) for number in bins],
    "aten::_histogramdd_from_bin_cts": lambda self, bins, **_: self.new_empty(list(bins)),
    "aten::_histogramdd_from_bin_tensors": lambda self, bins, **_: self.new_empty([len(item) - 1 for item in bins]),
    "aten::histogram.bin_ct": lambda self, bins=100, **_: (self.new_empty(bins), self.new_empty(bins + 1)),
    "aten::histogram.bins_tensor": lambda self, bins, **_: (self.new_empty(bins.numel() - 1), torch.empty_like(bins)),
}

# Op → positions of the arguments whose shape, strides and dtype the results have.
_LIKE: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(
        (
            *("_add_relu.Scalar", "_dirichlet_grad", "_logcumsumexp", "_masked_softmax", "_masked_softmax_backward"),
            *("_fake_quantize_learnable_per_channel_affine", "_fake_quantize_learnable_per_tensor_affine"),
            *("_standard_gamma_grad", "glu_jvp", "log_sigmoid_backward"),
        ),
        (0,),
    ),
    **{f"_fake_quantize_learnable_per_{part}_affine_backward": (1, 2, 3) for part in ("channel", "tensor")},
    "_weight_norm_interface_backward": (1, 2),  # torch 2.9 and older have none
    "glu_backward_jvp": (2,),
}
_CONTIGUOUS_LIKE = {
    "_sample_dirichlet": 0,
    "binomial": 0,
    "fractional_max_pool3d_backward": 1,
    "multi_margin_loss_backward": 1,
    "multilabel_margin_loss_backward": 1,
}
_CREATED_LIKE = "empty_like full_like ones_like rand_like randint_like randn_like zeros_like"
_FUSED_STEPS = (
    *("_fused_adagrad_", "_fused_adagrad_.tensor_lr", "_fused_adam_.tensor_lr", "_fused_adamw_.tensor_lr"),
    *("_fused_sgd_", "_fused_sgd_.tensor_lr"),
)

RULES: _Rules = {
    **_COLLECTIVES,
    **_QUANTIZED,
    **_HISTOGRAMS,
    **{f"aten::{name}": partial(like, positions) for name, positions in _LIKE.items()},
    **{f"aten::{name}": partial(contiguous_like, position) for name, position in _CONTIGUOUS_LIKE.items()},
    **{
        f"aten::{name}": partial(preserve_strides, getattr(torch.ops.aten, name).default)
        for name in _CREATED_LIKE.split()
    },
    **{f"aten::{name}": lambda *_, **__: None for name in _FUSED_STEPS},  # in-place, without a result
    "_c10d_functional::_wrap_tensor_autograd": lambda self: self.view_as(self),  # a new tensor, like torch's wrapper
    "aten::_aminmax": lambda self: (self.new_empty(()), self.new_empty(())),
    "aten::_aminmax.dim": aminmax_dim,
    "aten::_compute_linear_combination": lambda self, weights: self.new_empty(len(weights), *self.shape[1:]),
    "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": fake_quantize,
    "aten::_padded_dense_to_jagged_forward": padded_dense_to_jagged,
    "aten::_transform_bias_rescale_qkv": transform_bias_rescale_qkv,
    "aten::embedding": embedding,
    "aten::fake_quantize_per_channel_affine_cachemask": fake_quantize,
    "aten::fake_quantize_per_tensor_affine_cachemask": fake_quantize,
    "aten::randint_like.low_dtype": partial(preserve_strides, torch.ops.aten.randint_like.low_dtype),
}
