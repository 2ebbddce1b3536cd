"""The rules of convolutions that one library or one kernel makes: the result is that of `aten::convolution`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_Ints = Sequence[int]


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


def by_library(
    self: torch.Tensor, weight: torch.Tensor, padding: _Ints, stride: _Ints, dilation: _Ints, groups: int, *_: Any
) -> torch.Tensor:
    """Return the result of `cudnn_convolution`."""
    return convolve(self, weight, stride, padding, dilation, groups)


def by_library_with_bias(
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


def transposed_by_library(
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


def transposed_with_bias(
    self: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: Any
) -> torch.Tensor:
    """Return the result of `miopen_convolution_transpose`."""
    return transposed_by_library(self, weight, *rest)


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


def slowly(
    self: torch.Tensor,
    weight: torch.Tensor,
    kernel_size: _Ints,
    bias: torch.Tensor | None = None,
    stride: _Ints = (1,),
    padding: _Ints = (0,),
    dilation: _Ints = (1,),
) -> torch.Tensor:
    """Return the result of the kernels that unfold the input, grouped or not."""
    rank = len(kernel_size)
    groups = self.shape[-rank - 1] // weight.shape[1]
    stride, padding, dilation = (_spread(item, rank) for item in (stride, padding, dilation))
    return convolve(self, weight, stride, padding, dilation, groups)


def slowly_transposed(
    self: torch.Tensor,
    weight: torch.Tensor,
    kernel_size: _Ints,
    bias: torch.Tensor | None = None,
    stride: _Ints = (1,),
    padding: _Ints = (0,),
    output_padding: _Ints = (0,),
    dilation: _Ints = (1,),
) -> torch.Tensor:
    """Return the result of the kernels that fold the input."""
    rank = len(kernel_size)
    stride, padding, dilation, more = (_spread(item, rank) for item in (stride, padding, dilation, output_padding))
    return convolve(self, weight, stride, padding, dilation, transposed=True, output_padding=more)


def _spread(sizes: _Ints, rank: int) -> list[int]:
    return list(sizes) * rank if len(sizes) == 1 else list(sizes)


RULES: dict[str, Callable[..., Any]] = {
    "aten::_conv_depthwise2d": slowly,
    "aten::_mps_convolution": by_library_with_bias,
    "aten::_slow_conv2d_forward": slowly,
    "aten::conv_depthwise3d": slowly,
    "aten::cudnn_convolution": by_library,
    "aten::cudnn_convolution_add_relu": add_then_relu,
    "aten::cudnn_convolution_relu": then_relu,
    "aten::cudnn_convolution_transpose": transposed_by_library,
    "aten::miopen_convolution": by_library_with_bias,
    "aten::miopen_convolution_add_relu": add_then_relu,
    "aten::miopen_convolution_relu": then_relu,
    "aten::miopen_convolution_transpose": transposed_with_bias,
    "aten::miopen_depthwise_convolution": by_library_with_bias,
    "aten::slow_conv3d_forward": slowly,
    "aten::slow_conv_dilated2d": slowly,
    "aten::slow_conv_dilated3d": slowly,
    "aten::slow_conv_transpose3d": slowly_transposed,
}
