"""The budget: what a model may cost, and how a run compares with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from fvflops.counting.metrics import METRICS

# What a budget may limit beside metrics: the predicted peak memory in bytes, and how many ops have no row in the table.
OTHERS = ("memory", "unknown")


def budget_keys() -> tuple[str, ...]:
    """Return what a budget may limit."""
    return (*METRICS, *OTHERS)


class Limit(NamedTuple):
    """What one figure may be: at most `value`, or exactly that, within a tolerance that is a share of it.

    >>> Limit("flops", 100, tolerance=Fraction(1, 100)).allows(101), Limit("flops", 100, exact=True).allows(99)
    (True, False)
    """

    figure: str
    value: int
    exact: bool = False
    tolerance: Fraction = Fraction(0)

    def allows(self, value: int) -> bool:
        """Return whether a value keeps to it."""
        over = value - self.value
        return (abs(over) if self.exact else over) <= self.value * self.tolerance


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one model, by figure, and the flops by module and by operator that were noted with them."""

    name: str
    limits: Mapping[str, Limit]
    table: str | None = None
    modules: Mapping[str, int] = field(default_factory=dict)
    operators: Mapping[str, int] = field(default_factory=dict)


class CheckResult(NamedTuple):
    """A limit and what the figure is."""

    limit: Limit
    value: int

    @property
    def kept(self) -> bool:
        """Whether the figure keeps to its limit."""
        return self.limit.allows(self.value)


class Regression(NamedTuple):
    """The flops of a module or an operator as they were noted, and as they are."""

    name: str
    before: int
    after: int

    @property
    def difference(self) -> int:
        """What came on top."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """How a model compares with its budget.

    `modules` and `operators` are those whose flops are not as noted, that which grew most first; of a module the
    flops are with its submodules. `unknown` is op → calls of what is missing from the numbers.
    """

    name: str
    table: str
    findings: tuple[CheckResult, ...]
    modules: tuple[Regression, ...] = ()
    operators: tuple[Regression, ...] = ()
    unknown: Mapping[str, int] = field(default_factory=dict)

    @property
    def kept(self) -> bool:
        """Whether every figure keeps to its limit."""
        return all(finding.kept for finding in self.findings)
