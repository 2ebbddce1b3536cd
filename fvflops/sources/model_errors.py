"""Name the module in which a model's forward raised an error, and its inputs."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from fvflops.capture.model.model import describe_inputs, module_paths
from fvflops.capture.recorder.signature import tensors_of
from fvflops.text import printable_short
from fvflops.units import format_quantity

_MODULE_CALL = "_call_impl"  # of nn.Module: its arguments are those of forward
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def describe_module(error: BaseException) -> str:
    """Return the innermost module whose forward raised an error, with its inputs, or "" if no module did.

    >>> try:
    ...     nn.Sequential(nn.Embedding(4, 2))(torch.ones(3))
    ... except RuntimeError as error:
    ...     print(describe_module(error))
    Embedding '0' on float32[3]
    """
    calls = _find_calls(error)
    if not calls:
        return ""
    inputs = describe_inputs(*_read_arguments(calls[-1][1]))
    return f"{_name(calls)} on {', '.join(inputs) or 'no inputs'}"


def explain_input(error: BaseException) -> str:
    """Return what the innermost module expects of its input and how to pass it, or "" for errors of other kinds.

    >>> try:
    ...     nn.Sequential(nn.Linear(4, 2))(torch.ones(3, 5))
    ... except RuntimeError as error:
    ...     print(explain_input(error))
    Linear '0' expects 4 input features, got float32[3, 5]; pass --input 3,4
    """
    calls = _find_calls(error)
    if not calls:
        return ""
    module, frame = calls[-1]
    tensors = _read_tensors(frame)
    if not tensors:
        return ""
    expected, shape, dtype = _compare(module, tensors[0])
    if not expected:
        return ""
    got = ", ".join(describe_inputs((tensors[0],), {}))
    inputs = _read_tensors(calls[0][1])
    # The model's only input, unchanged: what the module expects of it is what the model does.
    is_model_input = len(inputs) == 1 and inputs[0].shape == tensors[0].shape and inputs[0].dtype == tensors[0].dtype
    remedy = f"; pass --input {','.join(map(str, shape))}{dtype}" if is_model_input else ""
    return f"{_name(calls)} expects {expected}, got {got}{remedy}"


def _compare(module: nn.Module, value: torch.Tensor) -> tuple[str, list[int], str]:
    """Return what a module expects of a tensor, or "", with the shape and the dtype's suffix that it accepts."""
    shape = list(value.shape)
    if not type(module).__module__.startswith("torch.nn."):  # a subclass may accept other inputs
        return "", shape, ""
    if isinstance(module, nn.Embedding) and (value.is_floating_point() or value.is_complex()):
        return "integer indices", shape, ":int64"
    if isinstance(module, _CONVOLUTIONS):
        axis = len(shape) - len(module.kernel_size) - 1  # 1 with a batch, 0 without
        has_axis, size, noun = axis in (0, 1), module.in_channels, "input channel"
    elif isinstance(module, nn.Linear):
        axis = len(shape) - 1
        has_axis, size, noun = axis >= 0, module.in_features, "input feature"
    else:
        return "", shape, ""
    if not has_axis or shape[axis] == size:
        return "", shape, ""
    shape[axis] = size
    return format_quantity(size, noun), shape, ""


def _find_calls(error: BaseException) -> list[tuple[nn.Module, FrameType]]:
    """Return (module, frame) of each call of a module in the traceback, the outermost first."""
    calls: list[tuple[nn.Module, FrameType]] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module: Any = frame.f_locals.get("self")
        if not issubclass(type(module), nn.Module) or frame.f_code.co_name not in (_MODULE_CALL, "forward"):
            continue
        # Arguments are read from _call_impl where there is one: forward may have rebound its own.
        if not calls or calls[-1][0] is not module:
            calls.append((module, frame))
    return calls


def _name(calls: list[tuple[nn.Module, FrameType]]) -> str:
    """Return the class and the path of the last module in the first one, such as "Conv2d 'conv1'"."""
    module = calls[-1][0]
    path = next((path for path, item in module_paths(calls[0][0]) if item is module), "")
    return type(module).__name__ + (f" {printable_short(path)!r}" if path else "")


def _read_tensors(frame: FrameType) -> list[torch.Tensor]:
    return list(tensors_of(_read_arguments(frame)))


def _read_arguments(frame: FrameType) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return the arguments of a call of a module."""
    values = frame.f_locals
    code = frame.f_code
    if code.co_name == _MODULE_CALL:
        return values.get("args", ()), values.get("kwargs", {})
    names = code.co_varnames[1 : code.co_argcount]
    return tuple(values[name] for name in names if name in values), {}
