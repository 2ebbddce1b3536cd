"""Shape rules of convolutions: backend-specific ops, and the memory formats of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fvflops.capture.shapes.layouts.memory_formats import empty_with_format, suggested_format
from fvflops.torch_internals import convolution_memory_format, make_wrapper_subclass, select_convolution_backend

_Sizes = Sequence[int]


class _Probe(torch.Tensor):
    """A tensor without memory on the CPU, for torch's selection of a convolution backend."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: a probe has no values")


def _probe(tensor: torch.Tensor) -> torch.Tensor:
    return make_wrapper_subclass(
        _Probe, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=torch.device("cpu")
    )


def format_on_cpu(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: _Sizes | None,
    stride: _Sizes,
    padding: _Sizes,
    dilation: _Sizes,
    transposed: bool,
    output_padding: _Sizes,
    groups: int,
) -> torch.memory_format:
    """Return the memory format of a convolution's result from the backend that torch selects on the CPU."""
    probes = _probe(input), _probe(weight)
    backend = select_convolution_backend(
        input=probes[0],
        weight=probes[1],
        bias=None,
        stride=stride,
        padding=padding,
        dilation=dilation,
        transposed=transposed,
        output_padding=output_padding,
        groups=groups,
        bias_sizes=bias_sizes,
    )
    return convolution_memory_format(*probes, backend)


