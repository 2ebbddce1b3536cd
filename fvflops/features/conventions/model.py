"""Counts of one run by several conventions, and the reasons for their differences, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fvflops.reports.display import Displayed
from fvflops.text import record_repr, short_repr, suggest
from fvflops.units import format_short


@dataclass(frozen=True, slots=True, repr=False)
class ConventionTotal:
    """The count by one convention: multiply_add * macs + flops in total; `unsupported` are the unsupported ops.

    `ignored_work` is the share of the model's arithmetic, as `exact` counts it, that the convention ignores, as text:
    "all", or "86%"; "" up to a half.
    """

    name: str
    description: str
    multiply_add: int
    macs: int
    flops: int
    unsupported: tuple[str, ...] = ()
    ignored_work: str = ""

    def __repr__(self) -> str:
        return record_repr(self)

    @property
    def total(self) -> int:
        """The total that the convention reports."""
        return self.multiply_add * self.macs + self.flops


@dataclass(frozen=True, slots=True)
class Difference:
    """One reason why a second convention counts more, or fewer, FLOPs than a first.

    `first` and `second` are labels of ops, `value` is the second count minus the first, with the second's FLOPs per
    multiply-add, and `calls` is how often the op ran. `kind` is one of

    - "unit": a multiply-add is another number of FLOPs;
    - "only_first": the first counts `first`, the second does not;
    - "unsupported": the same, since `first` is unsupported by the second;
    - "only_second": the second counts `second`, the first does not;
    - "different_count": both count the op, with different results.
    """

    kind: str
    value: int
    first: str = ""
    second: str = ""
    calls: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Displayed):
    """The totals of one model by several conventions, and the differences of each pair.

    `subject` describes the inputs. `differences` maps the names of a first and a second convention to the reasons,
    largest first; they add up to the second's total minus the first's. `left_out` are conventions by which a loaded
    Trace cannot be counted.
    """

    _report = "fvflops.features.conventions.report:comparison_report"

    subject: str
    totals: Mapping[str, ConventionTotal]
    differences: Mapping[tuple[str, str], tuple[Difference, ...]]
    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        totals = [f"{name} {format_short(item.total)}" for name, item in self.totals.items()]
        return short_repr(self, "", *totals)

    def between(self, first: str, second: str) -> tuple[Difference, ...]:
        """Return the reasons why a second convention differs from a first; a name not compared raises KeyError."""
        for name in (first, second):
            if name not in self.totals:
                hint = suggest(name, self.totals) or f": there are {', '.join(self.totals)}"
                raise KeyError(f"no convention {name!r} was compared{hint}")
        return self.differences.get((first, second), ())
