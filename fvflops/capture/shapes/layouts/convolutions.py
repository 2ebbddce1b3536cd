"""Shape rules of backend-specific convolutions, in terms of `aten::convolution`, and their memory formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fvflops.capture.shapes.layouts.memory_formats import empty, suggested
from fvflops.torch_internals import convolution_memory_format, make_wrapper_subclass, select_convolution_backend

_Ints = Sequence[int]


class _Probe(torch.Tensor):
    """A tensor without memory that claims to be on the CPU, by which torch selects a convolution backend."""

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
    bias_sizes: _Ints | None,
    stride: _Ints,
    padding: _Ints,
    dilation: _Ints,
    transposed: bool,
    output_padding: _Ints,
    groups: int,
) -> torch.memory_format:
    """Return the memory format of a convolution's result from the kernel that the CPU selects."""
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
    """Return the memory format of a convolution's result from cuDNN: that of the input or of the weight."""
    if torch.float64 in (input.dtype, weight.dtype):
        return torch.contiguous_format
    formats = {suggested(input), suggested(weight)} - {torch.contiguous_format}
    return formats.pop() if formats else torch.contiguous_format


def convolve_in(
    choose: Callable[..., torch.memory_format],
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: _Ints,
    padding: _Ints,
    dilation: _Ints,
    transposed: bool,
    output_padding: _Ints,
    groups: int,
) -> torch.Tensor:
    """Return the result of `aten::convolution` in its kernel's memory format.

    A 1D convolution runs as a 2D one, on an input made contiguous first.
    """
    rest = (stride, padding, dilation, transposed, output_padding, groups)
    result = torch.ops.aten.convolution(input, weight, bias, *rest)
    sizes = None if bias is None else list(bias.shape)
    if input.ndim == 3 and weight.ndim == 3:
        flat = (torch.empty(input.shape, dtype=input.dtype, device=input.device).unsqueeze(2), weight.unsqueeze(2))
        wide = ([1, *stride], [0, *padding], [1, *dilation], transposed, [0, *output_padding], groups)
        chosen = choose(*flat, sizes, *wide)
        return empty(result, (result.shape[0], result.shape[1], 1, result.shape[2]), chosen).squeeze(2)
    return empty(result, result.shape, choose(input, weight, sizes, *rest))


def convolve(
    self: torch.Tensor,
    weight: torch.Tensor,
    stride: _Ints,
    padding: _Ints,
    dilation: _Ints,
    groups: int = 1,
    *,
    transposed: bool = False,
    output_padding: _Ints | None = None,
) -> torch.Tensor:
    """Return the result [batch, channels, positions ...]."""
    return torch.ops.aten.convolution(
        self, weight, None, stride, padding, dilation, transposed, output_padding or [0] * len(stride), groups
    )


def backend_convolution(
    self: torch.Tensor, weight: torch.Tensor, padding: _Ints, stride: _Ints, dilation: _Ints, groups: int, *_: Any
) -> torch.Tensor:
    """Return the result of `cudnn_convolution`."""
    return convolve(self, weight, stride, padding, dilation, groups)


def backend_convolution_with_bias(
    self: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: _Ints,
    stride: _Ints,
    dilation: _Ints,
    groups: int,
    *_: Any,
) -> torch.Tensor:
    """Return the result of `miopen_convolution`."""
    return convolve(self, weight, stride, padding, dilation, groups)


def backend_convolution_transpose(
    self: torch.Tensor,
    weight: torch.Tensor,
    padding: _Ints,
    output_padding: _Ints,
    stride: _Ints,
    dilation: _Ints,
    groups: int,
    *_: Any,
) -> torch.Tensor:
    """Return the result of `cudnn_convolution_transpose`."""
    return convolve(self, weight, stride, padding, dilation, groups, transposed=True, output_padding=output_padding)


def backend_convolution_transpose_with_bias(
    self: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any
) -> torch.Tensor:
    """Return the result of `miopen_convolution_transpose`."""
    return backend_convolution_transpose(self, weight, *rest)


def then_relu(
    self: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: _Ints,
    padding: _Ints,
    dilation: _Ints,
    groups: int,
) -> torch.Tensor:
    """Return the result of `cudnn_convolution_relu`."""
    return convolve(self, weight, stride, padding, dilation, groups)


