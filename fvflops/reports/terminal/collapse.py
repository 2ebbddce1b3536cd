"""Collapse equal layers that follow each other, such as layers.0 to layers.31, into one row."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fvflops.trace import ModuleInfo, ModuleTree, Summary

_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]{0,8})", re.DOTALL)


def collapse(summary: Summary) -> Summary:
    """Return a summary in which runs of equal modules are one module, labelled such as "layers.0–31 × 32".

    A run is two or more children of one module, side by side, whose names end in consecutive numbers, and which are of
    one class, with equal counts, parameters' shapes and calls, all the way down. Its row has the sum of the run. The
    rows below it are those of its first module.

    >>> children = (("0", "0"), ("1", "1"))
    >>> net = {"": ModuleInfo("", "", "Sequential", children=children)}
    >>> net |= {name: ModuleInfo(name, name, "Linear") for name in "01"}
    >>> found = collapse(Summary(ModuleTree(net), {"flops": {"": 24, "0": 12, "1": 12}}))
    >>> found.columns, found.labels
    ({'flops': {'': 24, '0': 24}}, {'0': '0–1 × 2'})
    """
    kinds = _find_kinds(summary)
    runs: dict[str, Sequence[str]] = {}
    gone: set[str] = set()
    for place in summary.modules.by_name.values():
        above = place.name.rpartition(".")[0] if place.name else None
        if above in gone or place.name in gone:
            gone.add(place.name)
            continue
        for run in _find_runs(summary.modules, place, kinds):
            runs[run[0]] = run
            gone.update(run[1:])
    if not runs:
        return summary
    sizes = {name: len(run) for name, run in runs.items()}
    return replace(
        summary,
        modules=_drop(summary.modules, gone),
        columns={heading: _add_up(column, sizes, gone) for heading, column in summary.columns.items()},
        by_both={
            heading: {
                name: {label: count * sizes.get(name, 1) for label, count in labels.items()}
                for name, labels in table.items()
                if name not in gone
            }
            for heading, table in summary.by_both.items()
        },
        uncalled={heading: names - gone for heading, names in summary.uncalled.items()},
        labels={name: _label(run) for name, run in runs.items()},
    )


def collapse_note(summary: Summary, shown: Iterable[str]) -> list[str]:
    """Return a sentence that explains the rows of runs, if any of the modules shown is one."""
    note = "A row with × N is the sum of N equal modules; the rows below it are those of the first."
    return [note] if any(name in summary.labels for name in shown) else []


def _find_kinds(summary: Summary) -> dict[str, int]:
    """Return module → a number that is the same for modules with equal subtrees."""
    kinds: dict[str, int] = {}
    known: dict[Hashable, int] = {}
    # The tree lists parents first: reversed, children get their number before their parents.
    for place in reversed(list(summary.modules.by_name.values())):
        counts = tuple(column.get(place.name, 0) for column in summary.columns.values())
        labels = tuple(frozenset(table.get(place.name, {}).items()) for table in summary.by_both.values())
        uncalled = tuple(place.name in names for names in summary.uncalled.values())
        shapes = tuple((weight.name[len(place.name) :], weight.spec.shape) for weight in place.parameters)
        below = tuple((attribute, kinds.get(path) if path is not None else None) for attribute, path in place.children)
        kind = (place.class_name, place.name == place.canonical, counts, labels, uncalled, shapes, below)
        kinds[place.name] = known.setdefault(kind, len(known))
    return kinds


def _find_runs(modules: ModuleTree, place: ModuleInfo, kinds: Mapping[str, int]) -> Iterator[list[str]]:
    run: list[str] = []
    last: tuple[str, int, int] | None = None  # what the name begins with, its number, the kind
    for attribute, path in place.children:
        child = modules.by_name.get(path) if path is not None else None
        found = _NUMBERED.fullmatch(attribute)
        if child is None or found is None or child.name != child.canonical:
            current = None
        else:
            current = (found[1], int(found[2]), kinds[child.name])
        if current is None or last is None or current != (last[0], last[1] + 1, last[2]):
            if len(run) > 1:
                yield run
            run = []
        if current is not None and child is not None:
            run.append(child.name)
        last = current
    if len(run) > 1:
        yield run


def _label(run: Sequence[str]) -> str:
    found = _NUMBERED.fullmatch(run[-1])
    assert found is not None  # a run is made of such names
    return f"{run[0]}–{found[2]} × {len(run)}"


def _add_up(column: Mapping[str, int], sizes: Mapping[str, int], gone: set[str]) -> dict[str, int]:
    # Parameters have counts too, under names that are below their module's.
    return {
        name: count * sizes.get(name, 1)
        for name, count in column.items()
        if name not in gone and name.rpartition(".")[0] not in gone
    }


def _drop(modules: ModuleTree, gone: set[str]) -> ModuleTree:
    return ModuleTree(
        {
            name: replace(place, children=tuple(child for child in place.children if child[1] not in gone))
            for name, place in modules.by_name.items()
            if name not in gone
        }
    )
