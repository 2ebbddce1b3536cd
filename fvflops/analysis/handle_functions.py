"""Handles: the op that a name selects, handles that a run did not use, and handles written for fvcore."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from fvflops.counting import Handle
from fvflops.counting.cost_models import names_of
from fvflops.formulas import Call
from fvflops.formulas.registry import can_be_called
from fvflops.formulas.schema import KNOWN_NAMESPACES, overloads_of, suggest_namespace, suggest_op
from fvflops.formulas.table import FUNCTION_PREFIX, find_class
from fvflops.text import shown, suggest
from fvflops.torch_internals import OpOverload, OpOverloadPacket
from fvflops.trace import Symbol, TensorSpec, Trace, Value
from fvflops.trace.calls import packet_of

_PYTHON_NAME = re.compile(r"(?:torch\.ops\.)?([A-Za-z_]\w*)(?:\.|::)(\w+)(\.\w+)?", re.ASCII)


def read_op(op: Any) -> str:
    """Return an op's name as in a Trace from that, its Python name or the op; a missing op raises ValueError."""
    if isinstance(op, (OpOverload, OpOverloadPacket)):
        return op.name() if isinstance(op, OpOverload) else op._qualified_op_name
    if not isinstance(op, str):
        if isinstance(op, type) and issubclass(op, torch.autograd.Function):
            raise TypeError(f"set the handle of {op.__name__} by name: write {FUNCTION_PREFIX + op.__name__!r}")
        kind = type(op).__name__
        raise TypeError(f"the first argument must be the name of an op, such as 'aten::linear'; got a {kind}")
    name = op
    if name.startswith(("prim::", "unseen::", "triton::", "higher_order::")):  # without schemas
        return name
    if "::" not in name and not name.startswith("torch.ops."):
        raise ValueError(
            f"{name!r} is not an op name: write namespace::name, such as aten::linear, or for an "
            f"autograd.Function {FUNCTION_PREFIX}{name}"
        )
    if match := _PYTHON_NAME.fullmatch(name):
        namespace, op_name, overload = match.groups("")
        name = f"{namespace}::{op_name}{overload.removesuffix('.default')}"
    if namespace := suggest_namespace(name):
        near = f"{namespace}::{name.partition('::')[2]}"
        raise ValueError(f"there is no op {name}: did you mean {near}? If a library defines it, import that first")
    if name.partition("::")[0] in KNOWN_NAMESPACES and not overloads_of(name):
        raise ValueError(f"torch has no op {name}: did you mean {suggest_op(name)}?")
    return name


def list_unused(trace: Trace, handles: Mapping[str, Any], modules: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each handle, except None, of an op, function or class that a run did not call."""
    wanted = [name for name, handle in handles.items() if handle is not None]
    called = {name for signature in trace.signatures for name in names_of(signature.op)} if wanted else set()
    called |= {f"{FUNCTION_PREFIX}{region.name}" for region in trace.regions if region.kind == "function"}
    lines = [
        f"The handle of {name} is not used: the model did not call this op{suggest(name, _alike(name, called))}"
        for name in wanted
        if name not in called
    ]
    classes = [trace.modules.by_name[region.name].classes for region in trace.regions if region.kind == "module"]
    used = {find_class(modules, names) for names in classes} if modules else ()
    known = {names[0] for names in classes if names}
    lines += [
        f"The handle of {name} is not used: the model called no such module{suggest(name, known)}"
        for name, handle in modules.items()
        if handle is not None and name not in used
    ]
    return lines


def _alike(name: str, called: set[str]) -> set[str]:
    """Return the called ops to suggest: first the in-place or out-of-place form of the op, or another overload."""
    packet = packet_of(name).removesuffix("_")
    forms = {op for op in called if packet_of(op).removesuffix("_") == packet}
    return forms or called


@dataclass(frozen=True, slots=True)
class JitType:
    """Result of `value.type()`: the part of torch's TensorType that handles use."""

    spec: TensorSpec

    def sizes(self) -> list[int]:
        return list(self.spec.shape)

    def dim(self) -> int:
        return self.spec.ndim

    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return dtype

    def device(self) -> torch.device:
        return torch.device(self.spec.device)

    def scalarType(self) -> str:
        """Return TorchScript's name of the dtype: Float, Half, Long ..."""
        return _SCALAR_TYPES.get(self.spec.dtype, self.spec.dtype)

    def kind(self) -> str:
        return "TensorType"


@dataclass(frozen=True, slots=True)
class JitValue:
    """One input or output of an op, with the methods of `torch._C.Value` and of its node that handles use."""

    value: Value
    position: int

    def isCompleteTensor(self) -> bool:
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
            return [item.toIValue() for item in self.inputs()]
        return self.value.name if isinstance(self.value, Symbol) else self.value

    def node(self) -> JitValue:
        """Return the node that produced the value: itself, with inputs and a kind."""
        return self

    def inputs(self) -> list[JitValue]:
        """Return the elements of a list, [] for anything else."""
        return [JitValue(item, index) for index, item in enumerate(self.value if isinstance(self.value, tuple) else ())]

    def kind(self) -> str:
        if isinstance(self.value, tuple):
            return "prim::ListConstruct"
        return "prim::Param" if isinstance(self.value, TensorSpec) else "prim::Constant"

    def debugName(self) -> str:
        """Return a name that is unique among the inputs, or among the outputs, of a call."""
        return str(self.position)


_SCALAR_TYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "bool": "Bool",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}


def adapt_handle(name: str, handle: Any) -> Handle:
    """Return a handle that takes a Call, from a handle for a Call or one in fvcore's form.

    A handle with one required positional parameter is called as `handle(call)`, any other as fvcore's
    `handle(inputs, outputs)`. Raises TypeError for an object that cannot be called in either form.
    """
    if not callable(handle):
        raise TypeError(f"the handle of {name} must be a function, or None to ignore the op; got {shown(handle)}")
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
        if name == "aten::_convolution":  # in a traced graph it has benchmark, deterministic, cudnn_enabled, allow_tf32
            arguments += [False, False, True, True]
        result: int | Counter[str] = handle(
            [JitValue(value, position) for position, value in enumerate(arguments)],
            [JitValue(value, position) for position, value in enumerate(call.outputs)],
        )
        return result

    return call_fvcore_handle


def _takes_call(handle: Any) -> bool:
    """Return whether a handle has exactly one required positional parameter, so that it is called with the Call."""
    try:
        parameters = inspect.signature(handle).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [item for item in parameters if item.kind in positional and item.default is item.empty]
    return len(required) == 1 and all(item.kind is not item.VAR_POSITIONAL for item in parameters)
