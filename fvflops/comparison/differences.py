"""Costs of modules and operators before and after a change, and their differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import add
from typing import NamedTuple

from fvflops.comparison.module_matching import match_modules
from fvflops.text import record_repr, short_repr
from fvflops.trace import Counts, ModuleTree, Status
from fvflops.trace.module_tree import innermost
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


_ZERO = Costs()
_CostsByLabel = Mapping[str, Costs]

# From the most to the least certain.
_STATUSES = tuple(status.value for status in (Status.COUNTED, Status.ZERO_FLOP, Status.IGNORED, Status.UNSUPPORTED))


@dataclass(frozen=True, slots=True)
class CountedRun:
    """One counted run: its name, inputs and notes, with its FLOPs and activations."""

    name: str
    inputs: str
    flops: Counts
    activations: Counts
    notes: tuple[str, ...] = ()


class _RunCosts(NamedTuple):
    """The costs of one run by module, without submodules: label → costs of its ops, and elements of its parameters."""

    tree: ModuleTree
    labels: Mapping[str, _CostsByLabel]
    parameters: Mapping[str, int]


def diff_counts(first: CountedRun, second: CountedRun, *, table: str = "", multiply_add: int = 1) -> ModelDifference:
    """Return what changed from a first run to a second; both are counted by one table.

    Each op belongs to the innermost module that it ran under. Modules are matched by the rules of
    `fvflops.comparison.module_matching`.
    """
    before, after = _costs_by_module(first), _costs_by_module(second)
    pairs = match_modules(
        before.tree,
        after.tree,
        *({name: frozenset(labels.items()) for name, labels in run.labels.items()} for run in (before, after)),
    )
    statuses = _least_certain_statuses(first, second)
    before_names = {after_name: before_name for before_name, after_name in pairs.items()}
    names: list[tuple[str | None, str | None]] = [
        (before_names.get(module.name), module.name) for module in after.tree.modules()
    ]
    names += [(module.name, None) for module in before.tree.modules() if module.name not in pairs]
    modules = [_module_change(before, after, pair, statuses, before_names) for pair in names]
    return ModelDifference(
        _side(first),
        _side(second),
        table,
        multiply_add,
        tuple(modules),
        _operator_changes(_sum_labels(before.labels.values()), _sum_labels(after.labels.values()), statuses),
    )


def _costs_by_module(run: CountedRun) -> _RunCosts:
    sums: dict[str, dict[str, Costs]] = {}

    def add(scope: tuple[str, ...], label: str, costs: Costs) -> None:
        labels = sums.setdefault(innermost(scope), {})
        labels[label] = labels.get(label, _ZERO).plus(costs)

    for entry in run.flops.entries:
        if entry.value or entry.status is not Status.ZERO_FLOP:
            add(entry.scope, entry.label, Costs(entry.value, entry.macs, calls=entry.calls))
    for entry in run.activations.entries:
        if entry.value:
            add(entry.scope, entry.label, Costs(activations=entry.value))
    tree = run.flops.modules
    return _RunCosts(tree, sums, _parameters_by_module(tree))


def _parameters_by_module(tree: ModuleTree) -> dict[str, int]:
    """Return module → the elements of its parameters, without submodules."""
    sums: dict[str, int] = {}
    for parameter in tree.parameters():
        owner = parameter.name.rpartition(".")[0]
        owner = owner if owner in tree.by_name else ""
        sums[owner] = sums.get(owner, 0) + parameter.spec.numel
    return sums


def _module_change(
    before: _RunCosts,
    after: _RunCosts,
    names: tuple[str | None, str | None],
    statuses: Mapping[str, str],
    before_names: Mapping[str, str],
) -> ModuleChange:
    """Return the change of a module, by its names before and after; None where it was added or removed."""
    labels: list[_CostsByLabel] = []
    costs: list[Costs] = []
    classes: list[str] = []
    for run, name in zip((before, after), names, strict=True):
        labels.append({} if name is None else run.labels.get(name, {}))
        parameters = 0 if name is None else run.parameters.get(name, 0)
        costs.append(sum_costs(labels[-1].values())._replace(parameters=parameters))
        classes.append("" if name is None else run.tree.by_name[name].class_name)
    operators = _operator_changes(labels[0], labels[1], statuses)
    return ModuleChange(
        *names,
        classes[0],
        classes[1],
        costs[0],
        costs[1],
        tuple(operator for operator in operators if operator.before != operator.after),
        parent_renamed=_is_parent_renamed(names, before_names),
    )


def _is_parent_renamed(names: tuple[str | None, str | None], before_names: Mapping[str, str]) -> bool:
    """Return whether the names of a module differ because its parent was renamed, and not in their last part."""
    before, after = names
    if not before or not after or before == after:
        return False
    before_parent, before_last = before.rpartition(".")[::2]
    after_parent, after_last = after.rpartition(".")[::2]
    same_parent = before_names.get(after_parent) == before_parent
    return before_last == after_last and same_parent and before_parent != after_parent


def _operator_changes(
    before: _CostsByLabel, after: _CostsByLabel, statuses: Mapping[str, str]
) -> tuple[OperatorChange, ...]:
    return tuple(
        OperatorChange(label, statuses.get(label, ""), before.get(label, _ZERO), after.get(label, _ZERO))
        for label in dict.fromkeys((*before, *after))
    )


def _sum_labels(modules: Iterable[_CostsByLabel]) -> dict[str, Costs]:
    sums: dict[str, Costs] = {}
    for labels in modules:
        for label, costs in labels.items():
            sums[label] = sums.get(label, _ZERO).plus(costs)
    return sums


def _least_certain_statuses(*runs: CountedRun) -> dict[str, str]:
    """Return label → the least certain status of its calls."""
    statuses: dict[str, str] = {}
    for run in runs:
        for entry in run.flops.entries:
            status = statuses.get(entry.label, _STATUSES[0])
            statuses[entry.label] = max(status, entry.status.value, key=_STATUSES.index)
    return statuses


def _side(run: CountedRun) -> Side:
    return Side(run.name, run.inputs, dict(run.flops.ledger()[Status.UNSUPPORTED]), run.notes)
