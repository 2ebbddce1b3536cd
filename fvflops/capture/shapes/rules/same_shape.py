"""Shape rules that torch lacks, of ops whose results mostly have the shapes of arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fvflops.capture.shapes.layouts.elementwise import is_dense
from fvflops.capture.shapes.layouts.gradients import contiguous_like
from fvflops.capture.shapes.shape_tensor import DataDependentError


def like_argument(positions: tuple[int, ...], *args: Any, **_: Any) -> Any:
    """Return an empty tensor like the argument at each of these positions."""
    results = tuple(torch.empty_like(args[position]) for position in positions)
    return results[0] if len(results) == 1 else results


def preserve_strides(rule: Callable[..., Any], self: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """Return torch's result with the strides of a dense argument; torch's rule changes those of size-1 dimensions."""
    result = rule(self, *rest, **options)
    preserves = options.get("memory_format") in (None, torch.preserve_format)
    if preserves and result.layout is self.layout is torch.strided and is_dense(self):
        return torch.empty_strided(self.shape, self.stride(), dtype=result.dtype, device=result.device)
    return result


def alias(self: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the argument's storage, as a wrapper subclass around it has."""
    return self.view_as(self)


def embedding(weight: torch.Tensor, indices: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """Return torch's result; the meta kernels of torch 2.8 to 2.12 take indices of any type."""
    if indices.dtype not in (torch.int64, torch.int32):
        raise RuntimeError(
            "Expected tensor for argument #1 'indices' to have one of the following scalar types: Long, Int; "
            f"but got {indices.dtype} instead"
        )
    return torch.ops.aten.embedding.default(weight, indices, *rest, **options)


def return_nothing(*_: Any, **__: Any) -> None:
    """Return None, as optimizer ops that write to their arguments do."""


def aminmax(self: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest element."""
    return self.new_empty(()), self.new_empty(())


def aminmax_dim(self: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and largest elements along a dimension."""
    values = torch.amin(self, dim, keepdim)
    return values, torch.empty_like(values)


def compute_linear_combination(input: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of the slices for each row of coefficients."""
    return input.new_empty(len(coefficients), *input.shape[1:])


def fake_quantize(self: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the fake-quantized tensor and the mask of values in range."""
    return torch.empty_like(self), torch.empty_like(self, dtype=torch.bool)


def transform_bias_rescale_qkv(
    qkv: torch.Tensor, qkv_bias: torch.Tensor, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values [batch, heads, tokens, head_dim], split from one tensor."""
    batch, length, width = qkv.shape
    query, key, value = qkv.new_empty(3, batch, num_heads, length, width // 3 // num_heads).unbind(0)
    return query, key, value


def padded_dense_to_jagged(
    dense: torch.Tensor, offsets: list[torch.Tensor], total_L: int | None = None
) -> torch.Tensor:
    """Return the rows of sequences without padding; raise DataDependentError unless `total_L` is their number."""
    if total_L is None:
        raise DataDependentError.of_op("aten::_padded_dense_to_jagged_forward")
    return dense.new_empty(total_L, *dense.shape[1 + len(offsets) :])


RULES: dict[str, Callable[..., Any]] = {
    "aten::_weight_norm_interface_backward": partial(like_argument, (1, 2)),  # torch 2.9 and older have none
    "aten::_add_relu.Scalar": partial(like_argument, (0,)),
    "_c10d_functional::_wrap_tensor_autograd": alias,
    "aten::_aminmax": aminmax,
    "aten::_aminmax.dim": aminmax_dim,
    "aten::_compute_linear_combination": compute_linear_combination,
    "aten::_dirichlet_grad": partial(like_argument, (0,)),
    "aten::_fake_quantize_learnable_per_channel_affine": partial(like_argument, (0,)),
    "aten::_fake_quantize_learnable_per_channel_affine_backward": partial(like_argument, (1, 2, 3)),
    "aten::_fake_quantize_learnable_per_tensor_affine": partial(like_argument, (0,)),
    "aten::_fake_quantize_learnable_per_tensor_affine_backward": partial(like_argument, (1, 2, 3)),
    "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": fake_quantize,
    "aten::_fused_adagrad_": return_nothing,
    "aten::_fused_adagrad_.tensor_lr": return_nothing,
    "aten::_fused_adam_.tensor_lr": return_nothing,
    "aten::_fused_adamw_.tensor_lr": return_nothing,
    "aten::_fused_sgd_": return_nothing,
    "aten::_fused_sgd_.tensor_lr": return_nothing,
    "aten::_logcumsumexp": partial(like_argument, (0,)),
    "aten::_masked_softmax": partial(like_argument, (0,)),
    "aten::_masked_softmax_backward": partial(like_argument, (0,)),
    "aten::_padded_dense_to_jagged_forward": padded_dense_to_jagged,
    "aten::_sample_dirichlet": partial(contiguous_like, 0),
    "aten::_standard_gamma_grad": partial(like_argument, (0,)),
    "aten::_transform_bias_rescale_qkv": transform_bias_rescale_qkv,
    "aten::binomial": partial(contiguous_like, 0),
    "aten::embedding": embedding,
    "aten::empty_like": partial(preserve_strides, torch.ops.aten.empty_like.default),
    "aten::fake_quantize_per_channel_affine_cachemask": fake_quantize,
    "aten::fake_quantize_per_tensor_affine_cachemask": fake_quantize,
    "aten::fractional_max_pool3d_backward": partial(contiguous_like, 1),
    "aten::full_like": partial(preserve_strides, torch.ops.aten.full_like.default),
    "aten::glu_backward_jvp": partial(like_argument, (2,)),
    "aten::glu_jvp": partial(like_argument, (0,)),
    "aten::log_sigmoid_backward": partial(like_argument, (0,)),
    "aten::multi_margin_loss_backward": partial(contiguous_like, 1),
    "aten::multilabel_margin_loss_backward": partial(contiguous_like, 1),
    "aten::ones_like": partial(preserve_strides, torch.ops.aten.ones_like.default),
    "aten::rand_like": partial(preserve_strides, torch.ops.aten.rand_like.default),
    "aten::randint_like": partial(preserve_strides, torch.ops.aten.randint_like.default),
    "aten::randint_like.low_dtype": partial(preserve_strides, torch.ops.aten.randint_like.low_dtype),
    "aten::randn_like": partial(preserve_strides, torch.ops.aten.randn_like.default),
    "aten::zeros_like": partial(preserve_strides, torch.ops.aten.zeros_like.default),
}
