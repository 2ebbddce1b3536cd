"""The op, phase and module that launched a kernel, and the class of its work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fvflops.capture.instrument.torch_profiler import kind_of_range, module_of_range
from fvflops.explain.kernel_kinds import COMPOSITE, kind_of_kernel, kind_of_op
from fvflops.explain.trace_columns import ACTIVITY_KINDS, OP, PYTHON, RANGE, RUNTIME, TraceColumns

MODULE = "nn.Module: "
_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
# Classes of work that an optimizer's ops may have too.
_GENERIC = ("elementwise", "reduction", "copy", "other", "")
_MEMCPY, _MEMSET = ACTIVITY_KINDS.index("memcpy"), ACTIVITY_KINDS.index("memset")


class Context(NamedTuple):
    """Where a kernel was launched; `op` is the host span whose work it does, -1 for none.

    `composite` and `own` are classes: of the outermost op of COMPOSITE around, and of the innermost op, "" if unknown.
    `is_graph` is whether a captured graph was launched.
    """

    op: int
    phase: str
    module: str
    composite: str
    own: str
    is_graph: bool


class LaunchContexts:
    """Contexts of a trace's activities; `is_counted` says of an op and its inputs whether its work is known."""

    def __init__(self, columns: TraceColumns, is_counted: Callable[[str, Sequence[Any]], bool]) -> None:
        self._columns = columns
        self._is_counted = is_counted
        self._known: dict[int, Context] = {-1: Context(-1, "", "", "", "", is_graph=False)}
        self._forward = _find_forward_ops(columns)
        names = columns.names.values
        self._graphs = {number for number, name in enumerate(names) if "GraphLaunch" in str(name)}

    def of(self, op: int, launch: int) -> Context:
        """Return the context of an activity by its op and its runtime call, each -1 if unknown."""
        host = self._columns.host
        is_graph = launch >= 0 and host.name[launch] in self._graphs
        span = op if op >= 0 else launch
        if span not in self._known:
            self._known[span] = self._find(span)
        return self._known[span]._replace(is_graph=True) if is_graph else self._known[span]

    def kind(self, context: Context, name: str, activity: int) -> str:
        """Return the class of an activity by its context, name and index of ACTIVITY_KINDS."""
        by_name = kind_of_kernel(name)
        if by_name == "communication" or activity == _MEMCPY:
            return by_name if by_name == "communication" else "copy"
        if context.composite and not (context.composite == "communication" and context.own in ("copy", "elementwise")):
            return context.composite
        found = context.own or ("copy" if activity == _MEMSET else by_name)
        return "optimizer" if context.phase == "optimizer" and found in _GENERIC else found

    def _find(self, span: int) -> Context:
        host, names = self._columns.host, self._columns.names
        chain = [(index, host.kind[index], names[host.name[index]]) for index in host.ancestors(span)]
        ops = [(index, name) for index, kind, name in chain if kind == OP]
        phase, node = "forward", -1
        for index, kind, name in chain:
            if kind in (OP, RANGE) and kind_of_range(name) == "node":
                phase, node = "backward", index
            elif name.startswith(_OPTIMIZER):
                phase = "optimizer"
        module = self._module(span if node < 0 else self._forward.get(host.sequence[node], -1))
        if node >= 0:
            inside = next((index for index, kind, name in chain if _module_of(kind, name)), -1)
            if inside > node:  # a module that runs in a node of autograd: checkpointing
                phase, module = "recompute", self._module(inside)
        composite = next((found for _, name in reversed(ops) if (found := kind_of_op(name)) in COMPOSITE), "")
        own = kind_of_op(ops[0][1]) if ops else ""
        return Context(self._work_op(ops, own), phase, module, composite, own, is_graph=False)

    def _work_op(self, ops: list[tuple[int, str]], own: str) -> int:
        """Return the innermost op of known work among the enclosing ops of its class, else the innermost."""
        for index, name in ops:
            if kind_of_op(name) != own:
                break
            inputs = self._columns.host.inputs[index]
            if inputs >= 0 and self._is_counted(name, self._columns.inputs[inputs]):
                return index
        return ops[0][0] if ops else -1

    def _module(self, span: int) -> str:
        host, names = self._columns.host, self._columns.names
        for index in host.ancestors(span):
            if module := _module_of(host.kind[index], names[host.name[index]]):
                return module
        return ""


def _module_of(kind: int, name: str) -> str:
    """Return the name of the module whose call a span is, "" for another span."""
    if kind == PYTHON:
        return name.removeprefix(MODULE) if name.startswith(MODULE) else ""
    return "" if kind == RUNTIME else module_of_range(name) or ""


def _find_forward_ops(columns: TraceColumns) -> dict[int, int]:
    """Return the sequence number of autograd → the first op that has it, which is of the forward pass."""
    host = columns.host
    found: dict[int, int] = {}
    for index, number in enumerate(host.sequence):
        if number >= 0 and (number not in found or host.start[index] < host.start[found[number]]):
            found[number] = index
    return found
