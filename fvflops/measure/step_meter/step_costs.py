"""Costs of the steps so far: each distinct call and optimizer is counted once, within a budget of time."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from fvflops.analysis import record
from fvflops.capture.model.read_module_tree import unwrap_compiled
from fvflops.devices.utilisation import UtilisationError
from fvflops.formulas import FormulaTable
from fvflops.measure.step_meter.call_costs import Peaks, count_call, count_optimizer, quiet_log
from fvflops.measure.step_meter.call_sizes import SizeFamilies
from fvflops.measure.step_meter.metered_calls import ModelCall
from fvflops.measure.step_meter.step_figures import UNKNOWN_COST, StepCost, WorkParts, sum_costs
from fvflops.reports.escaping import list_ops
from fvflops.trace import Entry, Status

_LOGGER = logging.getLogger("fvflops")
# Distinct steps that are recorded because they cannot be counted by shapes.
_MOST_RECORDED = 20
# Calls that are counted right after their step; later ones wait until counting takes this share of the loop's time.
_FIRST_COUNTS = 6
_SHARE = 0.005
_MOST_WAITING = 500  # calls whose inputs are held


class StepWork(NamedTuple):
    """What a step consists of: the numbers of its calls and of its optimizers, each with how often.

    `recorded` is the key of the step if it is recorded: that of its batch, or its calls.
    """

    calls: frozenset[tuple[int, int]]
    optimizers: frozenset[tuple[int, int]]
    recorded: Hashable
    is_batch: bool


class StepCosts:
    """Costs by the keys of calls, recorded steps and optimizers; nothing here raises in a loop unless `warn` does.

    `warn` is called with a figure's name and the reason why it stays unknown. `version` changes when more is known.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        table: FormulaTable,
        peaks: Peaks,
        warn: Callable[[str, str], None],
    ) -> None:
        self._optimizers = optimizers
        self._table = table
        self._peaks = peaks
        self._warn = warn
        names = _name(models) if len(models) > 1 else [""]
        self._prefixes = {id(model): name for model, name in zip(models, names, strict=True)}
        self._numbers: dict[Hashable, int] = {}  # full key of a call → its number
        self._known: set[Hashable] = set()  # keys of calls whose inputs are not needed
        self._waiting: dict[int, ModelCall] = {}
        self._counted: dict[int, StepCost] = {}
        self._failed: set[int] = set()
        self._families = SizeFamilies()
        self._recorded: dict[Hashable, StepCost] = {}
        self._can_record = True
        self._unsupported: set[str] = set()  # ops that a warning has named
        self._optimizer_costs: dict[int, StepCost] = {}
        self.parts: dict[Hashable, WorkParts] = {}  # number of a call, or key of a recorded step → its FLOPs by part
        self.largest: tuple[float, ModelCall | None] = 0, None  # model FLOPs of a call, and the call
        self._spent = 0.0
        self._last = 0.0
        self.version = 0

    def is_known(self, key: Hashable) -> bool:
        """Return whether a call of this key was counted or waits to be, so that its inputs are not needed."""
        return key in self._known

    def add(self, calls: Sequence[ModelCall], optimizers: Mapping[int, int], batch: Hashable) -> StepWork:
        """Return the work of a step, and have its calls counted later."""
        numbers = frozenset(Counter(map(self._add_call, calls)).items())
        steps = frozenset(optimizers.items())  # before they are counted, which calls their hooks
        for optimizer, _ in steps:
            self._of_optimizer(optimizer)
        return StepWork(numbers, steps, numbers if batch is None else batch, batch is not None)

    def _add_call(self, call: ModelCall) -> int:
        key = call.full_key
        number = self._numbers.setdefault(key, len(self._numbers))
        if number in self._counted or number in self._failed or number in self._waiting:
            return number
        if call.inputs is None:
            if self._of_call(number) is UNKNOWN_COST:
                # Outputs without gradients until now have them: the inputs of the next such call are needed.
                self._known.discard(call.key)
            return number
        if call.gradients or not call.with_grad:
            self._known.add(call.key)
        if number not in self._families:
            self._families.add(number, call.kind, call.key[1])
        if self._families.gaps([number], self._counted)[number] and len(self._waiting) < _MOST_WAITING:
            self._waiting[number] = call.held()
        return number

    def count_waiting(self, seconds_so_far: float) -> None:
        """Count waiting calls that fit into the budget: the first few, and then a small share of the loop's time."""
        while self._waiting and (
            len(self._counted) + len(self._failed) < _FIRST_COUNTS or self._spent + self._last < _SHARE * seconds_so_far
        ):
            if not self._count_next():
                return

    def count_all(self, seconds: float = math.inf) -> None:
        """Count all waiting calls whose cost is not interpolated, as long as they take less than some seconds."""
        deadline = time.perf_counter() + seconds
        while self._count_next(interpolated=False):
            if time.perf_counter() > deadline:
                self._warn("model_flops", f"{len(self._waiting)} distinct calls took too long to count")
                return

    def _count_next(self, *, interpolated: bool = True) -> bool:
        """Count the most informative pending call, and return whether there was one.

        Without `interpolated` only calls are counted whose cost cannot be interpolated.
        """
        start = time.perf_counter()
        gaps = self._families.gaps(self._waiting, self._counted)
        for number in [number for number, gap in gaps.items() if not gap]:
            del self._waiting[number]
        wanted = [number for number in self._waiting if interpolated or self._of_call(number) is UNKNOWN_COST]
        if not wanted:
            return False
        number = max(wanted, key=gaps.__getitem__)
        call = self._waiting.pop(number)
        try:
            entries = count_call(call, self._table).entries
            self._warn_of_unsupported(entries)
            cost = self._counted[number] = self._peaks.cost_of(entries)
            self.parts[number] = WorkParts.of(entries, self._prefixes.get(id(call.model), ""))
            self.largest = max(self.largest, (cost.model_flops, call), key=lambda pair: pair[0])
        except UtilisationError:
            raise
        except Exception as error:  # whatever it is, it must not stop the training
            self._failed.add(number)
            name = type(call.model).__name__
            _LOGGER.info("%s cannot be counted by shapes, so that a step is recorded: %s", name, error)
        self.version += 1
        self._last = time.perf_counter() - start
        if len(self._counted) + len(self._failed) > _FIRST_COUNTS:
            self._spent += self._last
        return True

    def needs_recording(self, work: StepWork) -> bool:
        """Return whether a step of this work has to be recorded."""
        return self._is_recorded(work) and self.needs_batch(work.recorded)

    def needs_batch(self, key: Hashable) -> bool:
        """Return whether the step of a batch of this key has to be recorded."""
        if key in self._recorded or not self._can_record:
            return False
        if len(self._recorded) < _MOST_RECORDED:
            return True
        self._warn("model_flops", f"{len(self._recorded)} different steps were recorded, and no more are")
        return False

    def _is_recorded(self, work: StepWork) -> bool:
        """Return whether the calls of a step do not determine its cost."""
        return work.is_batch or any(number in self._failed for number, _ in work.calls)

    def start_recording(self) -> record | None:
        """Return a started recording, None if there cannot be one."""
        try:
            with quiet_log():
                return record(None, table=self._table, warn=False).__enter__()
        except Exception as error:  # whatever it is, it must not stop the training
            self._can_record = False
            self._warn("model_flops", f"a step cannot be recorded: {error}")
            return None

    def add_recording(self, work: StepWork, recording: record) -> None:
        """Store the cost of a recorded step, without its optimizers."""
        self.version += 1
        self._recorded[work.recorded] = UNKNOWN_COST
        try:
            entries = [entry for entry in recording.counts().entries if entry.phase != "optimizer"]
            self._warn_of_unsupported(entries)
            self._recorded[work.recorded] = self._peaks.cost_of(entries)
            self.parts[work.recorded] = WorkParts.of(entries)
        except UtilisationError:
            raise
        except Exception as error:  # as above
            self._warn("model_flops", f"a recorded step cannot be counted: {error}")

    def of(self, work: StepWork) -> StepCost:
        """Return the cost of a step; NaN as long as it is not counted."""
        if self._is_recorded(work):
            cost = self._recorded.get(work.recorded, UNKNOWN_COST)
        elif not work.calls:
            reason = "no call of the models was seen in a step, as where a compiled function calls them"
            self._warn("model_flops", f"{reason}: use meter.step(batch), or pass the modules that the loop calls")
            cost = UNKNOWN_COST
        else:
            cost = sum_costs(self._of_call(number).times(times) for number, times in work.calls)
        return cost + sum_costs(self._of_optimizer(number).times(times) for number, times in work.optimizers)

    def parts_of(self, works: Iterable[StepWork]) -> tuple[WorkParts, int]:
        """Return the FLOPs of some steps by part without their optimizers, and how many of the steps have them."""
        total, steps = WorkParts(Counter(), Counter(), Counter()), 0
        for work, times in Counter(works).items():
            calls = {(work.recorded, 1)} if self._is_recorded(work) else work.calls
            if calls and all(key in self.parts for key, _ in calls):
                steps += times
                for key, calls_of_step in calls:
                    total.add(self.parts[key], times * calls_of_step)
        return total, steps

    def _of_call(self, number: int) -> StepCost:
        if number in self._counted:
            return self._counted[number]
        return self._families.cost(number, self._counted) or UNKNOWN_COST

    def _of_optimizer(self, number: int) -> StepCost:
        if number not in self._optimizer_costs:
            optimizer = self._optimizers[number]
            try:
                entries = [e for e in count_optimizer(optimizer, self._table).entries if e.phase == "optimizer"]
                self._warn_of_unsupported(entries)
                cost = self._peaks.cost_of(entries)
            except UtilisationError:
                raise
            except Exception as error:  # as above
                cost = StepCost(hardware_flops=math.nan, hardware_seconds=math.nan)
                self._warn("hardware_flops", f"the steps of {type(optimizer).__name__} cannot be counted: {error}")
            self._optimizer_costs[number] = cost
        return self._optimizer_costs[number]

    def _warn_of_unsupported(self, entries: Iterable[Entry]) -> None:
        """Log the unsupported ops of counted work that no warning has named yet."""
        calls: Counter[str] = Counter()
        for entry in entries:
            if entry.status is Status.UNSUPPORTED and entry.op not in self._unsupported:
                calls[entry.op] += entry.calls
        if calls:
            self._unsupported.update(calls)
            ops = list_ops(calls)
            _LOGGER.warning("StepMeter: unsupported, so not counted: %s; a table with rows for them counts them", ops)


def _name(models: Sequence[nn.Module]) -> list[str]:
    """Return the names of several models, as prefixes of those of their modules."""
    classes = [type(unwrap_compiled(model)).__name__ for model in models]
    return [
        f"{name}." if classes.count(name) == 1 else f"{name}{classes[:index].count(name)}."
        for index, name in enumerate(classes)
    ]
