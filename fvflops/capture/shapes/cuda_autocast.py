"""Emulate autocast for CUDA on a machine without it, where torch disables it with a warning.

Shape tensors on CUDA have the CPU's dispatch keys there, so autocast for the CPU is enabled too, with CUDA's dtype.
Kernels for its dispatch key run the ops on which the two autocasts differ as CUDA's does.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from itertools import groupby
from typing import Any

import torch

from fvflops.capture.instrument.patching import Patch, Shared, Wrapper, calling, wrapped
from fvflops.torch_internals import (
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeys,
    amp_availability,
    has_kernel_for_key,
    ops_of_dispatch_key,
    pytree,
    scoped_library,
)

# Ops that the autocast of CUDA or of the CPU runs in the low precision, in the widest dtype of their arguments, or with
# results in float32; other ops of one autocast that the other lacks run in float32. Source:
# https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference and torch's aten/src/ATen/autocast_mode.h.
_LOW_PRECISION = (
    *("_addmm_activation", "_convolution", "_native_multi_head_attention", "_scaled_dot_product_flash_attention"),
    *("_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "addmv", "addr", "chain_matmul", "conv1d", "conv2d", "conv3d"),
    *("convolution", "cudnn_convolution", "cudnn_convolution_transpose", "einsum", "gru_cell", "linalg_multi_dot"),
    *("lstm_cell", "mkldnn_rnn_layer", "mv", "rnn_relu_cell", "rnn_tanh_cell"),
)
_WIDEST = (
    *("addcdiv", "addcmul", "atan2", "bilinear", "cat", "cross", "dot", "index_copy", "index_put", "scatter_add"),
    *("stack", "tensordot", "vdot"),
)
_RESULT_IN_FLOAT32 = ("cumprod", "cumsum", "linalg_matrix_norm", "linalg_vector_norm", "log_softmax", "softmax", "sum")
_NORMS = {"aten::norm.Scalar": "ScalarOpt_dtype", "aten::norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}

_set_enabled, _set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype
_SETTERS = [Patch(torch, name) for name in ("set_autocast_enabled", "set_autocast_dtype", "set_autocast_gpu_dtype")]
_UNAVAILABLE = Patch(*amp_availability)
_SUPPORTS_BF16 = Patch(torch.cuda, "is_bf16_supported")
_THREAD = threading.local()  # `cpu`: autocast for the CPU before autocast for CUDA was enabled


@contextmanager
def autocast_emulated() -> Iterator[None]:
    """Let autocast for CUDA be enabled while the context lasts."""
    with ExitStack() as stack:
        wrappers: list[Wrapper] = [(setter, calling(partial(_set_state, stack))) for setter in _SETTERS]
        for patch, value in ((_SUPPORTS_BF16, True), (_UNAVAILABLE, False)):
            wrappers.append((patch, calling(lambda *_, value=value, **__: value)))
        stack.enter_context(wrapped(wrappers))
        yield


def cast_by_autocast(op: str, *tensors: torch.Tensor | None) -> list[Any]:
    """Return tensors as emulated autocast passes them to an op such as "aten::rms_norm"."""
    if torch.is_autocast_enabled("cuda") and op in _ops_of_cuda():
        return _cast(op.removeprefix("aten::").partition(".")[0], tensors)
    return list(tensors)


@lru_cache
def _ops_of_cuda() -> frozenset[str]:
    return frozenset(ops_of_dispatch_key("AutocastCUDA"))


def _set_state(stack: ExitStack, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Set autocast's state for CUDA, and change it for the CPU too."""
    before = torch.is_autocast_enabled("cuda")
    original(*args, **kwargs)
    enabled = torch.is_autocast_enabled("cuda")
    if enabled and not before:
        _THREAD.cpu = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        stack.enter_context(_KERNELS.used())
    if enabled or before:
        is_enabled, dtype = (True, torch.get_autocast_dtype("cuda")) if enabled else _THREAD.cpu
        _set_enabled("cpu", is_enabled)
        _set_dtype("cpu", dtype)


def _register_kernels() -> None:
    on_cuda = frozenset(ops_of_dispatch_key("AutocastCUDA"))  # not cached: libraries may have been loaded since
    differing = sorted(on_cuda.symmetric_difference(ops_of_dispatch_key("AutocastCPU")))
    with warnings.catch_warnings():  # torch warns that a kernel is replaced
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for namespace, ops in groupby(differing, lambda op: op.partition("::")[0]):
            library = _LIBRARIES.enter_context(scoped_library(namespace, "IMPL"))
            for op in ops:
                name, _, overload = op.removeprefix(f"{namespace}::").partition(".")
                packet = getattr(getattr(torch.ops, namespace), name)
                function = getattr(packet, overload or "default")
                converted = getattr(packet, _NORMS[op]) if op in _NORMS else function
                library.impl(op, partial(_run, function, converted, op in on_cuda), "AutocastCPU")


_LIBRARIES = ExitStack()
# Kernels for the ops on which the autocasts of CUDA and of the CPU differ.
_KERNELS = Shared(_register_kernels, _LIBRARIES.close)


def _run(function: Any, converted: Any, is_on_cuda: bool, *args: Any, **kwargs: Any) -> Any:
    """Run an op as the autocast of CUDA does if that is enabled, else as the CPU's; `converted` gets a dtype.

    Ops of torchvision, in float32 too, return the dtype that they were given.
    """
    passes = torch.is_autocast_enabled("cuda") is not is_on_cuda
    if passes and has_kernel_for_key(function.name(), DispatchKey.CompositeImplicitAutograd):
        return function.decompose(*args, **kwargs)  # autocast converts the arguments of the ops inside
    with ExcludeDispatchKeys(DispatchKeySet(DispatchKey.AutocastCPU)):
        if passes:
            return function(*args, **kwargs)
        name = function.overloadpacket.__name__
        if name not in _RESULT_IN_FLOAT32 and converted is function:
            leaves, structure = pytree.tree_flatten((args, kwargs))
            args, kwargs = pytree.tree_unflatten(_cast(name, leaves), structure)
            result = function(*args, **kwargs)
            if function.namespace == "aten":
                return result
            dtype = next(leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor))
            return pytree.tree_map_only(
                torch.Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, result
            )
        names = [argument.name for argument in converted._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        first = given.pop(names[0])
        if not first.is_floating_point() or first.dtype is torch.float64:  # as autocast, which takes neither
            return function(*args, **kwargs)
        given["dtype"] = given.get("dtype") or torch.float32
        return converted(first, **given)


def _cast(name: str, values: Sequence[Any]) -> list[Any]:
    """Return values, of which floating-point tensors get the dtype in which autocast runs an op."""
    floats = [value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
    dtype = torch.float32
    if name in _LOW_PRECISION:
        dtype = torch.get_autocast_dtype("cpu")
    elif name in _WIDEST and all(value.dtype is not torch.float32 for value in floats):
        return list(values)
    changed = {id(value) for value in floats if value.dtype not in (dtype, torch.float64)}
    return [value.to(dtype) if id(value) in changed else value for value in values]
