"""Choose CUDA's kernels for runs with autograd in shape execution, where torch would choose the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fvflops.capture.decomposed_attention import call_with_pairs
from fvflops.capture.instrument.autograd import UnrecordedFunction
from fvflops.capture.instrument.patching import Patch, Wrapper, calling, wrapped
from fvflops.capture.recorder.value_reader import ValueReader
from fvflops.capture.shapes.cuda_autocast import cast_by_autocast
from fvflops.capture.shapes.metadata import is_available
from fvflops.capture.shapes.shape_mode import ShapeMode, in_shape_run
from fvflops.capture.shapes.shape_tensor import ShapeTensor
from fvflops.torch_internals import (
    below_autograd,
    dispatch_mode_stack,
    message_of_missing,
    pytree,
    scaled_dot_product_attention,
    variable_functions,
)

_HALF = (torch.float16, torch.bfloat16)
# GPUs on which flash attention has no backward pass for wide heads.
_SMALL_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
# Before torch 2.11, or with a cuDNN before 9.15.1, which 2.11 replaced, cuDNN is the last choice.
_TORCH_PREFERS_CUDNN = torch.torch_version.TorchVersion(torch.__version__) >= "2.11"
_PREFERRED_CUDNN = ((9, 0), (10, 0), (10, 3))


def choose_attention_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    *,
    grouped: bool,
    capability: tuple[int, int],
) -> str:
    """Return "cudnn", "flash", "efficient" or "math" for query, key and value of 4 dimensions.

    `mask` has no gradient where only "efficient" and "math" can return one. `grouped`: several query heads share a key
    head. Equal to torch 2.11's choice on an H100 for 20,480 calls, with cuDNN first and with flash attention first.
    """
    backends = torch.backends.cuda
    length, head_dim, value_dim, dtype = query.shape[2], query.shape[3], value.shape[3], query.dtype
    dtypes = (torch.float16, torch.float32, *([torch.bfloat16] if capability >= (8, 0) else []))
    if 0 in (length, key.shape[2]) or capability < (5, 0) or dtype not in dtypes:
        return "math"
    is_half, widest = dtype in _HALF, max(head_dim, value_dim)
    alignment = 8 if is_half else 4
    is_aligned = head_dim % alignment == 0 == value_dim % alignment
    needs_mask_gradient = mask is not None and mask.requires_grad
    if (
        _TORCH_PREFERS_CUDNN
        and capability in _PREFERRED_CUDNN
        and backends.cudnn_sdp_enabled()
        and is_half
        and is_aligned
        and widest <= 256
        and not needs_mask_gradient
        and not (dropout > 0 and length == 1)
    ):
        return "cudnn"
    trains = any(tensor.requires_grad for tensor in (query, key, value))
    is_too_wide = 192 < head_dim <= 224 or (head_dim > 224 and dropout > 0)
    if (
        capability >= (8, 0)
        and backends.flash_sdp_enabled()
        and is_half
        and mask is None
        and head_dim == value_dim <= 256
        and not (is_causal and length != key.shape[2])
        and not (trains and capability in _SMALL_SHARED_MEMORY and is_too_wide)
    ):
        return "flash"
    if backends.mem_efficient_sdp_enabled() and is_aligned and not grouped:
        return "efficient"
    return "math"


_ATEN = torch.ops.aten
_CUDNN_DTYPES = (torch.float16, torch.float32, torch.float64)
_CAPABILITY: ContextVar[tuple[int, int]] = ContextVar("capability", default=(9, 0))  # an H100's
_CUDNN_RNN_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


@contextmanager
def gpu_emulated(capability: tuple[int, int] | None) -> Iterator[None]:
    """Choose the kernels of a GPU of this compute capability, None for the default, while the context lasts."""
    if capability is None:
        yield
        return
    token = _CAPABILITY.set(capability)
    try:
        yield
    finally:
        _CAPABILITY.reset(token)


def cuda_choices(device: torch.device, *, for_cpu: bool = False) -> AbstractContextManager[None]:
    """Call CUDA's kernels for shape tensors on CUDA while the context lasts; `for_cpu`: for tensors on the CPU.

    With a CUDA device torch chooses by itself, except for recurrent layers, where it inspects the addresses of the
    weights and keeps a persistent random state.
    """
    patches = _RECURRENT if is_available(device) and not for_cpu else (*_RECURRENT, *_NON_RECURRENT)
    device_type = "cpu" if for_cpu else "cuda"
    wrappers: list[Wrapper] = [(patch, calling(partial(_call, choice, device_type))) for patch, choice in patches]
    if not is_available(device):
        wrappers.append((_GET_CAPABILITY, calling(_read_capability)))
    return wrapped(wrappers)


def _read_capability(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _CAPABILITY.get() if in_shape_run() else original(*args, **kwargs)


def _call(
    choice: Callable[..., Any], device_type: str, original: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call `choice` for tensors on a device in shape execution, else `original`."""
    values = (*args, *kwargs.values())
    flat = (item for value in values for item in (value if isinstance(value, (list, tuple)) else (value,)))
    if any(isinstance(item, Tensor) and item.device.type == device_type for item in flat) and in_shape_run():
        result = choice(*args, **kwargs)
        if result is not NotImplemented:
            return result
    return original(*args, **kwargs)


