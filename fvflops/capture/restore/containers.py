"""Snapshot and restore mutable objects reachable through containers, objects and code."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from fvflops.capture.restore.contents import (
    CHILDLESS,
    GENERATORS,
    LEAF_TYPES,
    SAVES_OF_GENERATORS,
    VALUE_TYPES,
    Iterators,
    Restore,
    Save,
    Saved,
    has_new_numbers,
    is_iterator,
    restore_array,
    restore_dict,
    save_for,
)
from fvflops.capture.restore.generators import SavedGenerator
from fvflops.capture.restore.namespaces import ABSENT, Namespaces, dict_getter_of, namespace_of, read_slot, slots_of
from fvflops.capture.restore.tensor_state import TensorState, restore_all, restore_tensor, save_tensor

# At most this many objects are visited, breadth first: a module may refer to a data set, or to a trainer that
# refers to everything else.
_MAX_OBJECTS = 1 << 16
# Functions called by the model's code are searched down to this depth.
_CALL_DEPTH = 4
# Libraries whose objects' attributes are not part of a model's state.
_EXCLUDED = frozenset(
    {
        *("logging", "threading", "abc", "typing", "re", "ast", "inspect", "importlib", "asyncio", "multiprocessing"),
        *("concurrent", "subprocess", "ctypes", "unittest", "pathlib", "sympy", "numpy", "builtins", "io", "fvflops"),
        *("torch.fx", "torch.jit", "torch._dynamo", "torch._inductor", "torch._C", "torch.distributed", "torch._ops"),
        *("torch._library", "torch._subclasses", "torch.library"),
    }
)
_CODE = frozenset({ModuleType, FunctionType, MethodType, BuiltinMethodType})
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: created at run time, as classes defined in Python are


class _ClassAccessors(NamedTuple):
    """How to read a class's instances: functions for contents and attributes, and the descriptors of slots."""

    save: Save | None
    attributes: Callable[[Any], Any] | None
    slots: tuple[Any, ...]


# By the id of the class; the weak reference shows whether the class is still alive, since ids are reused.
_ACCESSORS: dict[int, tuple[weakref.ref[type], _ClassAccessors]] = {}


class ContainerSnapshot:
    """Snapshot of containers, iterators, objects and tensors reachable from given values.

    `tensors` are the tensors among them, `code` the functions and classes, which are not searched. Objects whose ids
    are in `visited` are skipped; the ids of others are added.
    """

    def __init__(self, visited: set[int] | None = None) -> None:
        self.tensors: list[torch.Tensor] = []
        self.code: list[Any] = []
        self._visited = set() if visited is None else visited
        self._references: list[Any] = []  # keep visited objects alive, since ids are reused
        self._tensors: list[TensorState] = []
        # The restoring function, the object, and its contents.
        self._states: list[tuple[Restore, Any, Any]] = []
        # The saving function and the object, to find new children after the run.
        self._saves: list[tuple[Save, Any]] = []
        self._iterators = Iterators()

    def snapshot(self, values: Iterable[Any], *, objects: bool) -> None:
        """Save the containers reachable from `values`; with `objects`, follow the attributes of objects too."""
        pending = deque(values)
        while pending and len(self._visited) < _MAX_OBJECTS:
            item = pending.popleft()
            cls = type(item)
            if cls in VALUE_TYPES or id(item) in self._visited:
                continue
            self._visited.add(id(item))
            if cls in LEAF_TYPES:
                continue
            self._references.append(item)
            if issubclass(cls, torch.Tensor):
                self.tensors.append(item)
                if objects:
                    self._tensors.append(save_tensor(item))
                continue
            accessors = _accessors_of(cls)
            if accessors.save is not None:
                before, restore, children = accessors.save(item)
                if restore is not None:
                    self._states.append((restore, item, before))
                if restore not in CHILDLESS:
                    self._saves.append((accessors.save, item))
                pending += children
            elif is_iterator(item):
                self._iterators.add(item)
            if objects:
                pending += self._save_attributes(item, cls, accessors)

    def _save_attributes(self, item: Any, cls: type, accessors: _ClassAccessors) -> Iterable[Any]:
        """Save an object's slots; return its attributes, which are visited next."""
        if cls is FunctionType or issubclass(cls, type):
            self.code.append(item)
            self._visited.discard(id(item))  # CodeSnapshot visits it later
            return ()
        if cls is MethodType:
            return item.__self__, item.__func__
        if cls is BuiltinMethodType:
            return (item.__self__,)
        if accessors.attributes is None and not accessors.slots:
            return ()
        attributes = None if accessors.attributes is None else accessors.attributes(item)
        if not accessors.slots:
            return cls, attributes
        owner = _Slots(item, accessors.slots)
        return cls, attributes, *self._save(_save_slots, owner)

    def _save(self, save: Save, item: Any) -> Iterable[Any]:
        """Save a mutable object; return the objects to visit next."""
        before, restore, children = save(item)
        assert restore is not None
        self._references.append(item)
        self._states.append((restore, item, before))
        self._saves.append((save, item))
        return children

    def restorers(self) -> tuple[tuple[Callable[[Any], None], Iterable[Any]], ...]:
        """Return functions that restore, each with the states to call it with."""
        return (restore_tensor, self._tensors), (self._restore_states, [self.advanced_iterators()])

    def changed_arrays(self) -> list[Any]:
        """Return the NumPy arrays of floating-point numbers that the run has changed."""
        states = [(item, before) for restore, item, before in self._states if restore is restore_array]
        return [item for item, before in states if has_new_numbers(item, before)]

    def advanced_iterators(self) -> Mapping[int, Any]:
        """Return the copies that replace iterators which have advanced, by id of the iterator."""
        return self._iterators.advanced()

    def _restore_states(self, iterator_copies: Mapping[int, Any]) -> None:
        states: Iterable[Any] = self._states
        if iterator_copies:
            states = ((restore, item, _replace(before, iterator_copies)) for restore, item, before in self._states)
        restore_all(((_restore_state, states),))

    def generators(self) -> Iterator[SavedGenerator]:
        """Yield the random generators of Python and NumPy, with their states before the run."""
        for restore, item, before in self._states:
            save = SAVES_OF_GENERATORS.get(restore)
            if save is not None:
                yield SavedGenerator(partial(_saved_state, save, item), partial(restore, item), before)

    def restore(self) -> None:
        """Restore all changed objects, even if restoring one raises."""
        restore_all(self.restorers())


