"""Cost models based on a formula table."""

from __future__ import annotations

from fvflops.counting.count_trace import RegionCost
from fvflops.counting.signature_cache import SignatureCache
from fvflops.formulas import FormulaTable, OpCost
from fvflops.trace import ModuleInfo, Region, RegionSignature, Signature, Status, StopsAt


class TableCostModel:
    """Costs of calls by a formula table; `metric` is "flops" or "activations".

    Activations of an op that the formula table counts in FLOPs only are IGNORED by the convention.
    """

    def __init__(self, table: FormulaTable, metric: str) -> None:
        if metric not in ("flops", "activations"):
            raise ValueError(f"metric must be 'flops' or 'activations'; got {metric!r}")
        self._table = table
        self._metric = metric
        self._costs: SignatureCache[tuple[OpCost, ...]] = table.cost_caches.setdefault(metric, SignatureCache())

    @property
    def stops_at(self) -> StopsAt:
        """The composite ops that the table has a row for."""
        return self._table.stops_at

    @property
    def counts_modules(self) -> bool:
        """Whether the table has a row for a module class."""
        return bool(self._table.modules)

    def op_cost(self, signature: Signature) -> tuple[OpCost, ...]:
        """Return the cost of one op call."""
        costs = self._costs.get(signature)
        if costs is None:
            costs = (self._in_metric(self._table.price(signature)),)
            if self._table.row(signature.op) is not None:  # else the program may still register a formula with torch
                self._costs.put(signature, costs)
        return costs

    def region_cost(self, region: Region, module: ModuleInfo | None, signature: RegionSignature) -> RegionCost | None:
        """Return the cost of one region call, or None where the table has no row for it."""
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


class NullCostModel:
    """Treat all ops as UNSUPPORTED except the zero-FLOP ops of a table, for an analysis without formulas."""

    def __init__(self, table: FormulaTable) -> None:
        self._table = table

    @property
    def stops_at(self) -> StopsAt:
        """The composite ops that the table has a row for."""
        return self._table.stops_at

    @property
    def counts_modules(self) -> bool:
        """False: modules are counted by the ops in them."""
        return False

    def op_cost(self, signature: Signature) -> tuple[OpCost, ...]:
        """Return a cost of zero with status ZERO_FLOP or UNSUPPORTED."""
        row = self._table.row(signature.op)
        is_zero_flop = row is not None and row.kind == "zero_flop"
        return (OpCost(signature.packet.partition("::")[2], Status.ZERO_FLOP if is_zero_flop else Status.UNSUPPORTED),)

    def region_cost(self, region: Region, module: ModuleInfo | None, signature: RegionSignature) -> RegionCost | None:
        """Return an UNSUPPORTED cost for an autograd.Function if the table is opaque, else None."""
        if region.kind == "function" and self._table.opaque:
            return RegionCost((OpCost(f"PythonOp.{region.name}", Status.UNSUPPORTED),))
        return None