def _recurrent(name: str, *args: Any) -> Any:
    is_packed = isinstance(args[3], (list, tuple))
    if is_packed:
        data, batch_sizes, hx, params, has_biases, layers, dropout, train, bidirectional = args
        batch_first, lengths = False, batch_sizes.tolist()
    else:
        data, hx, params, has_biases, layers, dropout, train, bidirectional, batch_first = args
        lengths = []
    if torch.is_autocast_enabled("cuda") and not is_available(data.device):  # cuDNN runs float16 in any autocast
        data, hx, params = pytree.tree_map_only(Tensor, lambda item: item.half(), (data, hx, params))
    torch_chooses = is_available(data.device) and not is_packed and type(params[0]) is not ShapeTensor
    cudnn_supported = torch.backends.cudnn.enabled and data.dtype in _CUDNN_DTYPES and data.numel() > 0
    if not cudnn_supported or (torch_chooses and not (train and dropout > 0)):
        return NotImplemented
    state, cell = hx if name == "lstm" else (hx, None)
    hidden = state.shape[2] if cell is None else cell.shape[2]
    proj_size = state.shape[2] if hidden != state.shape[2] else 0
    output, hy, cy, *_ = _ATEN._cudnn_rnn(
        *(data, list(params), (4 if has_biases else 2) + bool(proj_size), None, state, cell, _CUDNN_RNN_MODES[name]),
        *(hidden, proj_size, layers, batch_first, dropout, train, bidirectional, lengths, None),
    )
    return (output, hy, cy) if name == "lstm" else (output, hy)


def _lstm_cell(input: Tensor, hx: Sequence[Tensor], w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hx[0], w_hh.t())
    return _ATEN._thnn_fused_lstm_cell(*gates, hx[1], b_ih, b_hh)[:2]