class CodeSnapshot(ContainerSnapshot):
    """Snapshot of what code uses outside the model: globals, classes, closures and caches.

    Restored only if the run stored new tensors there, which should not outlive it; other changes, such as a list in
    which a hook counts calls, remain. Random generators are always restored. `all_globals` is passed to `Namespaces`.
    """

    def __init__(self, visited: set[int], *, all_globals: bool) -> None:
        super().__init__(visited)
        self._namespaces = Namespaces(all_globals=all_globals)
        self._used_objects: list[Any] = []

    def snapshot(self, values: Iterable[Any], *, objects: bool) -> None:
        """Save objects reachable from functions and classes, through a limited depth of function calls."""
        for _ in range(_CALL_DEPTH):
            self._used_objects = []
            super().snapshot(values, objects=objects)
            values = self._used_objects

    def _save_attributes(self, item: Any, cls: type, accessors: _ClassAccessors) -> Iterable[Any]:
        if cls is FunctionType:
            self._used_objects += self._namespaces.objects_used_by(item)
            return self._save(_save_function, item)
        if issubclass(cls, type):
            return self._namespaces.objects_in_class(item)
        return super()._save_attributes(item, cls, accessors)

    def restorers(self) -> tuple[tuple[Callable[[Any], None], Iterable[Any]], ...]:
        """Return functions that restore, each with the states to call it with."""
        if not self._has_new_tensors():
            return ((_restore_state, [state for state in self._states if state[0] in GENERATORS]),)
        return *super().restorers(), (self._namespaces.restore, [self.advanced_iterators()])

    def _has_new_tensors(self) -> bool:
        """Return whether tensors are reachable that were not before the run."""
        new_objects = [item for item in self._namespaces.new_values() if id(item) not in self._visited]
        for save, item in self._saves:
            new_objects += [child for child in save(item)[2] if id(child) not in self._visited]
        if not new_objects:
            return False
        new = ContainerSnapshot(set(self._visited))
        new.snapshot(new_objects, objects=True)
        return bool(new.tensors)


class _Slots(NamedTuple):
    item: Any
    slots: tuple[Any, ...]


def _accessors_of(cls: type) -> _ClassAccessors:
    cached = _ACCESSORS.get(id(cls))
    if cached is not None and cached[0]() is cls:
        return cached[1]
    accessors = _find_accessors(cls)
    _ACCESSORS[id(cls)] = weakref.ref(cls, partial(_forget, id(cls))), accessors
    return accessors


def _forget(key: int, reference: weakref.ref[type]) -> None:
    if key in _ACCESSORS and _ACCESSORS[key][0] is reference:
        del _ACCESSORS[key]


def _find_accessors(cls: type) -> _ClassAccessors:
    save = save_for(cls)
    if cls in _CODE or issubclass(cls, type):
        return _ClassAccessors(save, None, ())
    module = namespace_of(cls).get("__module__") if cls.__flags__ & _HEAP_TYPE else cls.__module__
    if save is None and type(module) is str and _is_excluded(module):
        return _ClassAccessors(None, None, ())
    return _ClassAccessors(save, dict_getter_of(cls), slots_of(cls))


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


def _contents_of(function: FunctionType) -> list[Any]:
    parts: list[Any] = [*(function.__closure__ or ()), *(function.__defaults__ or ())]
    if function.__kwdefaults__:
        parts.append(function.__kwdefaults__)
    if function.__dict__:
        parts += function.__dict__.values()
    return parts


def _save_function(function: FunctionType) -> Saved:
    before = [function.__defaults__, function.__kwdefaults__, function.__code__, function.__dict__.copy()]
    return before, _restore_function, _contents_of(function)


def _restore_function(function: FunctionType, before: list[Any]) -> None:
    *parts, attributes = before
    for name, value in zip(("__defaults__", "__kwdefaults__", "__code__"), parts, strict=True):
        if getattr(function, name) is not value:
            setattr(function, name, value)
    restore_dict(function.__dict__, list(attributes.items()))


def _restore_state(state: tuple[Restore, Any, Any]) -> None:
    restore, item, before = state
    restore(item, before)


def _saved_state(save: Save, item: Any) -> Any:
    """Return the state that a function saves of a generator."""
    return save(item)[0]


def _replace(before: Any, iterator_copies: Mapping[int, Any]) -> Any:
    """Return a container's saved contents with advanced iterators replaced by their copies."""
    if type(before) is not list:
        return before
    return [
        tuple([iterator_copies.get(id(part), part) for part in item])
        if type(item) is tuple
        else iterator_copies.get(id(item), item)
        for item in before
    ]
