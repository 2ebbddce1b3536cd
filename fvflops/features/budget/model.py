"""Budgets of models, and the result of checking one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from fvflops.counting.metrics import METRICS

# Limits besides metrics: the predicted peak memory in bytes, and the number of unsupported ops.
OTHERS = ("memory", "unknown")


def budget_keys() -> tuple[str, ...]:
    """Return the keys that a budget may limit."""
    return (*METRICS, *OTHERS)


class Limit(NamedTuple):
    """The limit of one metric: at most `value`, or exactly `value`, with a relative tolerance.

    >>> Limit("flops", 100, tolerance=Fraction(1, 100)).allows(101), Limit("flops", 100, exact=True).allows(99)
    (True, False)
    """

    figure: str
    value: int
    exact: bool = False
    tolerance: Fraction = Fraction(0)

    def allows(self, value: int) -> bool:
        """Return whether a value is within the limit."""
        over = value - self.value
        return (abs(over) if self.exact else over) <= self.value * self.tolerance


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one model by metric, and the FLOPs by module and operator that --update recorded."""

    name: str
    limits: Mapping[str, Limit]
    table: str | None = None
    modules: Mapping[str, int] = field(default_factory=dict)
    operators: Mapping[str, int] = field(default_factory=dict)


class CheckResult(NamedTuple):
    """A limit and the actual value."""

    limit: Limit
    value: int

    @property
    def kept(self) -> bool:
        """Whether the value is within its limit."""
        return self.limit.allows(self.value)


class Regression(NamedTuple):
    """The FLOPs of a module or an operator as recorded in the budget, and as they are."""

    name: str
    before: int
    after: int

    @property
    def difference(self) -> int:
        """After minus before."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class BudgetReport:
    """How a model compares with its budget.

    `modules` and `operators` are those whose FLOPs are not as recorded, the largest increase first; a module's include
    its submodules. `unknown` is unsupported op → calls.
    """

    name: str
    table: str
    findings: tuple[CheckResult, ...]
    modules: tuple[Regression, ...] = ()
    operators: tuple[Regression, ...] = ()
    unknown: Mapping[str, int] = field(default_factory=dict)

    @property
    def kept(self) -> bool:
        """Whether every value is within its limit."""
        return all(finding.kept for finding in self.findings)
