"""Costs of the steps so far: each distinct call and optimizer is counted once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence

from torch.optim import Optimizer

from fvflops.analysis import record
from fvflops.features.step_meter.calls import ModelCall
from fvflops.features.step_meter.compute import Peaks, count_call, count_optimizer, quiet_log
from fvflops.features.step_meter.model import UNKNOWN_COST, StepCost, sum_costs
from fvflops.formulas import FormulaTable

_LOGGER = logging.getLogger("fvflops")
# Distinct steps that are recorded because they cannot be counted by shapes.
_MOST_RECORDED = 20


class StepCosts:
    """Costs by the keys of calls, recorded steps and optimizers; nothing here raises in a loop.

    `warn` is called with a figure's name and the reason why it stays unknown.
    """

    def __init__(
        self, table: FormulaTable, peaks: Peaks, optimizers: Sequence[Optimizer], warn: Callable[[str, str], None]
    ) -> None:
        self._table = table
        self._peaks = peaks
        self._optimizers = optimizers
        self._warn = warn
        self._costs: dict[Hashable, StepCost] = {}
        self._counted: set[Hashable] = set()
        self._recorded = 0

    def is_counted(self, key: Hashable) -> bool:
        """Return whether a call of this key was counted, so that its inputs are not needed."""
        return key in self._counted

    def needs_recording(self, key: Hashable) -> bool:
        """Return whether a step of this key has to be recorded."""
        if key in self._costs:
            return False
        if self._recorded < _MOST_RECORDED:
            return True
        self._warn("model_flops", f"{self._recorded} different steps were recorded, and no more are")
        return False

    def start_recording(self) -> record | None:
        """Return a started recording, None if there cannot be one."""
        try:
            with quiet_log():
                return record(None, table=self._table, warn=False).__enter__()
        except Exception as error:  # whatever it is, it must not stop the training
            self._recorded = _MOST_RECORDED
            self._warn("model_flops", f"a step cannot be recorded: {error}")
            return None

    def add_recording(self, key: Hashable, recording: record) -> None:
        """Store the cost of a recorded step, without its optimizers."""
        self._recorded += 1
        try:
            self._costs[key] = self._peaks.cost_of(recording.counts(), ("forward", "recompute", "backward"))
        except Exception as error:  # as above
            self._costs[key] = UNKNOWN_COST
            self._warn("model_flops", f"a recorded step cannot be counted: {error}")

    def of_step(self, key: Hashable) -> StepCost:
        """Return the cost of a recorded step."""
        return self._costs.get(key, UNKNOWN_COST)

    def of_calls(self, calls: Sequence[ModelCall]) -> StepCost | None:
        """Return the cost of calls with their backward passes, None if shapes alone do not determine it."""
        costs = [self._of_call(call) for call in calls]
        return None if None in costs else sum_costs(filter(None, costs))

    def _of_call(self, call: ModelCall) -> StepCost | None:
        key = call.full_key
        if key not in self._costs:
            if call.inputs is None:
                # Outputs without gradients until now have them: the inputs of the next such call are needed.
                self._counted.discard(call.key)
                return UNKNOWN_COST
            if call.gradients or not call.with_grad:
                self._counted.add(call.key)
            try:
                self._costs[key] = self._peaks.cost_of(count_call(call, self._table))
            except Exception as error:  # as above
                self._costs[key] = UNKNOWN_COST
                name = type(call.model).__name__
                _LOGGER.info("%s cannot be counted by shapes, so that a step is recorded: %s", name, error)
        call.inputs = call.modes = None
        cost = self._costs[key]
        return None if cost is UNKNOWN_COST else cost

    def of_optimizers(self, steps: Mapping[int, int]) -> StepCost:
        """Return the cost of optimizer steps: number of the optimizer → steps."""
        return sum_costs(self._of_optimizer(number).times(times) for number, times in steps.items())

    def _of_optimizer(self, number: int) -> StepCost:
        key = "optimizer", number
        if key not in self._costs:
            optimizer = self._optimizers[number]
            try:
                self._costs[key] = self._peaks.cost_of(count_optimizer(optimizer, self._table), ("optimizer",))
            except Exception as error:  # as above
                self._costs[key] = StepCost(hardware_flops=math.nan, hardware_seconds=math.nan)
                self._warn("hardware_flops", f"the steps of {type(optimizer).__name__} cannot be counted: {error}")
        return self._costs[key]