def add_then_relu(
    self: torch.Tensor, weight: torch.Tensor, z: torch.Tensor, alpha: Any, bias: torch.Tensor | None, *rest: Any
) -> torch.Tensor:
    """Return the result of `cudnn_convolution_add_relu`."""
    return then_relu(self, weight, bias, *rest)


def slow_convolution(
    self: torch.Tensor,
    weight: torch.Tensor,
    kernel_size: _Ints,
    bias: torch.Tensor | None = None,
    stride: _Ints = (1,),
    padding: _Ints = (0,),
    dilation: _Ints = (1,),
) -> torch.Tensor:
    """Return the result of the kernels that unfold the input (slow and depthwise), with groups or without."""
    rank = len(kernel_size)
    groups = self.shape[-rank - 1] // weight.shape[1]
    stride, padding, dilation = (_spread(item, rank) for item in (stride, padding, dilation))
    return convolve(self, weight, stride, padding, dilation, groups)


def slow_convolution_transpose(
    self: torch.Tensor,
    weight: torch.Tensor,
    kernel_size: _Ints,
    bias: torch.Tensor | None = None,
    stride: _Ints = (1,),
    padding: _Ints = (0,),
    output_padding: _Ints = (0,),
    dilation: _Ints = (1,),
) -> torch.Tensor:
    """Return the result of the transposed kernels that fold columns (slow_conv_transpose)."""
    rank = len(kernel_size)
    stride, padding, dilation, more = (_spread(item, rank) for item in (stride, padding, dilation, output_padding))
    return convolve(self, weight, stride, padding, dilation, transposed=True, output_padding=more)


def _spread(sizes: _Ints, rank: int) -> list[int]:
    return list(sizes) * rank if len(sizes) == 1 else list(sizes)


def convolution_backward_in(
    choose: Callable[..., torch.memory_format],
    grad_output: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: _Ints | None,
    *rest: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of input, weight and bias, in their kernel's memory format."""
    grads = torch.ops.aten.convolution_backward(grad_output, input, weight, bias_sizes, *rest)
    stride, padding, dilation, transposed, output_padding, groups, _ = rest
    flat = input.ndim == weight.ndim == 3
    if flat:
        wide = ([1, *stride], [0, *padding], [1, *dilation], transposed, [0, *output_padding], groups)
        # torch makes the input of a 1D convolution contiguous first.
        chosen = choose(input.contiguous().unsqueeze(2), weight.unsqueeze(2), bias_sizes, *wide)
    else:
        chosen = choose(input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups)

    def laid(item: torch.Tensor | None) -> torch.Tensor | None:
        if item is None:
            return None
        return empty(item, item.unsqueeze(2).shape, chosen).squeeze(2) if flat else empty(item, item.shape, chosen)

    return laid(grads[0]), laid(grads[1]), grads[2]


RULES: dict[str, Callable[..., Any]] = {
    "aten::_conv_depthwise2d": slow_convolution,
    "aten::_mps_convolution": backend_convolution_with_bias,
    "aten::_slow_conv2d_forward": slow_convolution,
    "aten::conv_depthwise3d": slow_convolution,
    "aten::_convolution": lambda *args: convolve_in(format_on_cuda, *args[:9]),
    "aten::convolution": partial(convolve_in, format_on_cuda),
    "aten::convolution_backward": partial(convolution_backward_in, format_on_cuda),
    "aten::cudnn_convolution": backend_convolution,
    "aten::cudnn_convolution_add_relu": add_then_relu,
    "aten::cudnn_convolution_relu": then_relu,
    "aten::cudnn_convolution_transpose": backend_convolution_transpose,
    "aten::miopen_convolution": backend_convolution_with_bias,
    "aten::miopen_convolution_add_relu": add_then_relu,
    "aten::miopen_convolution_relu": then_relu,
    "aten::miopen_convolution_transpose": backend_convolution_transpose_with_bias,
    "aten::miopen_depthwise_convolution": backend_convolution_with_bias,
    "aten::slow_conv3d_forward": slow_convolution,
    "aten::slow_conv_dilated2d": slow_convolution,
    "aten::slow_conv_dilated3d": slow_convolution,
    "aten::slow_conv_transpose3d": slow_convolution_transpose,
}

CPU_RULES: dict[str, Callable[..., Any]] = {
    "aten::_convolution": lambda *args: convolve_in(format_on_cpu, *args[:9]),
    "aten::convolution": partial(convolve_in, format_on_cpu),
    "aten::convolution_backward": partial(convolution_backward_in, format_on_cpu),
}
