"""Formulas that the program registered with torch's flop counter, for ops without a row.

A formula registered with `torch.utils.flop_counter.register_flop_formula` computes FLOPs from an op's arguments, with
tensors or their shapes, and one multiply-add as two FLOPs. For an op with torch's tag `pointwise` the result n is a
number of FLOPs. For any other op n is read as n // 2 multiply-adds, and one FLOP if n is odd, since the formula does
not say which are multiply-adds. Reports list the ops counted this way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from fvflops.formulas.cost import Cost
from fvflops.formulas.yaml_document import TableError
from fvflops.trace import Signature, Symbol, TensorSpec, Value

_MODULE = "torch.utils.flop_counter"


def count_registered(signature: Signature) -> Cost | None:
    """Return the cost of a call by the program's formula; None where it registered none.

    Formulas registered by torch itself are ignored: tables define the cost of torch's ops. The formula is called as
    torch would call it, with tensors on the meta device. One that raises, or returns anything but an integer, raises
    TableError.

    >>> count_registered(Signature("mylib::scan", (), (), ())) is None
    True
    """
    registered = _find(signature)
    if registered is None:
        return None
    formula, op = registered
    flops = _call(formula, op, signature)
    return Cost(flops=flops) if _is_elementwise(op) else Cost(macs=flops // 2, flops=flops % 2)


def is_halved(signature: Signature) -> bool | None:
    """Return whether a registered formula's FLOPs are halved into multiply-adds; None where there is no formula."""
    registered = _find(signature)
    return None if registered is None else not _is_elementwise(registered[1])


def _find(signature: Signature) -> tuple[Callable[..., Any], Any] | None:
    """Return the formula that the program registered for a call's op, and the overload that was called."""
    for target, formula in _formulas().items():
        is_from_torch = (getattr(formula, "__module__", None) or "").partition(".")[0] == "torch"
        if not is_from_torch and _name_of(target) == signature.packet:
            return formula, getattr(target, signature.op.partition(".")[2] or "default", None)
    return None


def _is_elementwise(op: Any) -> bool:
    import torch

    return torch.Tag.pointwise in getattr(op, "tags", ())


def _formulas() -> Mapping[Any, Callable[..., Any]]:
    # If torch's flop counter was not imported, the program has not registered any formula with it.
    module = sys.modules.get(_MODULE)
    return {} if module is None else dict(module.flop_registry)


def _name_of(target: Any) -> str:
    """Return the op name, as in a signature, of a formula's target; "" for a Triton kernel."""
    from fvflops.torch_internals import HigherOrderOperator, OpOverloadPacket

    if isinstance(target, OpOverloadPacket):
        return str(target).replace(".", "::", 1)
    return f"higher_order::{target.name()}" if isinstance(target, HigherOrderOperator) else ""


def _call(formula: Callable[..., Any], overload: Any, signature: Signature) -> int:
    try:
        args, kwargs = _arguments(overload, signature)
        outputs = [_rebuild(value) for value in signature.outputs]
        result = formula(*args, **kwargs, out_val=outputs[0] if len(outputs) == 1 else tuple(outputs) or None)
        if isinstance(result, float) and result.is_integer():
            result = int(result)
        if not isinstance(result, int) or isinstance(result, bool) or result < 0:
            raise TypeError(f"it returned {result!r}, not an integer number of FLOPs")
    except Exception as error:  # user code may raise anything: name the formula
        name = getattr(formula, "__qualname__", repr(formula))
        text = f"the formula {name}, registered with {_MODULE}, raised {type(error).__name__}: {error}"
        values = ", ".join(str(value) for value in signature.inputs)
        raise TableError(f"{signature.op}: {text}; called with ({values}); the schema is {signature.schema}") from error
    return result


def _arguments(overload: Any, signature: Signature) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments as torch's dispatcher passes them: without trailing defaults."""
    values = [_rebuild(value) for value in signature.inputs]
    if not signature.names:
        return values, {}
    arguments = dict(zip(signature.names, values, strict=True))
    schema = {argument.name: argument for argument in overload._schema.arguments}
    default = {name for name in arguments if _is_default(schema[name], arguments[name])}
    positional = [name for name in arguments if not schema[name].kwarg_only]
    while positional and positional[-1] in default:
        positional.pop()
    kwargs = {name: value for name, value in arguments.items() if schema[name].kwarg_only and name not in default}
    return [arguments[name] for name in positional], kwargs


def _is_default(argument: Any, value: Any) -> bool:
    import torch

    if not argument.has_default_value() or isinstance(value, torch.Tensor):
        return False
    default = argument.default_value
    return type(value) is type(default) and bool(value == default)


def _rebuild(value: Value) -> Any:
    """Return the torch object that a value describes; a tensor is on the meta device."""
    import torch

    if isinstance(value, TensorSpec):
        return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")
    if isinstance(value, tuple):
        return [_rebuild(item) for item in value]
    if isinstance(value, Symbol):
        if value.kind == "device":
            return torch.device(value.name)
        return getattr(torch, value.name) if value.kind in ("dtype", "layout", "memory_format") else None
    return value
