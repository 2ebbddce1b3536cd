"""Find the runs of equal layers of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import nn

from fvflops.capture.model.read_module_tree import module_paths
from fvflops.capture.shortening.equal_modules import find_index_attributes
from fvflops.trace.expansion.layer_run import KEPT, LayerRun

# How many successive layers may differ before they repeat, as in models with local and global attention by turns.
_MAX_PERIOD = 8

# Of a shorter run more would be lost by comparing and expanding than is gained.
_LEAST = 2 * KEPT

# A layer's kind, numbered, and the attributes that count layers.
_Kind = tuple[int, frozenset[tuple[str, str]]]


def find_layer_runs(model: nn.Module, marked: Collection[int] = ()) -> list[LayerRun]:
    """Return the runs of equal layers, of at least `_LEAST` periods, in a model's outermost lists that have any.

    Layers that share a module or a tensor with another part of the model belong to none. The runs of one list are in
    order, and named as after all of them are shortened.

    >>> [run.count for run in find_layer_runs(nn.Sequential(*(nn.Linear(4, 4) for _ in range(9))))]
    [9]
    """
    shared = _find_shared(model)
    runs: list[LayerRun] = []
    pending = [("", model)]
    while pending:
        path, module = pending.pop(0)
        found: list[LayerRun] = []
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            found = list(_find_in_list(path, module, shared, marked))
            runs += found
        if not found:
            prefix = path + "." if path else ""
            pending += [(prefix + key, child) for key, child in module._modules.items() if child is not None]
    return runs


def find_layer_kinds(layers: Iterable[nn.Module]) -> list[int]:
    """Return a number for each layer, the same for equal ones: the index of the first of them.

    >>> find_layer_kinds([nn.Linear(2, 3), nn.ReLU(), nn.Linear(2, 3)])
    [0, 1, 0]
    """
    return [number for number, _ in _find_kinds(list(layers), (), ())]


def _find_in_list(
    path: str, layers: nn.ModuleList | nn.Sequential, shared: Collection[int], marked: Collection[int]
) -> Iterator[LayerRun]:
    members = list(layers._modules.values())
    if len(members) < _LEAST or list(layers._modules) != [str(index) for index in range(len(members))]:
        return
    kinds = _find_kinds(members, shared, marked)
    begin = removed = 0
    while begin + _LEAST <= len(kinds):
        period, count = _longest_run(kinds[begin:])
        if count < _LEAST:
            begin += 1
            continue
        attributes = frozenset().union(*(kind[1] for kind in kinds[begin : begin + period * count]))
        yield LayerRun(path, begin - removed, period, count, attributes)
        removed += period * (count - KEPT)
        begin += period * count


def _find_kinds(members: Sequence[nn.Module | None], shared: Collection[int], marked: Collection[int]) -> list[_Kind]:
    """Return the kind of each layer of a list; equal layers have equal kinds, but those that share have their own."""
    kinds: list[_Kind] = []
    known: dict[int, tuple[int, nn.Module, frozenset[tuple[str, str]] | None]] = {}
    for index, member in enumerate(members):
        found: _Kind | None = None
        if member is not None and not any(id(module) in shared for module in member.modules()):
            for number, (position, example, attributes) in known.items():
                counting = find_index_attributes(example, member, index - position, marked)
                if counting is not None and attributes in (None, counting):
                    known[number] = position, example, counting
                    found = number, counting
                    break
            else:
                known[index] = index, member, None
        kinds.append((index, frozenset()) if found is None else found)
    # The example of a kind counts layers as the others do.
    return [(number, known[number][2] or frozenset()) if number in known else (number, own) for number, own in kinds]


def _longest_run(kinds: Sequence[_Kind]) -> tuple[int, int]:
    """Return the period of the run at the start that leaves out most layers, and how often that period occurs.

    >>> a, b = (0, frozenset()), (1, frozenset())
    >>> _longest_run([a, a, a, a, a, b]), _longest_run([a, b, a, b, a, b, a, b, a, b, a])
    ((1, 5), (2, 5))
    """

    def count(period: int) -> int:
        length = period
        while length < len(kinds) and kinds[length] == kinds[length - period]:
            length += 1
        return length // period

    runs = [(period, count(period)) for period in range(1, _MAX_PERIOD + 1)]
    return max(runs, key=lambda run: run[0] * (run[1] - KEPT))


def _find_shared(model: nn.Module) -> set[int]:
    """Return the ids of modules that are in several places, or hold a tensor that another module holds too."""
    paths = Counter(id(module) for _, module in module_paths(model))
    holders: dict[int, set[int]] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                holders.setdefault(id(tensor), set()).add(id(module))
    shared = {module for module, count in paths.items() if count > 1}
    return shared.union(*(modules for modules in holders.values() if len(modules) > 1))
