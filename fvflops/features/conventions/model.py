"""Counts of one run by several conventions, and the reasons for their differences, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fvflops.text import suggest


@dataclass(frozen=True, slots=True)
class ConventionTotal:
    """The count by one convention: multiply_add * macs + flops in total; `unknown` ops have no row in its table."""

    name: str
    description: str
    multiply_add: int
    macs: int
    flops: int
    unknown: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """The total that the convention reports."""
        return self.multiply_add * self.macs + self.flops


@dataclass(frozen=True, slots=True)
class Difference:
    """One reason why a second convention counts more, or fewer, FLOPs than a first.

    `kind` is "unit" (another number of FLOPs per multiply-add), "without" (the second ignores `first`), "unknown" (the
    second has no row for it), "beside" (the second also counts `second`) or "otherwise" (both count it, with different
    results). `first` and `second` are labels of ops, `value` is second minus first in the second's unit, and `calls`
    how often the op ran.
    """

    kind: str
    value: int
    first: str = ""
    second: str = ""
    calls: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The totals of one model by several conventions, and the differences of each two.

    `subject` describes the inputs. `differences` maps the names of a first and a second convention to the reasons,
    largest first; they add up to the second's total minus the first's.
    """

    subject: str
    tallies: Mapping[str, ConventionTotal]
    differences: Mapping[tuple[str, str], tuple[Difference, ...]]

    def between(self, first: str, second: str) -> tuple[Difference, ...]:
        """Return the reasons why a second convention differs from a first; a name not compared raises KeyError."""
        for name in (first, second):
            if name not in self.tallies:
                hint = suggest(name, self.tallies) or f": there are {', '.join(self.tallies)}"
                raise KeyError(f"no convention {name!r} was compared{hint}")
        return self.differences.get((first, second), ())
