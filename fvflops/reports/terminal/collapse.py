"""Collapse repeated layers, such as layers.0 to layers.31, into one row, and write their names as ranges."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fvflops.trace import ModuleInfo, ModuleTree, Summary
from fvflops.trace.module_tree import modules_above

_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]{0,8})", re.DOTALL)


def collapse(summary: Summary) -> Summary:
    """Return a summary in which repeated layers are one module, with a label such as "layers.0–31 × 32".

    Repeated layers are two or more consecutive children of one module whose names end in consecutive numbers and whose
    subtrees are equal: same classes, counts, parameter shapes and calls. Their row has their sum; the rows below it
    are the first layer's.
    """
    subtree_ids = _number_subtrees(summary)
    repeated: dict[str, Sequence[str]] = {}  # the first layer's name → the names of all layers
    removed: set[str] = set()
    for module in summary.modules.by_name.values():
        parent = module.name.rpartition(".")[0] if module.name else None
        if parent in removed or module.name in removed:
            removed.add(module.name)
            continue
        for names in _find_repeated_layers(summary.modules, module, subtree_ids):
            repeated[names[0]] = names
            removed.update(names[1:])
    if not repeated:
        return summary
    repeats = {first: len(names) for first, names in repeated.items()}
    return replace(
        summary,
        modules=_remove(summary.modules, removed),
        columns={heading: _multiply(column, repeats, removed) for heading, column in summary.columns.items()},
        by_both={
            heading: {
                name: {label: count * repeats.get(name, 1) for label, count in labels.items()}
                for name, labels in table.items()
                if name not in removed
            }
            for heading, table in summary.by_both.items()
        },
        uncalled={heading: names - removed for heading, names in summary.uncalled.items()},
        labels={first: _label(names) for first, names in repeated.items()},
    )


def collapse_note(summary: Summary, shown: Iterable[str]) -> list[str]:
    """Return a sentence that explains rows of repeated layers, and of modules in them; [] if none is shown."""
    names = list(shown)
    if not any(name in summary.labels for name in names):
        return []
    in_layers = any(above in summary.labels for name in names for above in modules_above(name))
    submodules = "; rows of their submodules show the first" if in_layers else ""
    return [f"A row with × N is the sum of N equal modules{submodules}."]


def _number_subtrees(summary: Summary) -> dict[str, int]:
    """Return module name → a number that is the same for modules with equal subtrees."""
    numbers: dict[str, int] = {}
    interned: dict[Hashable, int] = {}
    # The tree lists parents first: reversed, children get their number before their parents.
    for module in reversed(list(summary.modules.by_name.values())):
        counts = tuple(column.get(module.name, 0) for column in summary.columns.values())
        labels = tuple(frozenset(table.get(module.name, {}).items()) for table in summary.by_both.values())
        uncalled = tuple(module.name in names for names in summary.uncalled.values())
        shapes = tuple((weight.name[len(module.name) :], weight.spec.shape) for weight in module.parameters)
        children = tuple((key, numbers.get(path) if path is not None else None) for key, path in module.children)
        subtree = (module.class_name, module.name == module.canonical, counts, labels, uncalled, shapes, children)
        numbers[module.name] = interned.setdefault(subtree, len(interned))
    return numbers


def _find_repeated_layers(
    modules: ModuleTree, parent: ModuleInfo, subtree_ids: Mapping[str, int]
) -> Iterator[list[str]]:
    """Yield the names of each group of repeated layers among the children of a module."""
    names: list[str] = []
    previous: tuple[str, int, int] | None = None  # prefix and number of the child's name, number of its subtree
    for attribute, path in (*parent.children, ("", None)):
        child = modules.by_name.get(path) if path is not None else None
        match = _NUMBERED.fullmatch(attribute)
        current = None
        if child is not None and match is not None and child.name == child.canonical:
            current = (match[1], int(match[2]), subtree_ids[child.name])
        if current is None or previous is None or current != (previous[0], previous[1] + 1, previous[2]):
            if len(names) > 1:
                yield names
            names = []
        if current is not None and child is not None:
            names.append(child.name)
        previous = current


def _label(names: Sequence[str]) -> str:
    match = _NUMBERED.fullmatch(names[-1])
    assert match is not None  # _find_repeated_layers yields only names that match
    return f"{names[0]}–{match[2]} × {len(names)}"


def _multiply(column: Mapping[str, int], repeats: Mapping[str, int], removed: set[str]) -> dict[str, int]:
    """Return the counts of the remaining names; counts of repeated layers are multiplied by their number."""
    # Parameters have counts too, under names that begin with their module's.
    return {
        name: count * repeats.get(name, 1)
        for name, count in column.items()
        if name not in removed and name.rpartition(".")[0] not in removed
    }


def _remove(modules: ModuleTree, removed: set[str]) -> ModuleTree:
    return ModuleTree(
        {
            name: replace(module, children=tuple(child for child in module.children if child[1] not in removed))
            for name, module in modules.by_name.items()
            if name not in removed
        }
    )


def find_pattern(name: str | None) -> str | None:
    """Return a dotted name with # for each numeric part; None for None.

    >>> find_pattern("layers.10.fc")
    'layers.#.fc'
    """
    if name is None:
        return None
    # A number of more than 18 digits is read as a name.
    return ".".join("#" if part.isdecimal() and len(part) <= 18 else part for part in name.split("."))


def format_range(names: Sequence[str]) -> str:
    """Return one name for names of the same pattern, with a range for numbers that differ.

    >>> format_range(["layers.0.fc", "layers.1.fc", "layers.2.fc"])
    'layers.0–2.fc'
    >>> format_range(["0.1", "1.1", "2.1"])  # not 0–2.1, which reads as a range from 0 to 2.1
    '{0–2}.1'
    """
    if not names:
        return ""
    parts = []
    for column in zip(*(name.split(".") for name in names), strict=True):
        values = set(column)
        numbers = sorted(int(value) for value in values) if len(values) > 1 else []
        if not numbers:
            parts.append(column[0])
        elif numbers == list(range(numbers[0], numbers[-1] + 1)):
            parts.append(f"{numbers[0]}–{numbers[-1]}")
        else:
            parts.append(",".join(map(str, numbers)) if len(numbers) <= 4 else f"{numbers[0]}…{numbers[-1]}")
    if sum(part[:1].isdigit() for part in parts) > 1:
        parts = [part if part.isdigit() or not part[:1].isdigit() else f"{{{part}}}" for part in parts]
    return ".".join(parts)
