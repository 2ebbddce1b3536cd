"""Count a trace: the cost of each distinct signature is worked out once, and multiplied by how often it ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from fvflops.counting.compute_dtype import find_dtype
from fvflops.formulas import OpCost
from fvflops.trace import (
    Counts,
    Entry,
    ModuleInfo,
    Region,
    RegionSignature,
    Signature,
    StopsAt,
    TensorSpec,
    Trace,
    Value,
    tensors_in,
)


class RegionCost(NamedTuple):
    """What one call of a region costs; where it is `exclusive`, what ran inside is not counted beside it."""

    costs: tuple[OpCost, ...]
    exclusive: bool = True


# What one call costs, the op's name, the elements that it puts out, and its dtype.
_CallCost = tuple[tuple[OpCost, ...], str, int, str]


class CostModel(Protocol):
    """Whatever can say what a call costs: a table, or a table with handles before it."""

    @property
    def stops_at(self) -> StopsAt:
        """The composite ops that it has something to say about."""

    @property
    def counts_modules(self) -> bool:
        """Whether it has something to say about any module."""

    def op_cost(self, signature: Signature) -> tuple[OpCost, ...]:
        """Return what one call of an op costs, for each label where a handle gives several."""

    def region_cost(self, region: Region, module: ModuleInfo | None, signature: RegionSignature) -> RegionCost | None:
        """Return what one call of a region costs, or None where nothing is said of it: look inside."""


def count(trace: Trace, cost_model: CostModel, metric: str) -> Counts:
    """Return the counts of one metric over a trace.

    A region that has a cost covers all that ran inside it, unless this says otherwise; the outermost such region wins.
    What the backward pass of such a region does is counted op by op.
    """
    costs = region_costs(trace, cost_model)
    covered = find_covered(trace, costs)
    scopes = trace.scopes()
    groups = _groups(trace)
    by_signature: dict[int, _CallCost] = {}
    entries: list[Entry] = []
    for (index, stack, phase), calls in trace.calls.items():
        if (stack, phase) in covered:
            continue
        cost = by_signature.get(index)
        if cost is None:
            op = trace.signatures[index]
            cost = by_signature[index] = (
                cost_model.op_cost(op),
                op.packet,
                _elements(op.outputs),
                find_dtype(op.op, op.names, op.inputs, op.outputs),
            )
        _add(entries, cost, scopes[stack], phase, calls, groups.get(stack, ""))
    for (index, stack, phase), calls in trace.region_calls.items():
        if index not in costs or (stack, phase) in covered:
            continue
        signature = trace.region_signatures[index]
        region = trace.regions[signature.region]
        scope = scopes[stack] + ((region.name,) if region.kind == "module" else ())
        inputs, outputs = signature.inputs, signature.outputs
        dtype = find_dtype("", (), inputs, outputs)
        cost = costs[index].costs, name_region(trace, region), _elements(outputs), dtype
        _add(entries, cost, scope, phase, calls, groups.get(stack, ""))
    return Counts(metric, trace.modules, tuple(entries))


def region_costs(trace: Trace, cost_model: CostModel) -> dict[int, RegionCost]:
    """Return what one call of each region costs, by its signature's index; one that has no cost is left out."""
    called = dict.fromkeys([index for index, _, _ in trace.region_calls]) if _needs_regions(trace, cost_model) else ()
    return {
        index: cost
        for index in called
        if (cost := _region_cost(trace, cost_model, trace.region_signatures[index])) is not None
    }


def find_covered(trace: Trace, costs: Mapping[int, RegionCost]) -> set[tuple[int, str]]:
    """Return the stacks inside regions that cover what runs in them, with the phases in which these were run."""
    covering: dict[str, set[int]] = {}
    for index, _, phase in trace.region_calls:
        if index in costs and costs[index].exclusive:
            covering.setdefault(phase, set()).add(trace.region_signatures[index].region)
    return {
        (number, phase)
        for phase, regions in covering.items()
        for number, stack in enumerate(trace.stacks)
        if not regions.isdisjoint(stack)
    }


def _groups(trace: Trace) -> dict[int, str]:
    """Return the parameter groups for which ops ran, by their stacks."""
    groups = {index: region.name for index, region in enumerate(trace.regions) if region.kind == "group"}
    if not groups:
        return {}
    return {number: groups[stack[-1]] for number, stack in enumerate(trace.stacks) if stack and stack[-1] in groups}


def _needs_regions(trace: Trace, cost_model: CostModel) -> bool:
    return cost_model.counts_modules or any(region.kind == "function" for region in trace.regions)


def _region_cost(trace: Trace, cost_model: CostModel, signature: RegionSignature) -> RegionCost | None:
    region = trace.regions[signature.region]
    module = trace.modules.places[region.name] if region.kind == "module" else None
    return cost_model.region_cost(region, module, signature)


def name_region(trace: Trace, region: Region) -> str:
    """Return the name under which a region stands in the ledger: its function's key, or its module's class."""
    if region.kind == "function":
        return f"prim::PythonOp.{region.name}"
    place = trace.modules.places[region.name]
    return place.classes[0] if place.classes else place.class_name


def _elements(outputs: tuple[Value, ...]) -> int:
    if len(outputs) == 1 and isinstance(outputs[0], TensorSpec):
        return outputs[0].numel
    return sum(spec.numel for spec in tensors_in(outputs))


def _add(entries: list[Entry], cost: _CallCost, scope: tuple[str, ...], phase: str, calls: int, group: str) -> None:
    """Append the entries of a signature's calls; of several costs the first stands for the calls themselves."""
    costs, op, elements, dtype = cost
    seen = calls
    for label, status, value, macs, flops, _ in costs:
        row = (scope, phase, op, label, status, seen, value * calls, macs * calls, flops * calls, elements * seen)
        entries.append(tuple.__new__(Entry, (*row, dtype, group)))
        seen = 0
