"""Fast shape rules for common ops; torch's own rules are in Python and take about a millisecond per call.

A shape rule is a function from an op's arguments to a result without values. A fast rule handles the common case,
contiguous tensors of one floating-point dtype. Otherwise it returns NotImplemented, and torch's rule is called, whose
first call may spend seconds on imports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fvflops.capture.shapes.rules.elementwise import SCALAR, elementwise_result
from fvflops.capture.shapes.rules.memory_formats import suggested_format
from fvflops.torch_internals import is_flash_enabled, is_math_enabled, is_torch

_FLOATS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_META = torch.device("meta")
_SHARES_HEADS = is_torch("2.9")  # the fused kernel of a CPU


def _contiguous_same_float_dtype(*tensors: Tensor | None) -> bool:
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    return len(dtypes) == 1 and dtypes <= _FLOATS and all(item is None or item.is_contiguous() for item in tensors)


def _contiguous_format_same_float_dtype(*tensors: Tensor | None) -> bool:
    """Return whether additionally `suggest_memory_format` is contiguous for all tensors.

    It can be channels_last for contiguous tensors with sizes of 1.
    """
    return _contiguous_same_float_dtype(*tensors) and all(
        item is None or suggested_format(item) is torch.contiguous_format for item in tensors
    )


def _new(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device=_META)


def unary(self: Tensor, *rest: Any, **options: Any) -> Any:
    """Return a tensor like `self`, with the strides of elementwise kernels."""
    return elementwise_result([self], self.dtype) if self.dtype in _FLOATS else NotImplemented


def like_self(self: Tensor, *rest: Any, **options: Any) -> Any:
    return torch.empty_like(self) if self.dtype in _FLOATS else NotImplemented


def softmax(self: Tensor, dim: int, half_to_float: bool) -> Any:
    return _new(self.shape, self) if _contiguous_same_float_dtype(self) and not half_to_float else NotImplemented


def softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Any:
    supported = _contiguous_same_float_dtype(grad_output, output) and input_dtype is grad_output.dtype
    return _new(grad_output.shape, grad_output) if supported else NotImplemented


def binary(self: Tensor, other: Any, *rest: Any, **options: Any) -> Any:
    """Return the result of a binary op with broadcasting."""
    if not isinstance(self, Tensor):  # torch.add(0.5, x)
        return NotImplemented
    if isinstance(other, Tensor):
        if self.dtype is not other.dtype or self.dtype not in _FLOATS or not self.dim() or not other.dim():
            return NotImplemented
        return elementwise_result([self, other], self.dtype)
    if self.dtype not in _FLOATS or not isinstance(other, (bool, int, float)):
        return NotImplemented
    return elementwise_result([self, SCALAR], self.dtype)


def in_place(self: Tensor, *rest: Any, **options: Any) -> Any:
    """Return the first tensor, which the op writes to."""
    supported = _contiguous_same_float_dtype(self) and not any(isinstance(value, Tensor) for value in rest)
    return self if supported else NotImplemented


def _require_one_dtype(first: Tensor, second: Tensor) -> None:
    """Raise RuntimeError for operands of a product whose dtypes differ: kernels do, and shape rules of torch do not."""
    if first.dtype is not second.dtype:
        raise RuntimeError(
            f"the operands of a product must have the same dtype, but got {first.dtype} and {second.dtype}"
        )


def product(first: Tensor, second: Tensor, *rest: Any) -> Any:
    """Leave the result to another rule after checking the operands of a product."""
    _require_one_dtype(first, second)
    return NotImplemented


def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> Any:
    """Return the result [rows, columns]."""
    _require_one_dtype(mat1, mat2)
    same_dtype = self.dtype == mat1.dtype == mat2.dtype
    if not same_dtype or mat1.dim() != 2 or mat2.dim() != 2 or mat1.shape[1] != mat2.shape[0]:
        return NotImplemented
    shape = (mat1.shape[0], mat2.shape[1])
    return _new(shape, mat1) if self.shape in (shape, shape[1:]) else NotImplemented


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Return the result [*, out_features]."""
    _require_one_dtype(input, weight)
    shapes_match = weight.dim() == 2 and input.dim() and input.shape[-1] == weight.shape[1]
    bias_matches = bias is None or bias.shape == weight.shape[:1]
    supported = shapes_match and bias_matches and _contiguous_same_float_dtype(input, weight, bias)
    return _new((*input.shape[:-1], weight.shape[0]), input) if supported else NotImplemented


