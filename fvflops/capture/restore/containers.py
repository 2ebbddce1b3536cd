"""Snapshot and restore mutable objects reachable through containers, objects and code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from fvflops.capture.restore.contents import (
    ARRAY,
    FUNCTION,
    GENERATORS,
    LEAF_TYPES,
    NUMBER_GENERATORS,
    VALUE_TYPES,
    Kind,
    SavedIterator,
    advanced_iterators,
    is_iterator,
    kind_of,
    save_iterator,
)
from fvflops.capture.restore.global_state import SavedGenerator
from fvflops.capture.restore.namespaces import ABSENT, Namespaces, dict_getter_of, namespace_of, read_slot, slots_of
from fvflops.capture.restore.torch_state import without_modes

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
# How an object is restored, the object, and its contents before the run.
ObjectState = tuple[Kind, Any, Any]
_CODE = frozenset({ModuleType, FunctionType, MethodType, BuiltinMethodType})
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: created at run time, as classes defined in Python are


class _ClassAccessors(NamedTuple):
    """How to read a class's instances: their contents, the function that returns their attributes, and their slots."""

    kind: Kind | None
    attributes: Callable[[Any], Any] | None
    slots: Kind | None


# By the id of the class, as a metaclass may define `__hash__`; the class is kept alive, since ids are reused.
_ACCESSORS: dict[int, tuple[type, _ClassAccessors]] = {}
_MAX_CACHED = 1 << 12


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
        self._states: list[ObjectState] = []
        self._iterators: list[SavedIterator] = []

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
            if accessors.kind is not None:
                pending += self._save(accessors.kind, item)
            elif is_iterator(item) and (saved := save_iterator(item)) is not None:
                self._iterators.append(saved)
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
        if accessors.attributes is None and accessors.slots is None:
            return ()
        attributes = None if accessors.attributes is None else accessors.attributes(item)
        return cls, attributes, *(() if accessors.slots is None else self._save(accessors.slots, item))

    def _save(self, kind: Kind, item: Any) -> list[Any]:
        before = kind.read(item)
        self._states.append((kind, item, before))
        return _visitable(before)

    def restorers(self) -> tuple[tuple[Callable[[Any], None], Iterable[Any]], ...]:
        """Return functions that restore, each with the states to call it with."""
        states, copies = self._states, self.advanced_iterators()
        if copies:
            states = [(kind, item, with_copies(before, copies)) for kind, item, before in states]
        return (restore_tensor, self._tensors), (restore_object, states)

    def changed_arrays(self) -> list[Any]:
        """Return the NumPy arrays of floating-point numbers that the run has changed."""
        arrays = [(item, before) for kind, item, before in self._states if kind is ARRAY and before is not None]
        return [item for item, before in arrays if item.dtype.kind in "fc" and ARRAY.read(item) != before]

    def advanced_iterators(self) -> Mapping[int, Any]:
        """Return the copies that replace iterators which have advanced, by id of the iterator."""
        return advanced_iterators(self._iterators) if self._iterators else {}

    def generators(self) -> Iterator[SavedGenerator]:
        """Yield the random generators of Python and NumPy, with their states before the run."""
        for kind, item, before in self._states:
            if kind in NUMBER_GENERATORS:
                yield SavedGenerator(partial(kind.read, item), partial(kind.restore, item), before)

    def restore(self) -> None:
        """Restore all changed objects, even if restoring one raises."""
        restore_all(self.restorers())


