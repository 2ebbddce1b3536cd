"""Substitutes for `torch._C.Value`, so that handles written for fvcore run unmodified."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from fvflops.counting import Handle
from fvflops.formulas import Call
from fvflops.formulas.registry import can_be_called
from fvflops.trace import Symbol, TensorSpec, Value

FvcoreHandle = Callable[[list[Any], list[Any]], Any]

# In a traced graph the op is `_convolution`, with four more arguments than `convolution`.
_CONVOLUTION_FLAGS: Mapping[str, Value] = {
    "benchmark": False,
    "deterministic": False,
    "cudnn_enabled": True,
    "allow_tf32": True,
}


@dataclass(frozen=True, slots=True)
class JitType:
    """Result of `value.type()`: the part of torch's TensorType that handles use."""

    spec: TensorSpec

    def sizes(self) -> list[int]:
        """Return the shape."""
        return list(self.spec.shape)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return self.spec.ndim

    def dtype(self) -> torch.dtype:
        """Return the dtype."""
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return dtype

    def device(self) -> torch.device:
        """Return the device."""
        return torch.device(self.spec.device)

    def scalarType(self) -> str:
        """Return TorchScript's name of the dtype: Float, Half, Long ..."""
        return _SCALAR_TYPES.get(self.spec.dtype, self.spec.dtype)

    def kind(self) -> str:
        """Return the name of the type's kind."""
        return "TensorType"


@dataclass(frozen=True, slots=True)
class JitNode:
    """Result of `value.node()`: the node that produced a value; only that of a list has inputs."""

    value: Value

    def inputs(self) -> list[JitValue]:
        """Return the elements of a list, [] for anything else."""
        return [JitValue(item, index) for index, item in enumerate(_items(self.value))]

    def kind(self) -> str:
        """Return the name of the node's op."""
        if isinstance(self.value, tuple):
            return "prim::ListConstruct"
        return "prim::Param" if isinstance(self.value, TensorSpec) else "prim::Constant"


@dataclass(frozen=True, slots=True)
class JitValue:
    """One input or output of an op, with the methods of `torch._C.Value` that handles use.

    >>> JitValue(TensorSpec((2, 3)), 0).type().sizes()
    [2, 3]
    >>> JitValue(True, 5).toIValue()
    True
    """

    value: Value
    position: int

    def isCompleteTensor(self) -> bool:
        """Return whether this is a tensor."""
        return isinstance(self.value, TensorSpec)

    def type(self) -> JitType:
        """Return the tensor's type; anything but a tensor raises TypeError."""
        if not isinstance(self.value, TensorSpec):
            raise TypeError(f"value %{self.position} is {self.value!r}, not a tensor: test isCompleteTensor() first")
        return JitType(self.value)

    def toIValue(self) -> Any:
        """Return a constant's Python value, None for a tensor."""
        if isinstance(self.value, TensorSpec):
            return None
        if isinstance(self.value, tuple):
            return [JitValue(item, 0).toIValue() for item in self.value]
        if isinstance(self.value, Symbol):
            return self.value.name
        return self.value

    def node(self) -> JitNode:
        """Return the node that produced this value."""
        return JitNode(self.value)

    def debugName(self) -> str:
        """Return a name that is unique among the values of one side of a call."""
        return str(self.position)


_SCALAR_TYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}


def adapt_handle(name: str, handle: Any) -> Handle:
    """Return a handle that takes a Call, from a handle for a Call or one in fvcore's form.

    A handle with one required positional parameter is called as `handle(call)`, any other as fvcore's
    `handle(inputs, outputs)`. Any other object raises TypeError.
    """
    if not callable(handle):
        raise TypeError(f"the handle of {name} must be a function, or None to ignore the op; got {handle!r}")
    if not (can_be_called(handle, 1) or can_be_called(handle, 2)):
        raise TypeError(
            f"the handle of {name} takes {inspect.signature(handle)}: write a function of (call), or of "
            "(inputs, outputs) as in fvcore"
        )
    if _takes_call(handle):
        call_handle: Handle = handle
        return call_handle

    @wraps(handle, updated=())
    def call_fvcore_handle(call: Call) -> int | Counter[str]:
        arguments = list(call.arguments.values())
        if name == "aten::_convolution":
            arguments += _CONVOLUTION_FLAGS.values()
        result: int | Counter[str] = handle(
            [JitValue(value, position) for position, value in enumerate(arguments)],
            [JitValue(value, position) for position, value in enumerate(call.outputs)],
        )
        return result

    return call_fvcore_handle


def _takes_call(handle: Any) -> bool:
    try:
        parameters = inspect.signature(handle).parameters.values()
    except (TypeError, ValueError):
        return False
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [item for item in parameters if item.kind in positional and item.default is item.empty]
    return len(required) == 1


def _items(value: Value) -> tuple[Value, ...]:
    return value if isinstance(value, tuple) else ()
