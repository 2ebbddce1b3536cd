"""Costs of the steps so far: each distinct call and optimizer is counted once, within a budget of time."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from math import inf, isclose, isnan, nan, prod
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from fvflops.analysis.recording import record
from fvflops.capture.model.read_module_tree import unwrap_compiled
from fvflops.devices.utilisation import UtilisationError
from fvflops.formulas import FormulaTable
from fvflops.measure.step_meter.call_costs import Peaks, Warn, count_call, count_optimizer, quiet_log
from fvflops.measure.step_meter.metered_calls import ModelCall
from fvflops.measure.step_meter.step_figures import UNKNOWN_COST, StepCost, WorkParts, divide_flops
from fvflops.reports.escaping import list_ops
from fvflops.trace import Entry, Status

# A quadratic is determined by three counts; it is accepted if it predicts two or more other counts.
_LEAST = 5
# Above this number of counts a polynomial is not verified further.
_ENOUGH = 12
# Sets of positions with one size, of calls that are otherwise equal.
_MOST_AXES = 64


class SizeFamilies:
    """Families of calls that differ in one size alone, at one or several positions of their shapes.

    Calls are numbers here. The cost of a call that is not counted is interpolated between the counted sizes of its
    family by a quadratic, if that gives the counts of all others exactly. Attention is quadratic in the sequence
    length, other ops are linear. Where the cost jumps, as with padding to a multiple, the counts show it: such a call
    has no cost until it is counted. Sets of counted calls passed to these methods may only grow.
    """

    def __init__(self) -> None:
        self._axes: dict[Hashable, dict[tuple[int, ...], None]] = {}  # template → positions of equal sizes in a call
        self._families: dict[Hashable, dict[int, int]] = {}  # (template, axis, other sizes) → size → call
        self._members: dict[int, list[tuple[int, dict[int, int]]]] = {}  # call → (its size, family) for each family
        self._fits: dict[int, tuple[int, _Fit | None]] = {}  # id of a family → number of all counts, and its fit

    def __contains__(self, call: int) -> bool:
        return call in self._members

    def add(self, call: int, kind: Hashable, description: Hashable) -> None:
        """Add a call of a kind with a description: nested tuples in which each integer is a size."""
        sizes: list[int] = []
        template = kind, _split(description, sizes)
        axes, members = self._axes.setdefault(template, {}), list[tuple[int, dict[int, int]]]()
        for size in [*dict.fromkeys(sizes)][: _MOST_AXES - len(axes)]:
            axes[tuple([index for index, other in enumerate(sizes) if other == size])] = None
        for axis in axes:
            if len({sizes[index] for index in axis}) == 1:
                others = tuple([size for index, size in enumerate(sizes) if index not in axis])
                family = self._families.setdefault((template, axis, others), {})
                family[sizes[axis[0]]] = call
                members.append((sizes[axis[0]], family))
        self._members[call] = members

    def cost(self, call: int, counted: Mapping[int, StepCost]) -> StepCost | None:
        """Return the interpolated cost of a call, None where its family has no verified polynomial there."""
        for size, family in self._members.get(call, ()):
            fit = self._fit(family, counted)
            if fit is not None and fit.first <= size <= fit.last:
                return fit.at(size)
        return None

    def gaps(self, calls: Iterable[int], counted: Mapping[int, StepCost]) -> dict[int, float]:
        """Return how far the next counted size is in the families of calls; 0 if counting a call adds nothing."""
        counted_sizes: dict[int, list[int]] = {}

        def gap(size: int, family: dict[int, int]) -> float:
            if id(family) not in counted_sizes:
                counted_sizes[id(family)] = [other for other, member in family.items() if member in counted]
            sizes = counted_sizes[id(family)]
            if len(sizes) >= _ENOUGH and min(sizes) <= size <= max(sizes) and self._fit(family, counted) is not None:
                return 0
            return min((abs(size - other) for other in sizes), default=inf)

        return {call: min((gap(*member) for member in self._members[call]), default=inf) for call in calls}

    def _fit(self, family: dict[int, int], counted: Mapping[int, StepCost]) -> _Fit | None:
        number, fit = self._fits.get(id(family), (-1, None))
        if number != len(counted):
            fit = _find_fit({size: counted[call] for size, call in family.items() if call in counted})
            self._fits[id(family)] = len(counted), fit
        return fit


def _split(value: Hashable, sizes: list[int]) -> Hashable:
    """Return a description without its integers, which are appended to `sizes`."""
    if isinstance(value, tuple):
        return tuple([_split(item, sizes) for item in value])
    if isinstance(value, int) and not isinstance(value, bool):
        sizes.append(value)
        return int
    return value


class _Fit(NamedTuple):
    """A quadratic for each part of a cost, by its values at three sizes, from the first to the last counted size."""

    first: int
    last: int
    nodes: tuple[tuple[int, StepCost], ...]

    def at(self, size: int) -> StepCost:
        """Return the cost at a size."""
        sizes = [node for node, _ in self.nodes]
        factors = ([Fraction(size - other, node - other) for other in sizes if other != node] for node in sizes)
        weights = [prod(each) for each in factors]
        parts: list[float] = []
        for values in zip(*(cost for _, cost in self.nodes), strict=True):
            if any(map(isnan, values)):
                parts.append(nan)
                continue
            exact = sum((weight * Fraction(value) for weight, value in zip(weights, values, strict=True)), Fraction())
            parts.append(exact.numerator if exact.denominator == 1 else float(exact))
        return StepCost(*parts)

    def matches(self, size: int, cost: StepCost) -> bool:
        """Return whether a cost matches the fit: FLOPs exactly, seconds up to rounding."""
        return all(
            (isnan(a) and isnan(b)) or a == b or (isinstance(b, float) and isclose(a, b, rel_tol=1e-9))
            for a, b in zip(self.at(size), cost, strict=True)
        )


def _find_fit(costs: Mapping[int, StepCost]) -> _Fit | None:
    """Return the quadratic through the costs at all sizes, None if there is none or they are too few."""
    if len(costs) < _LEAST or UNKNOWN_COST in costs.values():
        return None
    sizes = sorted(costs)
    nodes = tuple((size, costs[size]) for size in (sizes[0], sizes[len(sizes) // 2], sizes[-1]))
    fit = _Fit(sizes[0], sizes[-1], nodes)
    return fit if all(fit.matches(size, cost) for size, cost in costs.items()) else None


_LOGGER = logging.getLogger("fvflops")
# Distinct steps that are recorded because shape execution cannot count them.
_MOST_RECORDED = 20
# Calls that are counted right after their step; later ones wait until counting takes this share of the loop's time.
_FIRST_COUNTS = 6
_SHARE = 0.005
_MOST_WAITING = 500  # calls whose inputs are held


class StepWork(NamedTuple):
    """Parts of a step: the numbers of its calls and of its optimizers, each with how often.

    `recorded` is the key of the step if it is recorded: its batch's key, or its calls.
    """

    calls: frozenset[tuple[int, int]]
    optimizers: frozenset[tuple[int, int]]
    recorded: Hashable
    is_batch: bool


class StepCosts:
    """Costs by the keys of calls, recorded steps and optimizers; nothing here raises in a loop unless `warn` does.

    `version` changes when more is known.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        table: FormulaTable,
        peaks: Peaks,
        warn: Warn,
    ) -> None:
        self._optimizers, self._table, self._peaks, self._warn = optimizers, table, peaks, warn
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
        self._spent = self._last = 0.0  # seconds of counting: after the first calls, and of the last one
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
        number = self._numbers.setdefault(call.full_key, len(self._numbers))
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
            self._waiting[number] = call.without_values()
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
        """Count the most informative pending call, of all or without `interpolated` ones; return if there was one."""
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
            self.parts[number] = divide_flops(entries, self._prefixes.get(id(call.model), ""))
            self.largest = max(self.largest, (cost.model_flops, call), key=lambda pair: pair[0])
        except UtilisationError:
            raise
        except Exception as error:  # whatever it is, it must not stop the training
            self._failed.add(number)
            name = type(call.model).__name__
            _LOGGER.info("%s cannot be counted in shape execution, so a step is recorded: %s", name, error)
        self.version += 1
        self._last = time.perf_counter() - start
        if len(self._counted) + len(self._failed) > _FIRST_COUNTS:
            self._spent += self._last
        return True

    def needs_recording(self, work: StepWork) -> bool:
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
            self.parts[work.recorded] = divide_flops(entries)
        except UtilisationError:
            raise
        except Exception as error:  # as above
            self._warn("model_flops", f"a recorded step cannot be counted: {error}")

    def of(self, work: StepWork) -> StepCost:
        """Return the cost of a step; NaN as long as it is not counted."""
        if self._is_recorded(work):
            cost = self._recorded.get(work.recorded, UNKNOWN_COST)
        elif not work.calls:
            reason = "no call of the models was seen in a step, such as where a compiled function calls them"
            self._warn("model_flops", f"{reason}: use meter.step(batch), or pass the modules that the loop calls")
            cost = UNKNOWN_COST
        else:
            cost = sum((self._of_call(number).times(times) for number, times in work.calls), StepCost())
        return sum((self._of_optimizer(number).times(times) for number, times in work.optimizers), cost)

    def parts_of(self, works: Iterable[StepWork]) -> tuple[WorkParts, int]:
        """Return the FLOPs of some steps by part without their optimizers, and how many of the steps have them."""
        total, steps = Counter[tuple[str, str, str]](), 0
        for work, times in Counter(works).items():
            calls = {(work.recorded, 1)} if self._is_recorded(work) else work.calls
            if calls and all(key in self.parts for key, _ in calls):
                steps += times
                for key, calls_of_step in calls:
                    for part, flops in self.parts[key].items():
                        total[part] += times * calls_of_step * flops
        return total, steps

    def _of_call(self, number: int) -> StepCost:
        return self._counted.get(number) or self._families.cost(number, self._counted) or UNKNOWN_COST

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
    """Return the names of several models, as prefixes of the names of their modules."""
    classes = [type(unwrap_compiled(model)).__name__ for model in models]
    return [
        f"{name}." if classes.count(name) == 1 else f"{name}{classes[:index].count(name)}."
        for index, name in enumerate(classes)
    ]
