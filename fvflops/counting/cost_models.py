"""Cost models based on a formula table, and on handles: Python functions that override a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from fvflops.counting.count_trace import CostModel, RegionCost, SignatureCache
from fvflops.formulas import Call, Cost, FormulaTable, OpCost
from fvflops.formulas.rows import default_label, show_call
from fvflops.formulas.table import FUNCTION_PREFIX, attributes_of, find_class
from fvflops.trace import ModuleInfo, Region, RegionSignature, Signature, Status, StopsAt, TensorSpec, Trace, Value
from fvflops.trace.calls import packet_of
from fvflops.trace.records import ALL_LISTS


class TableCostModel(CostModel):
    """Costs by a formula table, of FLOPs or activations; activations of an op with FLOPs only are IGNORED."""

    def __init__(self, table: FormulaTable, metric: str) -> None:
        if metric not in ("flops", "activations"):
            raise ValueError(f"metric must be 'flops' or 'activations'; got {metric!r}")
        self._table = table
        self._metric = metric
        self.stops_at = table.stops_at
        self.counts_modules = bool(table.modules)
        self._costs: SignatureCache[tuple[OpCost, ...]] = table.cost_caches.setdefault(metric, SignatureCache())

    def op_cost(self, signature: Signature) -> tuple[OpCost, ...]:
        costs = self._costs.get(signature)
        if costs is None:
            costs = (self._in_metric(self._table.price(signature)),)
            if self._table.row(signature.op) is not None:  # else the program may still register a formula with torch
                self._costs.put(signature, costs)
        return costs

    def region_cost(self, region: Region, module: ModuleInfo | None, signature: RegionSignature) -> RegionCost | None:
        if module is not None:
            row = self._table.module_row(module.classes)
            if row is None:
                return None
            return RegionCost((self._in_metric(self._table.price_module(row, module, signature)),), row.covers)
        cost = self._table.price_function(region.name, signature)
        return None if cost is None else RegionCost((self._in_metric(cost),))

    def _in_metric(self, cost: OpCost) -> OpCost:
        if self._metric == "flops":
            return cost
        if cost.activations is not None:
            return OpCost(cost.label, Status.COUNTED, cost.activations)
        return OpCost(cost.label, Status.IGNORED if cost.status is Status.COUNTED else cost.status)


class NullCostModel(CostModel):
    """Treat all ops as UNSUPPORTED except the zero-FLOP ops of a table, for an analysis without formulas."""

    def __init__(self, table: FormulaTable) -> None:
        self._table = table
        self.stops_at = table.stops_at

    def op_cost(self, signature: Signature) -> tuple[OpCost, ...]:
        row = self._table.row(signature.op)
        is_zero_flop = row is not None and row.kind == "zero_flop"
        return (OpCost(signature.packet.partition("::")[2], Status.ZERO_FLOP if is_zero_flop else Status.UNSUPPORTED),)

    def region_cost(self, region: Region, module: ModuleInfo | None, signature: RegionSignature) -> RegionCost | None:
        if region.kind == "function" and self._table.opaque:
            return RegionCost((OpCost(f"PythonOp.{region.name}", Status.UNSUPPORTED),))
        return None


Handle = Callable[[Call], "int | Counter[str]"]


class HandleCostModel(CostModel):
    """Cost by a handle if one is set for the op, else by `inner`; a handle of None makes the op zero-FLOP.

    A name without an overload matches all overloads; `aten::_convolution`, the name in traced graphs, matches
    `aten::convolution`. `modules` maps names of module classes, as in a table, to handles.
    """

    def __init__(
        self, inner: CostModel, handles: Mapping[str, Handle | None], modules: Mapping[str, Handle | None] | None = None
    ) -> None:
        self._inner = inner
        self._handles = dict(handles)
        self._modules = dict(modules or {})
        # An op with a handle keeps the values of its lists.
        values = {name: ALL_LISTS for name, handle in self._handles.items() if handle is not None}
        self.stops_at = inner.stops_at.including(self._handles, values)
        self.counts_modules = bool(self._modules) or inner.counts_modules

    def op_cost(self, signature: Signature) -> tuple[OpCost, ...]:
        for name in names_of(signature.op):
            if name in self._handles:
                return _cost(self._handles[name], name, Call.of(signature))
        return self._inner.op_cost(signature)

    def region_cost(self, region: Region, module: ModuleInfo | None, signature: RegionSignature) -> RegionCost | None:
        if module is not None:
            name = find_class(self._modules, module.classes)
            if name is not None:
                call = Call.of_region(name, signature.inputs, signature.outputs, attributes_of(module))
                return RegionCost(_cost(self._modules[name], name, call))
        elif (name := FUNCTION_PREFIX + region.name) in self._handles:
            call = Call.of_region(name, signature.inputs, signature.outputs)
            return RegionCost(_cost(self._handles[name], name, call))
        return self._inner.region_cost(region, module, signature)


def names_of(op: str) -> tuple[str, ...]:
    """Return the names by which a handle may be set for an op, the nearest first: with its overload, and without."""
    packet = packet_of(op)
    return (op, packet, "aten::_convolution") if packet == "aten::convolution" else (op, packet)


def _cost(handle: Handle | None, name: str, call: Call) -> tuple[OpCost, ...]:
    label = name.partition("::")[2] or default_label(name)
    if handle is None:
        return (OpCost(label, Status.ZERO_FLOP),)
    try:
        result = handle(call)
    except Exception as error:  # user code may raise anything: name the op and the handle
        text = " ".join(f"{type(error).__name__}: {error}".split())
        if isinstance(error, AttributeError) and error.obj is call and error.name in call.attributes:
            text += f": write call.attributes[{error.name!r}]"
        raise ValueError(f"{_describe(handle)} of {name} raised {text}; called as {show_call(call)}") from error
    sums = result if isinstance(result, Mapping) else {label: result}
    costs = [OpCost(key, Status.COUNTED, _number(value, name, handle)) for key, value in sums.items()]
    return tuple(costs) or (OpCost(label, Status.COUNTED),)


def _describe(handle: Handle) -> str:
    return f"the handle {getattr(handle, '__name__', type(handle).__name__)}"


def _number(value: Any, name: str, handle: Handle) -> int:
    """Return a handle's result as an int.

    No number, a number that is negative or no integer, and a type below 64 bits, which may overflow, raise ValueError.
    A float that is an integer is accepted, since `numpy.prod` of no sizes is 1.0.
    """
    may_overflow = getattr(getattr(value, "dtype", None), "itemsize", 8) < 8
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    is_integer = is_number and math.isfinite(value) and value == math.floor(value)
    if not is_integer or may_overflow or value < 0:
        raise ValueError(
            f"{_describe(handle)} of {name} returned {value!r} of type "
            f"{type(value).__name__}: return a Python int, 0 or more, or a Counter of them"
            + ("; a Cost is what a formula returns: see register_formula" if isinstance(value, Cost) else "")
        )
    return int(value)


def lacks_values(trace: Trace, stops_at: StopsAt) -> bool:
    """Return whether a call has a list whose values `stops_at` keeps, and the recording was not asked to."""
    for signature in trace.signatures if stops_at.values else ():
        wanted = stops_at.values_of(signature.op)
        if not wanted or {*wanted} <= {*trace.stops_at.values_of(signature.op)}:
            continue
        arguments = zip(signature.names, signature.inputs, strict=False)
        if any(_lacks_values(value) for name, value in arguments if wanted == ALL_LISTS or name in wanted):
            return True
    return False


def _lacks_values(value: Value) -> bool:
    if not isinstance(value, TensorSpec) or value.values is not None:
        return False
    return value.ndim <= 1 and not (value.is_floating_point or value.is_complex)
