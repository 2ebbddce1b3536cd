"""Count parameters: trainable and frozen, active and unused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fvflops.comparison.parameters.active_parameters import Routing, read_routing
from fvflops.comparison.parameters.operands import with_operands
from fvflops.comparison.parameters.parameter_records import ParameterCount, ParameterSummary, StoredParameters
from fvflops.trace import ModuleTree, ParameterInfo, Trace
from fvflops.trace.module_tree import add_up


def count_parameters(modules: ModuleTree, trace: Trace | None = None) -> ParameterSummary:
    """Return module or parameter name → its count, "" being the model; with a Trace, its active elements too.

    Every module has an entry under its canonical name, followed by its direct parameters. A tied parameter counts once,
    at its first name. Active elements are summed exactly, and the sum at each name is rounded down. Errors are those of
    `read_routing`.

    >>> from fvflops.trace import ModuleInfo, ParameterInfo, TensorSpec
    >>> weight = ParameterInfo("weight", TensorSpec((2, 3)), identity=0, trainable=False)
    >>> count_parameters(ModuleTree({"": ModuleInfo("", "", "Linear", parameters=(weight,))}))[""].frozen
    6
    """
    if trace is not None and trace.events is not None:
        modules = with_operands(modules, trace)
        trace = replace(trace, modules=modules)
    routing = None if trace is None else read_routing(trace)
    tensors = list(modules.parameters())
    total = modules.count_parameters()
    trainable = add_up(tensors, lambda tensor: tensor.spec.numel if tensor.trainable else 0)
    buffers = add_up(modules.buffers(), lambda tensor: tensor.spec.numel)
    used = {} if routing is None else _sum_used(modules, routing)
    dtypes = _sum_dtypes(tensors)
    return ParameterSummary(
        {
            name: ParameterCount(
                total=total[name],
                trainable=trainable[name],
                buffers=buffers[name],
                by_dtype={
                    dtype: StoredParameters(elements[name], nbytes[name])
                    for dtype, (elements, nbytes) in dtypes.items()
                    if name in elements
                },
                **{field: int(sums[name]) for field, sums in used.items()},
            )
            for module in modules.modules()
            for name in (module.name, *(parameter.name for parameter in module.parameters))
            if name == module.name or name in total
        }
    )


def _sum_dtypes(tensors: Sequence[ParameterInfo]) -> dict[str, tuple[Mapping[str, int], Mapping[str, int]]]:
    """Return dtype → elements and bytes by name."""
    groups: dict[str, list[ParameterInfo]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.spec.dtype, []).append(tensor)
    return {
        dtype: (add_up(group, lambda tensor: tensor.spec.numel), add_up(group, lambda tensor: tensor.nbytes))
        for dtype, group in groups.items()
    }


def _sum_used(modules: ModuleTree, routing: Routing) -> dict[str, Mapping[str, Any]]:
    """Return field → name → elements, for the fields that need a run."""
    tensors = list(modules.parameters())
    embeddings = [tensor for tensor in tensors if tensor.name in routing.looked_up]
    unused = [tensor for tensor in tensors if tensor.name in routing.unused]
    return {
        "active": add_up(tensors, lambda tensor: tensor.spec.numel * routing.shares[tensor.name]),
        "looked_up": add_up(embeddings, lambda tensor: tensor.spec.numel),
        "unused": add_up(unused, lambda tensor: tensor.spec.numel),
    }
