"""Costs of modules and operators before and after a change, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple

from fvflops.text import record_repr, short_repr
from fvflops.units import format_short

MEASURES = ("flops", "macs", "activations", "parameters")


class Costs(NamedTuple):
    """Costs of a module or operator; `calls` excludes zero-FLOP ops."""

    flops: int = 0
    macs: int = 0
    activations: int = 0
    parameters: int = 0
    calls: int = 0

    def plus(self, other: Costs) -> Costs:
        """Return the sum of each cost."""
        return Costs(*map(add, self, other))


def sum_costs(costs: Iterable[Costs]) -> Costs:
    """Return the sum of several Costs.

    >>> sum_costs([Costs(flops=2, calls=1), Costs(flops=3, parameters=6)])
    Costs(flops=5, macs=0, activations=0, parameters=6, calls=1)
    """
    total = Costs()
    for cost in costs:
        total = total.plus(cost)
    return total


class Change(NamedTuple):
    """One number before and after.

    >>> Change(40, 50).difference, Change(40, 50).ratio, Change(0, 3).ratio
    (10, 1.25, None)
    """

    before: int
    after: int

    @property
    def difference(self) -> int:
        """After minus before."""
        return self.after - self.before

    @property
    def ratio(self) -> float | None:
        """After divided by before; None where before is 0."""
        return self.after / self.before if self.before else None


@dataclass(frozen=True, slots=True, repr=False)
class OperatorChange:
    """An operator, by its label, with its costs before and after.

    `status` is the least certain one among its calls, in the order "counted", "zero_flop", "ignored" (ignored by
    the convention) and "unsupported".
    """

    label: str
    status: str
    before: Costs
    after: Costs

    def __repr__(self) -> str:
        return record_repr(self)

    def change(self, measure: str) -> Change:
        """Return the change of one cost, a name in `MEASURES` or "calls"."""
        return Change(getattr(self.before, measure), getattr(self.after, measure))


@dataclass(frozen=True, slots=True, repr=False)
class ModuleChange:
    """A module with its costs before and after, without its submodules.

    `before_name` is None for a module that was added, `after_name` for one that was removed. `operators` are those
    whose costs differ. `parent_renamed` means that its name differs only by its parent's.
    """

    before_name: str | None
    after_name: str | None
    before_class: str
    after_class: str
    before: Costs
    after: Costs
    operators: tuple[OperatorChange, ...] = ()
    parent_renamed: bool = False

    def __repr__(self) -> str:
        return record_repr(self)

    @property
    def name(self) -> str:
        """The name after the change; for a removed module the name before."""
        return (self.before_name if self.after_name is None else self.after_name) or ""

    @property
    def kind(self) -> str:
        """One of "added", "removed", "changed" (and possibly renamed), "renamed" (only) and "unchanged"."""
        if self.before_name is None:
            return "added"
        if self.after_name is None:
            return "removed"
        if self.before != self.after or self.operators or self.before_class != self.after_class:
            return "changed"
        return "renamed" if self.before_name != self.after_name else "unchanged"

    def change(self, measure: str) -> Change:
        """Return the change of one cost, a name in `MEASURES` or "calls"."""
        return Change(getattr(self.before, measure), getattr(self.after, measure))


class Side(NamedTuple):
    """One of the two runs: its name, inputs, calls by unsupported op, and notes for the report."""

    name: str
    inputs: str = ""
    unsupported: Mapping[str, int] = {}
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return record_repr(self)


@dataclass(frozen=True, slots=True, repr=False)
class ModelDifference:
    """Differences between two runs by module and operator; true if there are any.

    `modules` are all modules, those of the second run in their order and then the removed ones; `operators` are all
    operators. The costs of the modules add up to those of the runs.

    >>> same = ModuleChange("fc", "fc", "Linear", "Linear", Costs(6), Costs(6))
    >>> wider = ModuleChange("out", "out", "Linear", "Linear", Costs(6), Costs(9))
    >>> difference = ModelDifference(Side("a"), Side("b"), modules=(same, wider))
    >>> bool(difference), difference.total(), [module.name for module in difference.by_module()]
    (True, Change(before=12, after=15), ['out'])
    """

    before: Side
    after: Side
    table: str = ""
    multiply_add: int = 1
    modules: tuple[ModuleChange, ...] = ()
    operators: tuple[OperatorChange, ...] = ()
    _totals: tuple[Costs, Costs] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        before = after = Costs()
        for module in self.modules:
            before, after = before.plus(module.before), after.plus(module.after)
        object.__setattr__(self, "_totals", (before, after))

    def __repr__(self) -> str:
        before, after = self.total()
        flops = f"FLOPs {format_short(before)} → {format_short(after)}"
        return short_repr(self, "", flops, f"{len(self.by_module()):,} of {len(self.modules):,} modules differ")

    def __bool__(self) -> bool:
        return any(module.kind != "unchanged" for module in self.modules) or bool(self.by_operator())

    def total(self, measure: str = "flops") -> Change:
        """Return the change of one cost of the model, a name in `MEASURES` or "calls"."""
        before, after = self._totals
        return Change(getattr(before, measure), getattr(after, measure))

    def by_module(self, measure: str = "flops") -> tuple[ModuleChange, ...]:
        """Return the modules that differ in cost, class or name, the largest difference first."""
        changed = [module for module in self.modules if module.kind != "unchanged"]
        return tuple(sorted(changed, key=lambda module: _rank(module, measure)))

    def by_operator(self, measure: str = "flops") -> tuple[OperatorChange, ...]:
        """Return the operators whose costs differ, the largest difference first."""
        changed = [operator for operator in self.operators if operator.before != operator.after]
        return tuple(sorted(changed, key=lambda operator: _rank(operator, measure)))


def _rank(item: ModuleChange | OperatorChange, measure: str) -> tuple[int, ...]:
    others = [name for name in (*MEASURES, "calls") if name != measure]
    return tuple(-abs(item.change(name).difference) for name in (measure, *others))