def convolution(input: Tensor, weight: Tensor, bias: Tensor | None, *parameters: Any) -> Any:
    """Return the result [batch, channels, *spatial]."""
    _require_one_dtype(input, weight)
    stride, padding, dilation, transposed, _, groups = parameters
    spatial_rank = len(stride)
    supported = (
        spatial_rank == len(padding) == len(dilation) == input.dim() - 2 == weight.dim() - 2
        and not transposed
        and input.shape[1] == weight.shape[1] * groups
        and weight.shape[0] % groups == 0
        and min(stride, default=0) > 0
        and (bias is None or tuple(bias.shape) == (weight.shape[0],))
    )
    supported = supported and _contiguous_format_same_float_dtype(input, weight, bias)
    if not (supported and _row_major(input, weight)) or 0 in input.shape:
        return NotImplemented
    axes = zip(input.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    sizes = [(size + 2 * pad - gap * (kernel - 1) - 1) // step + 1 for size, kernel, step, pad, gap in axes]
    return _new((input.shape[0], weight.shape[0], *sizes), input) if min(sizes) > 0 else NotImplemented


def _row_major(*tensors: Tensor) -> bool:
    """Return whether strides are row-major even for sizes of 1, which excludes channels_last."""
    for tensor in tensors:
        step = 1
        for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
            if stride != step:
                return False
            step *= size
    return True


def batch_norm(
    input: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, *rest: Any
) -> Any:
    supported = _contiguous_format_same_float_dtype(input) if training else _contiguous_same_float_dtype(input)
    supported = supported and input.dim() > 1 and _per_channel(input, weight, bias, running_mean, running_var)
    return _new(input.shape, input) if supported else NotImplemented


def _per_channel(input: Tensor, *parameters: Tensor | None) -> bool:
    """Return whether parameters have an element for each channel; torch raises for others."""
    return all(item is None or item.shape == input.shape[1:2] for item in parameters)


def native_batch_norm(training: bool | None, input: Tensor, weight: Any, bias: Any, *rest: Any) -> Any:
    """Return a tensor like the input, and in training two statistics per channel; `training` may be an op argument."""
    parameters = [item for item in (weight, bias) if item is not None]
    is_contiguous = _contiguous_format_same_float_dtype(input, *parameters)
    supported = input.dtype is torch.float32 and input.dim() > 1 and _per_channel(input, weight, bias)
    # The statistics saved in evaluation depend on the device.
    if not (is_contiguous and supported and (rest[2] if training is None else training)):
        return NotImplemented
    size = input.shape[1]
    return _new(input.shape, input), _new((size,), input), _new((size,), input)


def _gradients(input: Tensor, shape: Sequence[int], output_mask: Sequence[bool]) -> Any:
    pairs = zip((input.shape, shape, shape), output_mask, strict=True)
    return tuple(_new(shape, input) if requested else None for shape, requested in pairs)


def batch_norm_backward(grad_out: Tensor, input: Tensor, weight: Tensor | None, *rest: Any) -> Any:
    if not _contiguous_same_float_dtype(grad_out, input, weight) or input.dtype is not torch.float32 or input.dim() < 2:
        return NotImplemented
    return _gradients(input, input.shape[1:2], rest[-1])


def layer_norm(input: Tensor, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, *rest: Any) -> Any:
    shapes_match = tuple(input.shape[input.dim() - len(normalized_shape) :]) == tuple(normalized_shape)
    supported = shapes_match and _contiguous_same_float_dtype(input, weight, bias)
    return _new(input.shape, input) if supported else NotImplemented


def native_layer_norm(input: Tensor, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    """Return a tensor like the input, and two statistics per normalised group."""
    output = layer_norm(input, normalized_shape, weight, bias)
    if output is NotImplemented or input.dtype is not torch.float32:
        return NotImplemented
    batch_rank = input.dim() - len(normalized_shape)
    statistics_shape = (*input.shape[:batch_rank], *([1] * len(normalized_shape)))
    return output, _new(statistics_shape, input), _new(statistics_shape, input)


def layer_norm_backward(grad_out: Tensor, input: Tensor, shape: Sequence[int], *rest: Any) -> Any:
    _, _, weight, bias, output_mask = rest
    if not _contiguous_same_float_dtype(grad_out, input, weight, bias) or input.dtype is not torch.float32:
        return NotImplemented
    return _gradients(input, shape, output_mask)


def reduce(self: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Return the tensor without the reduced dimensions."""
    if not _contiguous_same_float_dtype(self) or dtype is not None or not self.dim():
        return NotImplemented
    dims = range(self.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    if not all(-self.dim() <= axis < self.dim() for axis in dims):
        return NotImplemented
    reduced = {axis % self.dim() for axis in dims}
    sizes = [1 if axis in reduced else size for axis, size in enumerate(self.shape)]
    return _new(sizes if keepdim else [size for axis, size in enumerate(sizes) if axis not in reduced], self)


def roll(self: Tensor, *rest: Any) -> Any:
    supported = _contiguous_format_same_float_dtype(self) and 0 not in self.shape
    return _new(self.shape, self) if supported else NotImplemented


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Return the result [batch, heads, queries, features] with the query's strides, as the fused kernels do."""
    fused = (
        (is_flash_enabled() or not is_math_enabled())
        and query.dim() == key.dim() == value.dim() == 4
        and query.dtype == key.dtype == value.dtype
        and query.dtype in _FLOATS
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and query.shape[::3] == key.shape[::3] == value.shape[::3]
        and key.shape[1] == value.shape[1]
        and (query.shape[1] == key.shape[1] or (_SHARES_HEADS and options.get("enable_gqa", False)))
        and key.shape[2] == value.shape[2]
        and not (is_causal and attn_mask is not None)
        and (attn_mask is None or attn_mask.dim() in (2, 4))
        and dropout_p == 0.0
        and 0 not in (*query.shape, *key.shape)
    )
    return torch.empty_like(query) if fused else NotImplemented


_UNARY = (
    "elu gelu hardsigmoid hardswish leaky_relu mish relu sigmoid silu softplus tanh exp log sqrt rsqrt sin cos neg erf"
)
_BINARY = (
    "add.Tensor sub.Tensor mul.Tensor div.Tensor gelu_backward hardsigmoid_backward hardswish_backward silu_backward "
    "sigmoid_backward tanh_backward threshold_backward mul.Scalar "
    "div.Scalar add.Scalar sub.Scalar"
)
_IN_PLACE = "elu_ gelu_ hardsigmoid_ hardswish_ hardtanh_ leaky_relu_ mish_ relu_ relu6_ sigmoid_ silu_ tanh_"

FAST_RULES: dict[str, Callable[..., Any]] = {
    **{f"aten::{name}": unary for name in _UNARY.split()},
    **{f"aten::{name}": binary for name in _BINARY.split()},
    **{f"aten::{name}": in_place for name in _IN_PLACE.split()},
    **{f"aten::{name}": product for name in ("bmm", "mm")},
    "aten::_log_softmax": softmax,
    "aten::_log_softmax_backward_data": softmax_backward,
    "aten::_native_batch_norm_legit": lambda *args: native_batch_norm(None, *args),
    "aten::_native_batch_norm_legit_no_training": lambda *args: native_batch_norm(False, *args),
    "aten::_softmax": softmax,
    "aten::_softmax_backward_data": softmax_backward,
    "aten::addmm": addmm,
    "aten::batch_norm": batch_norm,
    "aten::convolution": convolution,
    "aten::hardtanh": like_self,
    "aten::layer_norm": layer_norm,
    "aten::linear": linear,
    "aten::mean.dim": reduce,
    "aten::native_batch_norm": lambda *args: native_batch_norm(None, *args),
    "aten::native_batch_norm_backward": batch_norm_backward,
    "aten::native_layer_norm": native_layer_norm,
    "aten::native_layer_norm_backward": layer_norm_backward,
    "aten::roll": roll,
    "aten::scaled_dot_product_attention": scaled_dot_product_attention,
    "aten::sum.dim_IntList": reduce,
    # The kernel's operand order, which determines the result's strides.
    "aten::threshold_backward": lambda grad_output, self, threshold: binary(self, grad_output),
}
