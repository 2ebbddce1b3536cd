"""Difference of two counted runs, by module and operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fvflops.features.diff.model import (
    Costs,
    ModelDifference,
    ModuleChange,
    OperatorChange,
    Side,
    sum_costs,
)
from fvflops.features.diff.module_matching import match_modules
from fvflops.trace import Counts, ModuleTree, Status
from fvflops.trace.module_tree import innermost

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
    `fvflops.features.diff.module_matching`.
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
