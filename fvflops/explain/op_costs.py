"""FLOPs, bytes and expected times of ops by their recorded shapes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from fvflops.counting import TableCostModel
from fvflops.devices.devices import Device
from fvflops.formulas import load_table
from fvflops.measure.kernels.recorded_calls import ShapeCosts, Work
from fvflops.plan.step_time.op_estimate import estimate_signature


class OpCost(NamedTuple):
    """Work, bytes and expected seconds of one call, None where unknown."""

    work: Work | None
    nbytes: int | None
    seconds: float | None


UNKNOWN_COST = OpCost(None, None, None)


class OpCosts:
    """Costs of ops by the convention exact, and on a device their expected times by the kernel models of `plan`."""

    def __init__(self, device: Device | None) -> None:
        self.device = device
        self._table = load_table("exact")
        self._cost_model = TableCostModel(self._table, "flops")
        self._known: dict[tuple[str, str], OpCost] = {}

    def is_counted(self, op: str, inputs: Sequence[Any]) -> bool:
        """Return whether the work of a call is known by its inputs."""
        return self.cost(op, inputs).work is not None

    def cost(self, op: str, inputs: Sequence[Any]) -> OpCost:
        """Return the cost of a call by its inputs as recorded: dimensions, types and values."""
        key = op, str(inputs)
        if key not in self._known:
            self._known[key] = self._find(op, inputs)
        return self._known[key]

    def _find(self, op: str, inputs: Sequence[Any]) -> OpCost:
        row = self._table.row(op)
        if row is None or row.kind == "decompose":
            return UNKNOWN_COST
        costs = ShapeCosts([(op, inputs)], self._table, self._cost_model)
        signature = costs.signature(0)
        if signature is None:
            return UNKNOWN_COST
        seconds = None
        if self.device is not None:
            with suppress(ValueError):  # a view, or an op of unknown work
                seconds = estimate_signature(signature, self.device).seconds
        return OpCost(costs.work(0), costs.nbytes(0), seconds)
