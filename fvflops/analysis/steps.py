"""Steps of a recording: which are recorded, and the cost of each."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import torch

from fvflops.counting import CostModel, count
from fvflops.reports.escaping import list_ops
from fvflops.text import explaining_arguments, require_int, short_repr, shown_by_fields
from fvflops.trace import PHASES, Status, Trace
from fvflops.units import format_quantity, format_size

# Step index → action: "none", "warmup", "record", or "record_and_save" for the last step of a cycle.
Schedule = Callable[[int], Any]
# Actions of the recorded steps.
ACTIVE = ("record", "record_and_save")


@explaining_arguments
def schedule(
    *, wait: int = 0, warmup: int = 0, active: int, repeat: int = 0, skip_first: int = 0, skip_first_wait: int = 0
) -> Schedule:
    """Return a schedule that skips steps, then repeats a cycle of waiting, warm-up and recording.

    The arguments are as for `torch.profiler.schedule`, whose result can be used instead: `skip_first` steps are skipped
    once, then each cycle skips `wait` steps, has `warmup` steps and records `active` steps; `repeat` is the number of
    cycles, 0 for no limit; with `skip_first_wait` other than 0 the first cycle does not wait. A count needs no warm-up:
    these steps are skipped too. Numbers below 0, or no active step, raise ValueError.

    >>> [schedule(wait=1, active=2, repeat=1)(step) for step in range(4)]
    ['none', 'record', 'record_and_save', 'none']
    """
    numbers = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
    numbers |= {"skip_first": skip_first, "skip_first_wait": skip_first_wait}
    for name, number in numbers.items():
        require_int(name, number, least=1 if name == "active" else 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a profiler should have warm-up steps, a count needs none
        plan = torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)

    def act(step: int) -> str:
        begun = step - skip_first
        return "none" if begun < 0 else action_at(plan, begun + wait * bool(skip_first_wait))

    return act


def action_at(plan: Schedule, step: int) -> str:
    """Return the action of a schedule, fvflops' or torch.profiler's, for a step."""
    action = plan(step)
    name = str(getattr(action, "name", action)).lower()
    if name not in ("none", "warmup", *ACTIVE):
        remedy = "use fvflops.schedule or torch.profiler's"
        raise ValueError(f"schedule={plan!r} returned {action!r} for step {step}: {remedy}")
    return name


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, minimum and maximum of a count over several steps; the mean is an int if it is integral.

    >>> str(Spread(24, 24, 24)), str(Spread(36, 24, 48))
    ('24', '36 (24 to 48)')
    """

    mean: int | float
    minimum: int
    maximum: int

    @property
    def differs(self) -> bool:
        """Whether the steps differ."""
        return self.minimum != self.maximum

    def __str__(self) -> str:
        value_range = f" ({format_size(self.minimum)} to {format_size(self.maximum)})"
        return format_size(self.mean) + (value_range if self.differs else "")


@dataclass(frozen=True, slots=True, repr=False)
class PerStep:
    """Cost per step: `total` over all phases, and `phases` by name; a step without a phase counts as 0 there.

    `steps` is the number of steps, `unit` the metric, and `unsupported` op → calls over all steps, of ops that are
    missing from the numbers. In a convention `total` may count a multiply-add as 1; `flops` counts it as 2,
    and `macs` has the multiply-adds. `each` has the steps themselves. Its text is one line.

    >>> print(PerStep(2, "flops", Spread(36, 24, 48), {"forward": Spread(36, 24, 48)}, {"mylib::scan": 2}))
    2 steps, 36 flops per step (24 to 48): forward 36 (24 to 48); unsupported, so not counted: mylib::scan (2 calls)
    """

    steps: int
    unit: str
    total: Spread
    phases: Mapping[str, Spread]
    unsupported: Mapping[str, int]
    each: Sequence[StepCount] = ()

    def __repr__(self) -> str:
        return short_repr(self, "", str(self))

    @property
    def macs(self) -> Spread:
        """Multiply-adds per step, independent of the convention."""
        return _spread([step.macs for step in self.each])

    @property
    def flops(self) -> Spread:
        """FLOPs per step, 2 for a multiply-add whatever the convention."""
        return _spread([step.flops for step in self.each])

    @property
    def mean(self) -> int | float:
        """Mean of the steps' totals."""
        return self.total.mean

    @property
    def minimum(self) -> int:
        """Minimum of the steps' totals."""
        return self.total.minimum

    @property
    def maximum(self) -> int:
        """Maximum of the steps' totals."""
        return self.total.maximum

    def __str__(self) -> str:
        mean_text, _, value_range = str(self.total).partition(" ")
        text = f"{format_quantity(self.steps, 'step')}, {mean_text} {self.unit} per step {value_range}".rstrip()
        if self.phases:
            text += ": " + ", ".join(f"{phase} {spread}" for phase, spread in self.phases.items())
        if any(step.flops not in (0, step.by_phase.total()) for step in self.each):
            text += f"; {self.flops} at 2 per MAC"
        if self.unsupported:
            text += f"; unsupported, so not counted: {list_ops(self.unsupported)}"
        return text


@dataclass(frozen=True, slots=True, repr=False)
@shown_by_fields
class StepCount:
    """Cost of one step by phase, its unsupported op → calls, and macs and flops at 2 per MAC, 0 for other metrics."""

    by_phase: Counter[str]
    unsupported: Counter[str]
    macs: int = 0
    flops: int = 0


def count_step(trace: Trace, cost_model: CostModel, metric: str) -> StepCount:
    counts = count(trace, cost_model, metric)
    by_phase = {phase: sum(labels.values()) for phase, labels in counts.by_phase().items()}
    step = StepCount(Counter(by_phase), counts.ledger()[Status.UNSUPPORTED])
    if metric != "flops":
        return step
    macs = sum(entry.macs for entry in counts.entries)
    return replace(step, macs=macs, flops=2 * macs + sum(entry.other_flops for entry in counts.entries))


def summarise_steps(counts: Sequence[StepCount], unit: str) -> PerStep:
    """Return the cost per step of one or more counted steps."""
    phases = {phase for step in counts for phase in step.by_phase}
    return PerStep(
        steps=len(counts),
        unit=unit,
        total=_spread([step.by_phase.total() for step in counts]),
        phases={phase: _spread([step.by_phase[phase] for step in counts]) for phase in PHASES if phase in phases},
        unsupported=sum([step.unsupported for step in counts], Counter()),
        each=tuple(counts),
    )


def _spread(values: Sequence[int]) -> Spread:
    return Spread(mean(values), min(values), max(values))
