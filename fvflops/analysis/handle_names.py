"""Names of ops and module classes that handles are set for: read, and compared with the calls of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from fvflops.counting.handles import names_of
from fvflops.formulas.schema import KNOWN_NAMESPACES, overloads_of, suggest_namespace, suggest_op
from fvflops.formulas.table import FUNCTION_PREFIX, find_class
from fvflops.text import suggest
from fvflops.torch_internals import OpOverload, OpOverloadPacket
from fvflops.trace import Trace
from fvflops.trace.signature import packet_of

_WITHOUT_SCHEMAS = ("prim::", "unseen::", "triton::", "higher_order::")
_PYTHON_NAME = re.compile(r"(?:torch\.ops\.)?([A-Za-z_]\w*)(?:\.|::)(\w+)(\.\w+)?", re.ASCII)


def read_op(op: Any) -> str:
    """Return the name of an op in a Trace, from that name, from torch's Python name or from the op.

    A name without a namespace, and one that no op of torch has, raise ValueError.

    >>> read_op("torch.ops.aten.gelu.default"), read_op("aten::add.Tensor"), read_op("mylib::scan")
    ('aten::gelu', 'aten::add.Tensor', 'mylib::scan')
    """
    if isinstance(op, (OpOverload, OpOverloadPacket)):
        return op.name() if isinstance(op, OpOverload) else op._qualified_op_name
    if not isinstance(op, str):
        if isinstance(op, type) and issubclass(op, torch.autograd.Function):
            raise TypeError(f"a handle of {op.__name__} goes by its name: write {FUNCTION_PREFIX + op.__name__!r}")
        kind = type(op).__name__
        raise TypeError(f"set_op_handle takes the name of an op, such as 'aten::linear'; got a {kind} first")
    name = op
    if name.startswith(_WITHOUT_SCHEMAS):
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
    """Return a sentence for each handle of an op, a function or a module class that a run did not call.

    A handle of None has no effect on a run without its op, and is not listed.
    """
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
