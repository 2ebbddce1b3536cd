"""The pricing of calls by a formula table: in flops, in activations, or not at all."""

from __future__ import annotations

from fvflops.counting.count import Amount, RegionAmounts
from fvflops.formulas import FormulaTable, Price
from fvflops.trace import ModuleInfo, Region, RegionSignature, Signature, Status, StopsAt

# Of each table and metric the amounts of so many signatures are remembered.
_AMOUNTS = 1 << 14


class TableCostModel:
    """Prices calls by a table, `metric` being "flops" or "activations".

    Activations of an op that the table counts in flops only are OMITTED: the convention leaves them out.
    """

    def __init__(self, table: FormulaTable, metric: str) -> None:
        if metric not in ("flops", "activations"):
            raise ValueError(f"a table prices 'flops' or 'activations', not {metric!r}")
        self._table = table
        self._metric = metric
        self._amounts: dict[int, tuple[Signature, tuple[Amount, ...]]] = table.memo.setdefault(metric, {})

    @property
    def stops_at(self) -> StopsAt:
        """The composite ops that the table has a row for."""
        return self._table.stops_at

    @property
    def counts_modules(self) -> bool:
        """Whether the table has a row for a module class."""
        return bool(self._table.modules)

    def op_cost(self, signature: Signature) -> tuple[Amount, ...]:
        """Return what one call of an op comes to."""
        # By identity: a shape run hands the same signature out again, and hashing one takes as long as all the rest.
        kept, amounts = self._amounts.get(id(signature), (None, ()))
        if kept is not signature:
            amounts = (self._amount(self._table.price(signature)),)
            if len(self._amounts) >= _AMOUNTS:
                self._amounts.clear()
            if self._table.row(signature.op) is not None:  # else the program may yet register a formula, or another
                self._amounts[id(signature)] = signature, amounts
        return amounts

    def region_cost(
        self, region: Region, module: ModuleInfo | None, signature: RegionSignature
    ) -> RegionAmounts | None:
        """Return what one call of a region comes to, or None where the table has no row for it."""
        if module is not None:
            row = self._table.module_row(module.classes)
            if row is None:
                return None
            return RegionAmounts((self._amount(self._table.price_module(row, module, signature)),), row.covers)
        price = self._table.price_function(region.name, signature)
        return None if price is None else RegionAmounts((self._amount(price),))

    def _amount(self, price: Price) -> Amount:
        if self._metric == "flops":
            value = self._table.multiply_add * price.macs + price.flops
            return Amount(price.label, price.status, value, price.macs, price.flops)
        if price.activations is not None:
            return Amount(price.label, Status.COUNTED, price.activations)
        status = Status.OMITTED if price.status is Status.COUNTED else price.status
        return Amount(price.label, status)


class NullCostModel:
    """Knows only which ops of a table are free; every other op is UNKNOWN, as for an analysis without formulas."""

    def __init__(self, table: FormulaTable) -> None:
        self._table = table

    @property
    def stops_at(self) -> StopsAt:
        """The composite ops that the table has a row for."""
        return self._table.stops_at

    @property
    def counts_modules(self) -> bool:
        """False: a module is looked into."""
        return False

    def op_cost(self, signature: Signature) -> tuple[Amount, ...]:
        """Return an amount of zero, free or unknown."""
        row = self._table.row(signature.op)
        free = row is not None and row.kind == "free"
        return (Amount(signature.packet.partition("::")[2], Status.FREE if free else Status.UNKNOWN),)

    def region_cost(
        self, region: Region, module: ModuleInfo | None, signature: RegionSignature
    ) -> RegionAmounts | None:
        """Return an unknown amount for an autograd.Function where the table does not look into one, else None."""
        if region.kind == "function" and self._table.opaque:
            return RegionAmounts((Amount(f"PythonOp.{region.name}", Status.UNKNOWN),))
        return None
