"""Snapshot and restore mutable objects reachable through containers, objects and code."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from fvflops.capture.restore.contents import (
    GENERATORS,
    IMMUTABLE,
    PLAIN,
    UNSHARED,
    Iterators,
    Restore,
    Save,
    Saved,
    is_iterator,
    restore_dict,
    save_for,
)
from fvflops.capture.restore.namespaces import ABSENT, Namespaces, attributes_of, namespace_of, read_slot, slots_of
from fvflops.capture.restore.tensor_state import TensorState, restore_all, restore_tensor, save_tensor

# At most this many objects are visited, breadth first: a module may refer to a data set, or to a trainer with
# everything.
_LIMIT = 1 << 16
# Code is followed through this many levels of function calls.
_DEPTH = 4
# Library modules whose objects' attributes are not part of a model's state.
_EXCLUDED = frozenset(
    {
        *("logging", "threading", "abc", "typing", "re", "ast", "inspect", "importlib", "asyncio", "multiprocessing"),
        *("concurrent", "subprocess", "ctypes", "unittest", "pathlib", "sympy", "numpy", "builtins", "io", "fvflops"),
        *("torch.fx", "torch.jit", "torch._dynamo", "torch._inductor", "torch._C", "torch.distributed", "torch._ops"),
        *("torch._library", "torch._subclasses", "torch.library"),
    }
)
_CODE = frozenset({ModuleType, FunctionType, MethodType, BuiltinMethodType})
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: defined in Python


class _Kind(NamedTuple):
    """How to save a class's objects: contents, attributes, and the descriptors of their slots."""

    save: Save | None
    attributes: Callable[[Any], Any] | None
    slots: tuple[Any, ...]


# By the class's id; the weak reference shows whether the class is still alive, since ids are reused.
_KINDS: dict[int, tuple[weakref.ref[type], _Kind]] = {}


class ContainerSnapshot:
    """Snapshot of containers, iterators, objects and tensors reachable from given values.

    `tensors` are all that were found, `code` the functions and classes, which are not followed. Objects in `visited`,
    by id, are skipped; objects found are added.
    """

    def __init__(self, visited: set[int] | None = None) -> None:
        self.tensors: list[torch.Tensor] = []
        self.code: list[Any] = []
        self._visited = set() if visited is None else visited
        self._kept: list[Any] = []  # keeps visited objects alive, since ids are reused
        self._tensors: list[TensorState] = []
        # The restoring function, the object, and its contents.
        self._states: list[tuple[Restore, Any, Any]] = []
        self._saves: list[tuple[Save, Any]] = []
        self._iterators = Iterators()

    def snapshot(self, values: Iterable[Any], *, objects: bool) -> None:
        """Save each container reachable through containers, and through objects too with `objects`."""
        pending = deque(values)
        while pending and len(self._visited) < _LIMIT:
            item = pending.popleft()
            cls = type(item)
            if cls in PLAIN or id(item) in self._visited:
                continue
            self._visited.add(id(item))
            if cls in IMMUTABLE:
                continue
            self._kept.append(item)
            if issubclass(cls, torch.Tensor):
                self.tensors.append(item)
                if objects:
                    self._tensors.append(save_tensor(item))
                continue
            kind = _kind_of(cls)
            if kind.save is not None:
                before, restore, children = kind.save(item)
                if restore is not None:
                    self._states.append((restore, item, before))
                if restore not in UNSHARED:
                    self._saves.append((kind.save, item))
                pending += children
            elif is_iterator(item):
                self._iterators.add(item)
            if objects:
                pending += self._follow(item, cls, kind)

    def _follow(self, item: Any, cls: type, kind: _Kind) -> Iterable[Any]:
        """Return an object's attributes to follow, after saving its slots."""
        if cls is FunctionType or issubclass(cls, type):
            self.code.append(item)
            self._visited.discard(id(item))
            return ()
        if cls is MethodType:
            return item.__self__, item.__func__
        if cls is BuiltinMethodType:
            return (item.__self__,)
        if kind.attributes is None and not kind.slots:
            return ()
        attributes = None if kind.attributes is None else kind.attributes(item)
        if not kind.slots:
            return cls, attributes
        owner = _Slots(item, kind.slots)
        return cls, attributes, *self._note(_save_slots, owner)

    def _note(self, save: Save, item: Any) -> Iterable[Any]:
        before, restore, children = save(item)
        assert restore is not None
        self._kept.append(item)
        self._states.append((restore, item, before))
        self._saves.append((save, item))
        return children

    def restorers(self) -> tuple[tuple[Callable[[Any], None], Iterable[Any]], ...]:
        """Return functions that restore, each with the states to call it with."""
        return (restore_tensor, self._tensors), (self._restore_states, [self.advanced()])

    def advanced(self) -> Mapping[int, Any]:
        """Return the replacements of iterators that have advanced, by id."""
        return self._iterators.advanced()

    def _restore_states(self, advanced: Mapping[int, Any]) -> None:
        states: Iterable[Any] = self._states
        if advanced:
            states = ((restore, item, _replace(before, advanced)) for restore, item, before in self._states)
        restore_all(((_restore_state, states),))

    def restore(self) -> None:
        """Restore whatever differs; an exception for one object does not keep others from being restored."""
        restore_all(self.restorers())


