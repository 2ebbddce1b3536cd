"""Difference of two counted runs, by module and operator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fvflops.features.diff.model import (
    Figures,
    ModelDifference,
    ModuleChange,
    OperatorChange,
    Side,
    sum_figures,
)
from fvflops.features.diff.module_matching import match_modules
from fvflops.trace import Counts, ModuleTree, Status
from fvflops.trace.module_tree import innermost

_NOTHING = Figures()
_Labels = Mapping[str, Figures]

# From the most to the least certain.
_ORDER = tuple(status.value for status in (Status.COUNTED, Status.ZERO_FLOP, Status.IGNORED, Status.UNSUPPORTED))


@dataclass(frozen=True, slots=True)
class CountedRun:
    """One counted run: its name, inputs and notes, with its FLOPs and activations."""

    name: str
    inputs: str
    flops: Counts
    activations: Counts
    notes: tuple[str, ...] = ()


def diff_counts(first: CountedRun, second: CountedRun, *, table: str = "", multiply_add: int = 1) -> ModelDifference:
    """Return what changed from a first run to a second; both are counted by one table.

    Each op belongs to the innermost module that it ran under. `fvflops.features.diff.module_matching` has the rule by
    which modules are matched.
    """
    before, after = _gather(first), _gather(second)
    trees = first.flops.modules, second.flops.modules
    pairs = match_modules(
        *trees, *({name: _freeze(labels) for name, labels in side.items()} for side in (before, after))
    )
    statuses = _statuses(first, second)
    held = _parameters(trees[0]), _parameters(trees[1])
    origin = {yours: mine for mine, yours in pairs.items()}
    modules = [
        _change(trees, (origin.get(place.name), place.name), (before, after), held, statuses, origin)
        for place in trees[1].modules()
    ]
    modules += [
        _change(trees, (place.name, None), (before, after), held, statuses, origin)
        for place in trees[0].modules()
        if place.name not in pairs
    ]
    return ModelDifference(
        _side(first),
        _side(second),
        table,
        multiply_add,
        tuple(modules),
        _compare(_add_up(before.values()), _add_up(after.values()), statuses, every=True),
    )


def _gather(run: CountedRun) -> dict[str, dict[str, Figures]]:
    """Return module → label → costs, without those of its submodules."""
    sums: dict[str, dict[str, Figures]] = {}

    def add(scope: tuple[str, ...], label: str, figures: Figures) -> None:
        labels = sums.setdefault(innermost(scope), {})
        labels[label] = labels.get(label, _NOTHING).plus(figures)

    for entry in run.flops.entries:
        if entry.value or entry.status is not Status.ZERO_FLOP:
            add(entry.scope, entry.label, Figures(entry.value, entry.macs, calls=entry.calls))
    for entry in run.activations.entries:
        if entry.value:
            add(entry.scope, entry.label, Figures(activations=entry.value))
    return sums


def _freeze(labels: _Labels) -> frozenset[tuple[str, Figures]]:
    return frozenset(labels.items())


def _parameters(tree: ModuleTree) -> dict[str, int]:
    """Return module → the elements of its direct parameters."""
    sums: dict[str, int] = {}
    for parameter in tree.parameters():
        owner = parameter.name.rpartition(".")[0]
        owner = owner if owner in tree.by_name else ""
        sums[owner] = sums.get(owner, 0) + parameter.spec.numel
    return sums


def _change(
    trees: tuple[ModuleTree, ModuleTree],
    names: tuple[str | None, str | None],
    work: tuple[Mapping[str, _Labels], Mapping[str, _Labels]],
    held: tuple[Mapping[str, int], Mapping[str, int]],
    statuses: Mapping[str, str],
    origin: Mapping[str, str],
) -> ModuleChange:
    labels: list[_Labels] = []
    figures: list[Figures] = []
    classes: list[str] = []
    for tree, name, done, parameters in zip(trees, names, work, held, strict=True):
        mine = {} if name is None else done.get(name, {})
        labels.append(mine)
        figures.append(sum_figures(mine.values())._replace(parameters=0 if name is None else parameters.get(name, 0)))
        classes.append("" if name is None else tree.by_name[name].class_name)
    return ModuleChange(
        *names,
        classes[0],
        classes[1],
        figures[0],
        figures[1],
        _compare(labels[0], labels[1], statuses, every=False),
        follows=_follows(names, origin),
    )


def _follows(names: tuple[str | None, str | None], origin: Mapping[str, str]) -> bool:
    before, after = names
    if not before or not after or before == after:
        return False
    mine, key = before.rpartition(".")[::2]
    yours, other = after.rpartition(".")[::2]
    return key == other and origin.get(yours) == mine and mine != yours


def _compare(
    before: _Labels, after: _Labels, statuses: Mapping[str, str], *, every: bool
) -> tuple[OperatorChange, ...]:
    changes = (
        OperatorChange(label, statuses.get(label, ""), before.get(label, _NOTHING), after.get(label, _NOTHING))
        for label in dict.fromkeys((*before, *after))
    )
    return tuple(change for change in changes if every or change.before != change.after)


def _add_up(modules: Iterable[_Labels]) -> dict[str, Figures]:
    sums: dict[str, Figures] = {}
    for labels in modules:
        for label, figures in labels.items():
            sums[label] = sums.get(label, _NOTHING).plus(figures)
    return sums


def _statuses(*runs: CountedRun) -> dict[str, str]:
    found: dict[str, str] = {}
    for run in runs:
        for entry in run.flops.entries:
            known = found.get(entry.label, _ORDER[0])
            found[entry.label] = max(known, entry.status.value, key=_ORDER.index)
    return found


def _side(run: CountedRun) -> Side:
    return Side(run.name, run.inputs, dict(run.flops.ledger()[Status.UNSUPPORTED]), run.notes)
