"""Budgets of models, and the result of checking one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from fvflops.counting.metrics import METRICS
from fvflops.reports.display import Displayed
from fvflops.text import record_repr, short_repr

# Keys besides the metrics: the predicted peak memory in bytes, and the number of unsupported ops.
OTHER_KEYS = ("memory", "unsupported")
OLD_KEYS = {"unknown": "unsupported"}  # of older files


def budget_keys() -> tuple[str, ...]:
    """Return the keys that a budget may limit."""
    return (*METRICS, *OTHER_KEYS)


class Limit(NamedTuple):
    """The limit of one metric: at most `value`, or exactly `value`, with a relative tolerance.

    >>> Limit("flops", 100, tolerance=Fraction(1, 100)).allows(101), Limit("flops", 100, exact=True).allows(99)
    (True, False)
    """

    metric: str
    value: int
    exact: bool = False
    tolerance: Fraction = Fraction(0)

    def allows(self, value: int) -> bool:
        """Return whether a value is within the limit."""
        over = value - self.value
        return (abs(over) if self.exact else over) <= self.value * self.tolerance


@dataclass(frozen=True, slots=True, repr=False)
class Budget:
    """The limits of one model by metric, and the FLOPs by module and operator that --update recorded."""

    name: str
    limits: Mapping[str, Limit]
    table: str | None = None
    modules: Mapping[str, int] = field(default_factory=dict)
    operators: Mapping[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        return record_repr(self)


class CheckResult(NamedTuple):
    """A limit, and the value of the model's metric."""

    limit: Limit
    value: int

    @property
    def passed(self) -> bool:
        """Whether the value is within its limit."""
        return self.limit.allows(self.value)


class FlopsChange(NamedTuple):
    """A module or an operator whose FLOPs changed: those recorded in the budget, and those counted now."""

    name: str
    before: int
    after: int

    @property
    def difference(self) -> int:
        """After minus before."""
        return self.after - self.before


@dataclass(frozen=True, slots=True, repr=False)
class BudgetReport(Displayed):
    """The result of checking a model against its budget.

    `modules` and `operators` are those whose FLOPs changed since the budget recorded them, the largest increase first;
    a module's FLOPs include its submodules'. `unsupported` maps each unsupported op to its number of calls, and
    `about` is the Trace's.
    """

    _report = "fvflops.comparison.budget.budget_report:budget_report"

    name: str
    table: str
    results: tuple[CheckResult, ...]
    modules: tuple[FlopsChange, ...] = ()
    operators: tuple[FlopsChange, ...] = ()
    unsupported: Mapping[str, int] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        failed = [result.limit.metric for result in self.results if not result.passed]
        state = f"differs in {', '.join(failed)}" if failed else "within its budget"
        return short_repr(self, self.name, state)

    @property
    def passed(self) -> bool:
        """Whether every value is within its limit."""
        return all(result.passed for result in self.results)