def _gru_cell(input: Tensor, hx: Tensor, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    gates = torch.matmul(input, w_ih.t()), torch.matmul(hx, w_hh.t())
    return _ATEN._thnn_fused_gru_cell(*gates, hx, b_ih, b_hh)[0]


def _softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    if dim is None or input.dtype is not torch.float16 or dtype is not torch.float32:
        return NotImplemented
    return _ATEN._softmax(input, dim, True)


def _dropout(input: Tensor, p: float, train: bool) -> Any:
    fused = train and 0 < p < 1 and input.numel() > 0
    return _ATEN.native_dropout(input, p, train)[0] if fused else NotImplemented


def _batch_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Any:
    running_mean, running_var, training, momentum, eps, cudnn_enabled = rest
    if not cudnn_enabled or weight is None or bias is None or input.ndim < 3:
        return NotImplemented
    is_mixed = input.dtype is torch.float16 and weight.dtype is not torch.float32
    if torch.bfloat16 in (input.dtype, weight.dtype) or is_mixed:
        return NotImplemented
    has_running_statistics = running_mean is not None and running_var is not None
    if not (has_running_statistics or training) or len(input) > (880801 if training else 65535):
        return NotImplemented
    memory_format = torch.contiguous_format
    if input.ndim == 4 and input.is_contiguous(memory_format=torch.channels_last) and not input.is_contiguous():
        memory_format = torch.channels_last
    input = input.contiguous(memory_format=memory_format)
    return _ATEN.cudnn_batch_norm(
        input, weight.contiguous(), bias.contiguous(), running_mean, running_var, training, momentum, eps
    )[0]


def _grid_sampler(input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Any:
    mode_supported = interpolation_mode == 0 and padding_mode == 0 and align_corners
    input_supported = input.ndim == 4 and input.dtype in _CUDNN_DTYPES and input.shape[1] <= 1024
    uses_cudnn = torch.backends.cudnn.enabled and mode_supported and input_supported
    return _ATEN.cudnn_grid_sampler(input, grid) if uses_cudnn else NotImplemented


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if query.ndim != 4 or key.ndim != 4:
        return NotImplemented
    query, key, value, attn_mask = _cast_by_autocast(query, key, value, attn_mask)
    kernel = choose_attention_kernel(
        query, key, value, attn_mask, dropout_p, is_causal, grouped=enable_gqa, capability=_CAPABILITY.get()
    )
    needs_backward = any(tensor.requires_grad for tensor in (query, key, value))
    if kernel == "cudnn":
        bias = _as_bias(attn_mask, query.dtype, hidden=-65504.0)
        return _ATEN._scaled_dot_product_cudnn_attention(
            query, key, value, bias, needs_backward, dropout_p, is_causal, False, scale=scale
        )[0]
    if kernel == "flash":
        head_dim = query.shape[3]
        padding = -head_dim % 8
        padded = [F.pad(tensor, (0, padding)) if padding else tensor for tensor in (query, key, value)]
        scale = head_dim**-0.5 if scale is None else scale
        output = _ATEN._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return output[..., :head_dim] if padding else output
    if kernel == "efficient":
        bias = _align(_as_bias(attn_mask, query.dtype, hidden=-torch.inf), query, key)
        return _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, bias, needs_backward, dropout_p, is_causal, scale=scale
        )[0]
    if not torch.backends.cuda.math_sdp_enabled():
        return NotImplemented
    mode = next(mode for mode in dispatch_mode_stack() if isinstance(mode, ShapeMode))
    return call_with_pairs(
        *(mode.recorder, ValueReader(mode.has_values), _ATEN._scaled_dot_product_attention_math),
        *(query, key, value, attn_mask, dropout_p, is_causal),
        scale=scale,
        enable_gqa=enable_gqa,
    )[0]


def _cast_by_autocast(*tensors: Tensor | None) -> list[Any]:
    """Return float32 tensors in autocast's dtype, as autocast does for an op of lower precision."""
    device = next((kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), "")
    if not device:
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [tensor if tensor is None or tensor.dtype is not torch.float32 else tensor.to(dtype) for tensor in tensors]


def _as_bias(mask: Tensor | None, dtype: torch.dtype, *, hidden: float) -> Tensor | None:
    """Return a mask as numbers to add to scores; `hidden` is added where a bool mask is False."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=dtype), torch.scalar_tensor(hidden, dtype=dtype))


def _align(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Return a bias whose rows begin at multiples of 16 elements, of the shape of the scores."""
    if bias is None:
        return None
    length = bias.shape[-1]
    if length % 16:
        bias = F.pad(bias, (0, -length % 16))[..., :length]
    return bias.expand(*query.shape[:3], key.shape[2])


class _FusedRMSNorm(UnrecordedFunction):
    """CUDA's `_fused_rms_norm`, which torch decomposes for tensors on the CPU."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, shape: Sequence[int], weight: Tensor | None, eps: Any) -> Any:
        with below_autograd():
            output, rstd = _ATEN._fused_rms_norm(input, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(input, weight, rstd)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        input, weight, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with below_autograd():
            of_input, of_weight = _ATEN._fused_rms_norm_backward(gradients[0], input, ctx.shape, rstd, weight, wanted)
        return of_input, None, of_weight, None


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    input, weight = cast_by_autocast("aten::rms_norm", input, weight)
    has_kernel = hasattr(_ATEN, "_fused_rms_norm_backward")  # from torch 2.9 on
    if not has_kernel or (weight is not None and weight.dtype is not input.dtype):
        return NotImplemented
    return _FusedRMSNorm.apply(input, list(normalized_shape), weight, eps)


def _instance_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Any:
    running_mean, _, use_input_stats, *options = rest
    if weight is None or bias is None or running_mean is not None or not use_input_stats:
        return NotImplemented
    batch, channels = input.shape[:2]
    rows = input.contiguous().view(1, batch * channels, *input.shape[2:])
    result = _batch_norm(rows, weight.repeat(batch), bias.repeat(batch), None, None, True, *options)
    return result if result is NotImplemented else result.view(input.shape)


def _patch(owner: Any, name: str) -> Patch:
    # Some modules create attributes on access; store it, so that the patch can restore it.
    if message_of_missing(owner) is None:
        vars(owner).setdefault(name, getattr(owner, name))
    return Patch(owner, name)


# A choice returns NotImplemented where torch chooses the same kernel for CUDA as for the actual device.
_Choices = tuple[tuple[Patch, Callable[..., Any]], ...]
_RECURRENT: _Choices = tuple((_patch(variable_functions, name), partial(_recurrent, name)) for name in _CUDNN_RNN_MODES)
_NON_RECURRENT: _Choices = (
    (_patch(variable_functions, "dropout"), _dropout),
    (_patch(variable_functions, "gru_cell"), _gru_cell),
    (_patch(variable_functions, "lstm_cell"), _lstm_cell),
    (_patch(torch, "batch_norm"), _batch_norm),
    (_patch(torch, "dropout"), _dropout),
    (_patch(torch, "grid_sampler"), _grid_sampler),
    (_patch(torch, "instance_norm"), _instance_norm),
    (_patch(torch, "rms_norm"), _rms_norm),
    (_patch(F, "scaled_dot_product_attention"), _scaled_dot_product_attention),
    (_patch(F, "softmax"), _softmax),
)
_GET_CAPABILITY = _patch(torch.cuda, "get_device_capability")
# For programs that imported the function by name.
_CHOICE_BY_FUNCTION: Mapping[Any, Callable[..., Any]] = {scaled_dot_product_attention: _scaled_dot_product_attention}


def call_as_on_cuda(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch as on CUDA, on a machine without it."""
    choice = _CHOICE_BY_FUNCTION.get(func)
    return func(*args, **kwargs) if choice is None else _call(choice, "cuda", func, *args, **kwargs)
