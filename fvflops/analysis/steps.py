"""The steps of a training run: what one comes to, as mean, least and most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from fvflops.counting import CostModel, count
from fvflops.reports.names import printable_short
from fvflops.trace import PHASES, Status, Trace
from fvflops.units import format_quantity, format_size


@dataclass(frozen=True, slots=True)
class Spread:
    """A count of several steps: their mean, the least and the most; the mean is an int where it is a whole number.

    >>> str(Spread(24, 24, 24)), str(Spread(36, 24, 48))
    ('24', '36 (24 to 48)')
    """

    mean: int | float
    minimum: int
    maximum: int

    @property
    def differs(self) -> bool:
        """Whether the steps are not all the same."""
        return self.minimum != self.maximum

    def __str__(self) -> str:
        least_and_most = f" ({format_size(self.minimum)} to {format_size(self.maximum)})"
        return format_size(self.mean) + (least_and_most if self.differs else "")


@dataclass(frozen=True, slots=True)
class PerStep:
    """What a step comes to: `total` over all phases, and `phases` by name; a step without a phase has 0 there.

    `steps` is the number of steps, `unit` what is counted, and `unknown` op → calls, over all steps, of the ops that
    the table does not know, which are missing from the numbers. Its text is one line.

    >>> print(PerStep(2, "flops", Spread(36, 24, 48), {"forward": Spread(36, 24, 48)}, {"mylib::scan": 2}))
    2 steps, 36 flops per step (24 to 48): forward 36 (24 to 48); unsupported, so not counted: mylib::scan (2 calls)
    """

    steps: int
    unit: str
    total: Spread
    phases: Mapping[str, Spread]
    unknown: Mapping[str, int]

    @property
    def mean(self) -> int | float:
        """The mean of the steps' totals."""
        return self.total.mean

    @property
    def minimum(self) -> int:
        """The total of the step that comes to least."""
        return self.total.minimum

    @property
    def maximum(self) -> int:
        """The total of the step that comes to most."""
        return self.total.maximum

    def __str__(self) -> str:
        size, _, least_and_most = str(self.total).partition(" ")
        text = f"{format_quantity(self.steps, 'step')}, {size} {self.unit} per step {least_and_most}".rstrip()
        if self.phases:
            text += ": " + ", ".join(f"{phase} {spread}" for phase, spread in self.phases.items())
        if self.unknown:
            named = [f"{printable_short(op)} ({format_quantity(calls, 'call')})" for op, calls in self.unknown.items()]
            text += f"; unsupported, so not counted: {', '.join(named)}"
        return text


@dataclass(frozen=True, slots=True)
class StepCount:
    """What one step came to by phase, and op → calls of what the table does not know."""

    by_phase: Counter[str]
    unknown: Counter[str]


def count_step(trace: Trace, cost_model: CostModel, metric: str) -> StepCount:
    """Return what the Trace of a step comes to."""
    counts = count(trace, cost_model, metric)
    by_phase = {phase: sum(labels.values()) for phase, labels in counts.by_phase().items()}
    return StepCount(Counter(by_phase), counts.ledger()[Status.UNKNOWN])


def summarise_steps(counts: Sequence[StepCount], unit: str) -> PerStep:
    """Return what a step comes to, of one or more that were counted.

    >>> few, many = (StepCount(Counter(forward=flops), Counter()) for flops in (24, 48))
    >>> print(summarise_steps([few, few, many], "flops"))
    3 steps, 32 flops per step (24 to 48): forward 32 (24 to 48)
    """
    seen = {phase for step in counts for phase in step.by_phase}
    return PerStep(
        steps=len(counts),
        unit=unit,
        total=_spread([step.by_phase.total() for step in counts]),
        phases={phase: _spread([step.by_phase[phase] for step in counts]) for phase in PHASES if phase in seen},
        unknown=sum([step.unknown for step in counts], Counter()),
    )


def _spread(values: Sequence[int]) -> Spread:
    return Spread(mean(values), min(values), max(values))