def format_on_cuda(input: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.memory_format:
    """Return the memory format of a convolution's result from cuDNN: channels last if the input or the weight is."""
    if torch.float64 in (input.dtype, weight.dtype):
        return torch.contiguous_format
    formats = {suggested_format(input), suggested_format(weight)} - {torch.contiguous_format}
    return formats.pop() if formats else torch.contiguous_format


def convolution_with_format(
    choose_format: Callable[..., torch.memory_format],
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: _Sizes,
    padding: _Sizes,
    dilation: _Sizes,
    transposed: bool,
    output_padding: _Sizes,
    groups: int,
) -> torch.Tensor:
    """Return the result of `aten::convolution` in its kernel's memory format.

    A 1D convolution runs as a 2D one, on an input made contiguous first.
    """
    parameters = (stride, padding, dilation, transposed, output_padding, groups)
    result = torch.ops.aten.convolution(input, weight, bias, *parameters)
    bias_sizes = None if bias is None else list(bias.shape)
    if input.ndim == 3 and weight.ndim == 3:
        tensors_2d = (
            torch.empty(input.shape, dtype=input.dtype, device=input.device).unsqueeze(2),
            weight.unsqueeze(2),
        )
        parameters_2d = ([1, *stride], [0, *padding], [1, *dilation], transposed, [0, *output_padding], groups)
        memory_format = choose_format(*tensors_2d, bias_sizes, *parameters_2d)
        return empty_with_format(result, result.unsqueeze(2).shape, memory_format).squeeze(2)
    return empty_with_format(result, result.shape, choose_format(input, weight, bias_sizes, *parameters))


def convolution(
    self: torch.Tensor,
    weight: torch.Tensor,
    stride: _Sizes,
    padding: _Sizes,
    dilation: _Sizes,
    groups: int = 1,
    *,
    transposed: bool = False,
    output_padding: _Sizes | None = None,
) -> torch.Tensor:
    """Return the result of `aten::convolution` without a bias, [batch, channels, *spatial]."""
    return torch.ops.aten.convolution(
        self, weight, None, stride, padding, dilation, transposed, output_padding or [0] * len(stride), groups
    )


def cudnn_convolution(
    self: torch.Tensor, weight: torch.Tensor, padding: _Sizes, stride: _Sizes, dilation: _Sizes, groups: int, *_: Any
) -> torch.Tensor:
    """Return the result of `cudnn_convolution`."""
    return convolution(self, weight, stride, padding, dilation, groups)


def miopen_convolution(
    self: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: _Sizes,
    stride: _Sizes,
    dilation: _Sizes,
    groups: int,
    *_: Any,
) -> torch.Tensor:
    """Return the result of `miopen_convolution`."""
    return convolution(self, weight, stride, padding, dilation, groups)


def cudnn_convolution_transpose(
    self: torch.Tensor,
    weight: torch.Tensor,
    padding: _Sizes,
    output_padding: _Sizes,
    stride: _Sizes,
    dilation: _Sizes,
    groups: int,
    *_: Any,
) -> torch.Tensor:
    """Return the result of `cudnn_convolution_transpose`."""
    return convolution(self, weight, stride, padding, dilation, groups, transposed=True, output_padding=output_padding)


def miopen_convolution_transpose(
    self: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any
) -> torch.Tensor:
    """Return the result of `miopen_convolution_transpose`."""
    return cudnn_convolution_transpose(self, weight, *rest)


def convolution_relu(
    self: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: _Sizes,
    padding: _Sizes,
    dilation: _Sizes,
    groups: int,
) -> torch.Tensor:
    """Return the result of `cudnn_convolution_relu`."""
    return convolution(self, weight, stride, padding, dilation, groups)


def convolution_add_relu(
    self: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, alpha: Any, bias: torch.Tensor | None, *rest: Any
) -> torch.Tensor:
    """Return the result of `cudnn_convolution_add_relu`."""
    return convolution_relu(self, weight, bias, *rest)


def slow_convolution(
    self: torch.Tensor,
    weight: torch.Tensor,
    kernel_size: _Sizes,
    bias: torch.Tensor | None = None,
    stride: _Sizes = (1,),
    padding: _Sizes = (0,),
    dilation: _Sizes = (1,),
) -> torch.Tensor:
    """Return the result of the kernels that unfold the input (slow and depthwise)."""
    rank = len(kernel_size)
    groups = self.shape[-rank - 1] // weight.shape[1]
    stride, padding, dilation = (_expand_sizes(item, rank) for item in (stride, padding, dilation))
    return convolution(self, weight, stride, padding, dilation, groups)


def slow_convolution_transpose(
    self: torch.Tensor,
    weight: torch.Tensor,
    kernel_size: _Sizes,
    bias: torch.Tensor | None = None,
    stride: _Sizes = (1,),
    padding: _Sizes = (0,),
    output_padding: _Sizes = (0,),
    dilation: _Sizes = (1,),
) -> torch.Tensor:
    """Return the result of the transposed kernels that fold columns (slow_conv_transpose)."""
    rank = len(kernel_size)
    stride, padding, dilation = (_expand_sizes(item, rank) for item in (stride, padding, dilation))
    output_padding = _expand_sizes(output_padding, rank)
    return convolution(self, weight, stride, padding, dilation, transposed=True, output_padding=output_padding)


def _expand_sizes(sizes: _Sizes, rank: int) -> list[int]:
    return list(sizes) * rank if len(sizes) == 1 else list(sizes)


def convolution_backward_with_format(
    choose_format: Callable[..., torch.memory_format],
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: _Sizes | None,
    *rest: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of input, weight and bias, in their kernel's memory format."""
    grads = torch.ops.aten.convolution_backward(grad_output, input, weight, bias_sizes, *rest)
    stride, padding, dilation, transposed, output_padding, groups, _ = rest
    is_1d = input.ndim == weight.ndim == 3
    if is_1d:
        parameters_2d = ([1, *stride], [0, *padding], [1, *dilation], transposed, [0, *output_padding], groups)
        # torch makes the input of a 1D convolution contiguous first.
        memory_format = choose_format(input.contiguous().unsqueeze(2), weight.unsqueeze(2), bias_sizes, *parameters_2d)
    else:
        memory_format = choose_format(
            input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups
        )

    def formatted(grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:
            return None
        if is_1d:
            return empty_with_format(grad, grad.unsqueeze(2).shape, memory_format).squeeze(2)
        return empty_with_format(grad, grad.shape, memory_format)

    return formatted(grads[0]), formatted(grads[1]), grads[2]


RULES: dict[str, Callable[..., Any]] = {
    "aten::_conv_depthwise2d": slow_convolution,
    "aten::_mps_convolution": miopen_convolution,
    "aten::_slow_conv2d_forward": slow_convolution,
    "aten::conv_depthwise3d": slow_convolution,
    "aten::_convolution": lambda *args: convolution_with_format(format_on_cuda, *args[:9]),
    "aten::convolution": partial(convolution_with_format, format_on_cuda),
    "aten::convolution_backward": partial(convolution_backward_with_format, format_on_cuda),
    "aten::cudnn_convolution": cudnn_convolution,
    "aten::cudnn_convolution_add_relu": convolution_add_relu,
    "aten::cudnn_convolution_relu": convolution_relu,
    "aten::cudnn_convolution_transpose": cudnn_convolution_transpose,
    "aten::miopen_convolution": miopen_convolution,
    "aten::miopen_convolution_add_relu": convolution_add_relu,
    "aten::miopen_convolution_relu": convolution_relu,
    "aten::miopen_convolution_transpose": miopen_convolution_transpose,
    "aten::miopen_depthwise_convolution": miopen_convolution,
    "aten::slow_conv3d_forward": slow_convolution,
    "aten::slow_conv_dilated2d": slow_convolution,
    "aten::slow_conv_dilated3d": slow_convolution,
    "aten::slow_conv_transpose3d": slow_convolution_transpose,
}

CPU_RULES: dict[str, Callable[..., Any]] = {
    "aten::_convolution": lambda *args: convolution_with_format(format_on_cpu, *args[:9]),
    "aten::convolution": partial(convolution_with_format, format_on_cpu),
    "aten::convolution_backward": partial(convolution_backward_with_format, format_on_cpu),
}