class CodeSnapshot(ContainerSnapshot):
    """Snapshot of the globals, classes, closures and caches that code uses outside the model.

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
            return self._save(FUNCTION, item)
        if issubclass(cls, type):
            return self._namespaces.objects_in_class(item)
        return super()._save_attributes(item, cls, accessors)

    def restorers(self) -> tuple[tuple[Callable[[Any], None], Iterable[Any]], ...]:
        """Return functions that restore, each with the states to call it with."""
        if not self._has_new_tensors():
            return ((restore_object, [state for state in self._states if state[0] in GENERATORS]),)
        return *super().restorers(), (self._namespaces.restore, [self.advanced_iterators()])

    def _has_new_tensors(self) -> bool:
        """Return whether tensors are reachable that were not before the run."""
        new_objects = [item for item in self._namespaces.new_values() if id(item) not in self._visited]
        for kind, item, _ in self._states:
            new_objects += [child for child in _visitable(kind.read(item)) if id(child) not in self._visited]
        if not new_objects:
            return False
        new = ContainerSnapshot(set(self._visited))
        new.snapshot(new_objects, objects=True)
        return bool(new.tensors)


def _visitable(contents: Any) -> list[Any]:
    """Return the objects in contents that may refer to others."""
    return [part for part in contents if type(part) not in VALUE_TYPES] if type(contents) is list else []


def _accessors_of(cls: type) -> _ClassAccessors:
    cached = _ACCESSORS.get(id(cls))
    if cached is None:
        if len(_ACCESSORS) >= _MAX_CACHED:
            _ACCESSORS.clear()
        cached = _ACCESSORS[id(cls)] = cls, _find_accessors(cls)
    return cached[1]


def _find_accessors(cls: type) -> _ClassAccessors:
    kind = kind_of(cls)
    if cls in _CODE or issubclass(cls, type):
        return _ClassAccessors(kind, None, None)
    module = namespace_of(cls).get("__module__") if cls.__flags__ & _HEAP_TYPE else cls.__module__
    if kind is None and type(module) is str:
        first, _, rest = module.partition(".")
        if first in _EXCLUDED or f"{first}.{rest.partition('.')[0]}" in _EXCLUDED:
            return _ClassAccessors(None, None, None)
    slots = slots_of(cls)
    slots_kind = Kind(partial(_read_slots, slots), partial(_write_slots, slots)) if slots else None
    return _ClassAccessors(kind, dict_getter_of(cls), slots_kind)


def _read_slots(slots: tuple[Any, ...], item: Any) -> list[Any]:
    return [read_slot(slot, item) for slot in slots]


def _write_slots(slots: tuple[Any, ...], item: Any, before: list[Any]) -> None:
    for slot, value in zip(slots, before, strict=True):
        if read_slot(slot, item) is not value:
            if value is ABSENT:
                slot.__delete__(item)
            else:
                slot.__set__(item, value)


def with_copies(before: Any, iterator_copies: Mapping[int, Any]) -> Any:
    """Return saved contents with copies in place of iterators that have advanced."""
    return [iterator_copies.get(id(part), part) for part in before] if type(before) is list else before


def restore_object(state: ObjectState) -> None:
    kind, item, before = state
    kind.restore(item, before)


# A tensor, an alias of its data, requires_grad, and its gradient.
TensorState = tuple[torch.Tensor, torch.Tensor | None, bool, torch.Tensor | None]


def save_tensor(tensor: torch.Tensor) -> TensorState:
    """Return a tensor's state; the alias is None for sparse and nested tensors and subclasses."""
    is_strided = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    alias = tensor.detach() if is_strided and not tensor.is_nested else None
    return tensor, alias, tensor.requires_grad, tensor.grad if _is_leaf(tensor) else None


def restore_tensor(state: TensorState) -> None:
    """Restore all changes except the elements, which the undo log restores."""
    tensor, alias, requires_grad, grad = state
    if alias is not None and _data_location(tensor) != _data_location(alias):
        if tensor.is_meta == alias.is_meta:
            tensor.data = alias
        else:  # torch refuses data of another kind of device, which the model assigned in shape execution
            original = nn.Parameter(alias) if isinstance(tensor, nn.Parameter) else alias
            original.__dict__.update(tensor.__dict__)
            torch.utils.swap_tensors(tensor, original)
    if _is_leaf(tensor) is False and not requires_grad and not tensor._is_view():
        tensor.detach_()  # the run wrote a tensor with autograd history into it
    if _is_leaf(tensor):
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        if tensor.grad is not grad:
            tensor.grad = grad


def _data_location(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


def _is_leaf(tensor: torch.Tensor) -> bool | None:
    """Return whether a tensor is a leaf, None if autograd raises, as for views (FSDP's) whose base was written to."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return None


def restore_all(restorers: Iterable[tuple[Callable[[Any], None], Iterable[Any]]]) -> None:
    """Call each function with each of its states; the first exception, of any kind, is raised after all calls."""
    errors: list[BaseException] = []
    with without_modes():
        for restore, states in restorers:
            for state in states:
                try:
                    restore(state)
                except BaseException as error:
                    errors.append(error)
    if errors:
        raise errors[0]


Key = TypeVar("Key")
Item = TypeVar("Item")


class IdentityMapping(Mapping[Key, Item]):
    """A mapping keyed by identity, in insertion order; the first of several pairs with one key wins.

    >>> first, second = [], []
    >>> mapping = IdentityMapping([(first, 1), (second, 2), (first, 3)])
    >>> list(mapping.values()), list(mapping.items())
    ([1, 2], [([], 1), ([], 2)])
    """

    def __init__(self, pairs: Iterable[tuple[Key, Item]]) -> None:
        # Includes the key, to keep it alive: ids are reused.
        self._pairs: dict[int, tuple[Key, Item]] = {}
        for pair in pairs:
            self._pairs.setdefault(id(pair[0]), pair)

    def __getitem__(self, key: Key) -> Item:
        return self._pairs[id(key)][1]

    def __iter__(self) -> Iterator[Key]:
        return iter([key for key, _ in self._pairs.values()])

    def __len__(self) -> int:
        return len(self._pairs)

    def get(self, key: Any, default: Any = None) -> Any:
        pair = self._pairs.get(id(key))
        return default if pair is None else pair[1]

    def items(self) -> ValuesView[tuple[Key, Item]]:  # type: ignore[override]
        return self._pairs.values()
