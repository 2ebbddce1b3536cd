"""The comparison: what several conventions count for one run of a model, and why they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fvflops.text import suggest


@dataclass(frozen=True, slots=True)
class ConventionTotal:
    """What one convention counts, multiply_add * macs + flops in total; for `unknown` ops it has no row."""

    name: str
    description: str
    multiply_add: int
    macs: int
    flops: int
    unknown: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """The number that the convention reports."""
        return self.multiply_add * self.macs + self.flops


@dataclass(frozen=True, slots=True)
class Difference:
    """One reason why a second convention counts more, or less, than a first.

    `kind` is "unit" (a multiply-add counts for another number of flops), "without" (the second leaves out `first`),
    "unknown" (it has no row for it), "beside" (it also counts `second`) or "otherwise" (both count it, and not alike).
    `first` and `second` are the labels of either side, `value` is what the second counts more, in its own unit, and
    `calls` how often the op ran.
    """

    kind: str
    value: int
    first: str = ""
    second: str = ""
    calls: int = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The tallies of several conventions over one model, and the differences of any two of them.

    `subject` says what was counted. `differences` maps the names of a first and a second convention to the reasons,
    largest first; they add up to the second's total less the first's.
    """

    subject: str
    tallies: Mapping[str, ConventionTotal]
    differences: Mapping[tuple[str, str], tuple[Difference, ...]]

    def between(self, first: str, second: str) -> tuple[Difference, ...]:
        """Return why a second convention counts otherwise than a first; a name not compared raises KeyError."""
        for name in (first, second):
            if name not in self.tallies:
                hint = suggest(name, self.tallies) or f": there are {', '.join(self.tallies)}"
                raise KeyError(f"no convention {name!r} was compared{hint}")
        return self.differences.get((first, second), ())
