"""Find the runs of equal layers of a model, shorten it in place, and expand its recording to the full model."""

from __future__ import annotations

import logging
import types
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from fvflops.capture.model.packed_layers import named_tensors
from fvflops.capture.model.read_module_tree import module_paths
from fvflops.capture.restore.contents import FUNCTION, kind_of
from fvflops.capture.restore.interrupts import is_interrupt
from fvflops.capture.run import record_call
from fvflops.garbage_collector import gc_paused
from fvflops.trace import StopsAt, Trace
from fvflops.trace.expansion.expand import Expansion, expand_layers
from fvflops.trace.expansion.layer_run import KEPT, LayerRun, UnequalLayersError, repeat_periods
from fvflops.trace.expansion.recorded_rows import are_equal_runs

T = TypeVar("T")
_LOGGER = logging.getLogger("fvflops")
_COMPOSITE = StopsAt(everything=True)  # fewer calls than with decomposed ops, and the model's code makes the same ones


@dataclass(frozen=True, slots=True)
class Shortened:
    """A model that has been shortened in place to a few layers of each of its runs of equal layers."""

    model: nn.Module = field(repr=False)
    runs: tuple[LayerRun, ...]
    _children: tuple[tuple[nn.Module, dict[str, nn.Module | None]], ...] = field(default=(), repr=False)
    _attributes: tuple[tuple[nn.Module, str, int], ...] = field(default=(), repr=False)

    def expand(self, trace: Trace, *, below: str = "") -> Expansion | None:
        """Return the Trace of the full model from one recorded with the shortened model.

        `below` is the name of the model in the recorded one, if that contains it. The result is None where equal layers
        ran differently, so that the full model must be recorded: call `restore`.
        """
        expansion = Expansion.unchanged(trace)
        try:
            with gc_paused():
                for run in reversed(self.runs):
                    path = ".".join(filter(None, (below, run.path)))
                    expansion = expansion.then(expand_layers(expansion.trace, replace(run, path=path)))
        except UnequalLayersError as error:
            _LOGGER.debug("the full model is recorded: %s", error)
            return None
        return expansion

    def repeat(self, named: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
        """Return the full model's (name, item) pairs from the shortened model's, ordered as by `named_parameters`."""
        items = list(named)
        for run in reversed(self.runs):
            items = [(name, item) for name, item, _ in repeat_periods(items, run)]
        return items

    def restore(self) -> None:
        for module, children in self._children:
            module._modules = children
        for module, name, value in self._attributes:
            module.__dict__[name] = value


def shorten(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    marked: Collection[nn.Module] = (),
    device: str | torch.device | None = None,
    assume: Mapping[str, Any] | None = None,
) -> Shortened | None:
    """Shorten a model in place: keep the first two and the last two of equal successive layers.

    Layers are equal if they have equal classes, tensors (except for values), attributes and hooks; attributes that
    count layers then count the remaining ones. Layers that share modules or tensors with others, or differ in which of
    their submodules are `marked` (such as checkpointed modules), are not equal. So that a model's code cannot treat
    layers unequally, its forward pass on `args` and `kwargs` is recorded with all layers (without autograd; `device`
    and `assume` are as for `record_call`), and must equal the shortened model's, expanded.

    Return None, with the model unchanged, if no layer can be omitted.
    """
    runs = tuple(find_layer_runs(model, {id(module) for module in marked}))
    if not runs:
        return None
    record = partial(
        record_call,
        *(model, args, dict(kwargs or {})),
        stops_at=_COMPOSITE,
        execution="shapes",
        device=device,
        assume=assume,
        quiet=True,
    )
    try:
        full = record()
    except Exception as error:  # the caller runs the model too, and shows its error
        if is_interrupt(error):
            raise
        return None
    shortened = _shorten(model, runs)
    is_equal, level = False, logging.DEBUG  # the model may need all of its layers
    try:
        short = record()
        level = logging.WARNING
        is_equal = (expansion := shortened.expand(short)) is not None and are_equal_runs(expansion.trace, full)
    except Exception as error:
        if is_interrupt(error):
            raise
        _LOGGER.log(level, "the full model is recorded: with fewer layers it fails: %r", error)
    finally:
        if not is_equal:
            shortened.restore()
    return shortened if is_equal else None


def _shorten(model: nn.Module, runs: tuple[LayerRun, ...]) -> Shortened:
    saved: dict[str, tuple[nn.Module, dict[str, nn.Module | None]]] = {}
    attributes: list[tuple[nn.Module, str, int]] = []
    for run in runs:
        layers = model.get_submodule(run.path)
        saved.setdefault(run.path, (layers, layers._modules))
        members = list(layers._modules.values())
        begin, removed = run.start + run.period * (KEPT // 2), run.period * run.added
        for member in members[begin + removed : begin + removed + run.period * (KEPT - KEPT // 2)]:
            for path, name in run.index_attributes:
                module = member.get_submodule(path) if member is not None else None
                if module is not None:
                    attributes.append((module, name, module.__dict__[name]))
                    module.__dict__[name] -= removed
        kept = [*members[:begin], *members[begin + removed :]]
        layers._modules = {str(index): member for index, member in enumerate(kept)}
    return Shortened(model, runs, tuple(saved.values()), tuple(attributes[::-1]))


# Values that are compared by `==`.
_PLAIN = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device, torch.Size, range)
_MAX_DEPTH = 8


def find_index_attributes(
    first: nn.Module, second: nn.Module, distance: int, marked: Collection[int] = ()
) -> frozenset[tuple[str, str]] | None:
    """Return which attributes differ between two equal layers because they count layers, None for unequal ones.

    An attribute counts layers if it is an int that differs by `distance`, the distance between the layers in their
    list; attributes are given as (name of the module below the layer, attribute). Equal layers have equal classes,
    modes, submodules, shapes, strides, dtypes, devices and requires_grad of parameters and buffers, values of integer
    buffers, hooks and all other attributes, and equal submodules `marked` by their ids.

    >>> find_index_attributes(nn.Linear(2, 3), nn.Linear(2, 3), 1), find_index_attributes(nn.Linear(2, 3), nn.ReLU(), 1)
    (frozenset(), None)
    """
    counting: set[tuple[str, str]] = set()
    pairs = [("", first, second)]
    partners = {id(first): id(second)}
    while pairs:
        name, one, other = pairs.pop()
        if type(one) is not type(other) or list(one._modules) != list(other._modules):
            return None
        if (id(one) in marked) != (id(other) in marked):
            return None
        for key, child in one._modules.items():
            partner = other._modules[key]
            if child is None or partner is None:
                if child is not partner:
                    return None
            elif id(child) not in partners:
                partners[id(child)] = id(partner)
                pairs.append((f"{name}.{key}" if name else key, child, partner))
            elif partners[id(child)] != id(partner):
                return None
        if one.__dict__.keys() != other.__dict__.keys():
            return None
        for key, value in one.__dict__.items():
            second_value = other.__dict__[key]
            if "hooks" in key and isinstance(value, Mapping):  # their keys number the hooks of all modules
                value, second_value = list(value.values()), list(second_value.values())
            if key == "_modules" or _are_equal(value, second_value, partners, 0):
                continue
            if type(value) is not int or type(second_value) is not int or second_value - value != distance:
                return None
            counting.add((name, key))
    return frozenset(counting)


def _describe(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    placements = getattr(tensor, "placements", None)  # of a DTensor
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad, strides, placements


def _are_equal(first: Any, second: Any, partners: Mapping[int, int], depth: int) -> bool:
    """Return whether two values are equal, where modules and other objects of a layer are equal to their partners."""
    if first is second or partners.get(id(first)) == id(second):
        return True
    cls = type(first)
    if cls is not type(second) or depth > _MAX_DEPTH or issubclass(cls, nn.Module):
        return False
    if cls in _PLAIN or issubclass(cls, (set, frozenset)):
        return bool(first == second)
    if issubclass(cls, torch.Tensor):
        # Control flow depends on integers.
        has_values = not (first.is_floating_point() or first.is_complex()) and first.device.type != "meta"
        return _describe(first) == _describe(second) and (not has_values or torch.equal(first, second))
    inner = partial(_are_equal, partners=partners, depth=depth + 1)
    if cls is types.MethodType:
        return inner(first.__func__, second.__func__) and inner(first.__self__, second.__self__)
    kind = FUNCTION if cls is types.FunctionType else kind_of(cls)
    if kind is not None:
        one, other = kind.read(first), kind.read(second)
        return type(one) is type(other) is list and len(one) == len(other) and all(map(inner, one, other))
    attributes = getattr(first, "__dict__", None)
    if attributes is None or getattr(cls, "__slots__", None):
        return False
    return bool(attributes) and inner(attributes, second.__dict__)


# How many successive layers may differ before they repeat, as in models that alternate local and global attention.
_MAX_PERIOD = 8

# For a shorter run, comparing and expanding would take longer than they save.
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
    """Return the kind of each layer of a list; equal layers have equal kinds, layers that share have their own."""
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
    """Return the period of the run at the start that saves most layers, and how often that period occurs.

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
        for _, _, tensor in named_tensors(module):
            holders.setdefault(id(tensor), set()).add(id(module))
    shared = {module for module, count in paths.items() if count > 1}
    return shared.union(*(modules for modules in holders.values() if len(modules) > 1))
