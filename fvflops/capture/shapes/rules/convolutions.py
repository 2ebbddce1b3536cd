"""Shape rules of convolutions: backend-specific ops, and the memory formats of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fvflops.capture.shapes.rules.memory_formats import empty_with_format, suggested_format
from fvflops.torch_internals import convolution_memory_format, make_wrapper_subclass, select_convolution_backend

# Arguments of a convolution: stride, padding, dilation, transposed, output_padding, groups.
_Parameters = Sequence[Any]
_FormatChoice = Callable[..., torch.memory_format]


class _Probe(Tensor):
    """A tensor without memory on the CPU, for torch's selection of a convolution backend."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: a probe has no values")


def _probe(tensor: Tensor) -> Tensor:
    return make_wrapper_subclass(
        _Probe, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=torch.device("cpu")
    )


def format_on_cpu(
    input: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *parameters: Any
) -> torch.memory_format:
    """Return the memory format of a convolution's result from the backend that torch selects on the CPU."""
    if suggested_format(input) is suggested_format(weight) is torch.contiguous_format:
        return torch.contiguous_format  # from any backend
    probes = _probe(input), _probe(weight)
    return convolution_memory_format(*probes, select_convolution_backend(*probes, None, *parameters, bias_sizes))


def format_on_cuda(input: Tensor, weight: Tensor, *_: Any) -> torch.memory_format:
    """Return the memory format of a convolution's result from cuDNN: channels last if the input or the weight is."""
    if torch.float64 in (input.dtype, weight.dtype):
        return torch.contiguous_format
    formats = {suggested_format(input), suggested_format(weight)} - {torch.contiguous_format}
    return formats.pop() if formats else torch.contiguous_format


def _kernel_format(
    choose_format: _FormatChoice,
    input: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    parameters: _Parameters,
) -> torch.memory_format:
    """Return the memory format of a kernel's results; a 1D convolution runs as a 2D one, on a contiguous input."""
    if input.ndim == weight.ndim == 3:
        stride, padding, dilation, transposed, output_padding, groups = parameters
        input, weight = input.contiguous().unsqueeze(2), weight.unsqueeze(2)
        parameters = [1, *stride], [0, *padding], [1, *dilation], transposed, [0, *output_padding], groups
    return choose_format(input, weight, bias_sizes, *parameters)


def _in_format(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    if tensor.ndim == 3:
        return empty_with_format(tensor, tensor.unsqueeze(2).shape, memory_format).squeeze(2)
    return empty_with_format(tensor, tensor.shape, memory_format)


def convolution(choose_format: _FormatChoice, *args: Any) -> Tensor:
    """Return the result of `aten::convolution` in its kernel's memory format."""
    input, weight, bias, *parameters = args
    result = torch.ops.aten.convolution(*args)
    if 0 in result.shape[2:]:  # as the kernel raises; older torch rules do not
        raise RuntimeError("Kernel size can't be greater than actual input size")
    bias_sizes = None if bias is None else list(bias.shape)
    return _in_format(result, _kernel_format(choose_format, input, weight, bias_sizes, parameters))


def convolution_backward(choose_format: _FormatChoice, *args: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias, in their kernel's memory format."""
    grad_output, input, weight, bias_sizes, *parameters, output_mask = args
    memory_format = _kernel_format(choose_format, input, weight, bias_sizes, parameters)
    return (
        _in_format(input, memory_format) if output_mask[0] else None,
        _in_format(weight, memory_format) if output_mask[1] else None,
        grad_output.new_empty(grad_output.shape[1]) if output_mask[2] else None,
    )


def backend_convolution(name: str, *args: Any) -> Tensor:
    """Return the result of a convolution op of one backend [batch, channels, *spatial], by its arguments' names."""
    schema = getattr(torch.ops.aten, name).default._schema
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    image, weight, transposed = given["self"], given["weight"], "transpose" in name
    rank = weight.ndim - 2

    def sizes(argument: str, default: int) -> list[int]:
        value = list(given.get(argument, (default,)))
        return value * rank if len(value) == 1 else value

    groups = given.get("groups", 1 if transposed else image.shape[-rank - 1] // weight.shape[1])
    parameters = sizes("stride", 1), sizes("padding", 0), sizes("dilation", 1), transposed, sizes("output_padding", 0)
    return torch.ops.aten.convolution(image, weight, None, *parameters, groups)


def _rules(choose_format: _FormatChoice) -> dict[str, Callable[..., Any]]:
    return {
        "aten::_convolution": lambda *args: convolution(choose_format, *args[:9]),
        "aten::convolution": partial(convolution, choose_format),
        "aten::convolution_backward": partial(convolution_backward, choose_format),
    }


RULES: dict[str, Callable[..., Any]] = {
    **_rules(format_on_cuda),
    **{
        f"aten::{name}": partial(backend_convolution, name)
        for name in (
            *("_conv_depthwise2d", "_mps_convolution", "_slow_conv2d_forward", "conv_depthwise3d"),
            *("cudnn_convolution", "cudnn_convolution_add_relu", "cudnn_convolution_relu"),
            *("cudnn_convolution_transpose", "miopen_convolution", "miopen_convolution_add_relu"),
            *("miopen_convolution_relu", "miopen_convolution_transpose", "miopen_depthwise_convolution"),
            *("slow_conv3d_forward", "slow_conv_dilated2d", "slow_conv_dilated3d", "slow_conv_transpose3d"),
        )
    },
}
CPU_RULES = _rules(format_on_cpu)