class CodeSnapshot(ContainerSnapshot):
    """Snapshot of what code uses outside the model: globals, classes, closures and caches.

    It is restored only if the run left new tensors there, which belong to the run; other changes, such as a list in
    which a hook counts calls, are the program's. Random generators are always restored. `whole` is passed to
    `Namespaces`.
    """

    def __init__(self, visited: set[int], *, whole: bool) -> None:
        super().__init__(visited)
        self._namespaces = Namespaces(whole=whole)
        self._named: list[Any] = []

    def snapshot(self, values: Iterable[Any], *, objects: bool) -> None:
        """Save what is reachable from functions and classes, through a limited depth of function calls."""
        for _ in range(_DEPTH):
            self._named = []
            super().snapshot(values, objects=objects)
            values = self._named

    def _follow(self, item: Any, cls: type, kind: _Kind) -> Iterable[Any]:
        if cls is FunctionType:
            self._named += self._namespaces.of_function(item)
            return self._note(_save_function, item)
        if issubclass(cls, type):
            return self._namespaces.of_class(item)
        return super()._follow(item, cls, kind)

    def restorers(self) -> tuple[tuple[Callable[[Any], None], Iterable[Any]], ...]:
        """Return functions that restore, each with the states to call it with."""
        if not self._has_new_tensors():
            return ((_restore_state, [state for state in self._states if state[0] in GENERATORS]),)
        return *super().restorers(), (self._namespaces.restore, [self.advanced()])

    def _has_new_tensors(self) -> bool:
        """Return whether new tensors are reachable."""
        found = [item for item in self._namespaces.values() if id(item) not in self._visited]
        for save, item in self._saves:
            found += [child for child in save(item)[2] if id(child) not in self._visited]
        if not found:
            return False
        new = ContainerSnapshot(set(self._visited))
        new.snapshot(found, objects=True)
        return bool(new.tensors)


class _Slots(NamedTuple):
    item: Any
    slots: tuple[Any, ...]


def _kind_of(cls: type) -> _Kind:
    known = _KINDS.get(id(cls))
    if known is not None and known[0]() is cls:
        return known[1]
    kind = _read_kind(cls)
    _KINDS[id(cls)] = weakref.ref(cls, partial(_forget, id(cls))), kind
    return kind


def _forget(key: int, ended: weakref.ref[type]) -> None:
    if key in _KINDS and _KINDS[key][0] is ended:
        del _KINDS[key]


def _read_kind(cls: type) -> _Kind:
    save = save_for(cls)
    if cls in _CODE or issubclass(cls, type):
        return _Kind(save, None, ())
    module = namespace_of(cls).get("__module__") if cls.__flags__ & _HEAP_TYPE else cls.__module__
    if save is None and type(module) is str and _is_excluded(module):
        return _Kind(None, None, ())
    return _Kind(save, attributes_of(cls), slots_of(cls))


def _is_excluded(module: str) -> bool:
    first, _, rest = module.partition(".")
    return first in _EXCLUDED or f"{first}.{rest.partition('.')[0]}" in _EXCLUDED


def _save_slots(owner: _Slots) -> Saved:
    values = [read_slot(slot, owner.item) for slot in owner.slots]
    return values, _restore_slots, values


def _restore_slots(owner: _Slots, before: list[Any]) -> None:
    for slot, value in zip(owner.slots, before, strict=True):
        if read_slot(slot, owner.item) is not value:
            if value is ABSENT:
                slot.__delete__(owner.item)
            else:
                slot.__set__(owner.item, value)


def _parts_of(function: FunctionType) -> list[Any]:
    parts: list[Any] = [*(function.__closure__ or ()), *(function.__defaults__ or ())]
    if function.__kwdefaults__:
        parts.append(function.__kwdefaults__)
    if function.__dict__:
        parts += function.__dict__.values()
    return parts


def _save_function(function: FunctionType) -> Saved:
    before = [function.__defaults__, function.__kwdefaults__, function.__code__, function.__dict__.copy()]
    return before, _restore_function, _parts_of(function)


def _restore_function(function: FunctionType, before: list[Any]) -> None:
    *parts, attributes = before
    for name, value in zip(("__defaults__", "__kwdefaults__", "__code__"), parts, strict=True):
        if getattr(function, name) is not value:
            setattr(function, name, value)
    restore_dict(function.__dict__, list(attributes.items()))


def _restore_state(state: tuple[Restore, Any, Any]) -> None:
    restore, item, before = state
    restore(item, before)


def _replace(before: Any, advanced: Mapping[int, Any]) -> Any:
    """Return a container's saved contents with advanced iterators replaced by their copies."""
    if type(before) is not list:
        return before
    return [
        tuple([advanced.get(id(part), part) for part in item]) if type(item) is tuple else advanced.get(id(item), item)
        for item in before
    ]
