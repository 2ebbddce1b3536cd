"""Find the tensors without numbers that outlive a run, and take them out of what keeps them."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, deque
from types import CellType, FrameType, FunctionType, GeneratorType, ModuleType, TracebackType
from typing import Any

from torch import nn

from fvflops.capture.restore.contents import CACHE
from fvflops.capture.restore.namespaces import read_slot, slots_of
from fvflops.capture.shapes.shape_tensor import ShapeTensor

# What keeps a tensor only as long as a call or an error lasts.
_PASSING = (FrameType, TracebackType)
# Tuples in tuples in lists: so far up is looked for what can be undone, and for a name.
_LEVELS = 8


def release(run: weakref.ref[Any]) -> list[str]:
    """Take a run's tensors out of what still keeps them, and return the names of what they cannot be taken out of.

    A run that nothing refers to has left none. What only frames keep, of a program or of an error, is not looked at.
    """
    if run() is None:
        return []
    gc.collect(0)  # a run is made without Python's collector: all that it made is young
    if run() is None:
        return []
    _remove(_survivors(run))
    if run() is None:
        return []
    left = list(map(weakref.ref, _survivors(run)))  # a list of them would be one of their holders
    return list(dict.fromkeys([name for tensor in left if (name := _name_of(tensor()))]))


def say_kept(names: list[str]) -> str:
    """Return in one line what keeps tensors without numbers, "" where nothing does."""
    return f"tensors without numbers are still kept by {', '.join(names)}" if names else ""


def _survivors(run: weakref.ref[Any]) -> list[Any]:
    tensors = [item for item in gc.get_objects() if type(item) is ShapeTensor]
    return [item for item in tensors if (home := getattr(item, "home", None)) is not None and home.run is run()]


def _remove(tensors: list[Any]) -> None:
    """Take tensors, and tuples of them, out of the containers that they are in."""
    level = tensors
    for _ in range(_LEVELS):
        fixed = []
        for holder in _holders_of(level):
            if isinstance(holder, (tuple, frozenset)):
                fixed.append(holder)
            else:
                _remove_from(holder, set(map(id, level)))
        if not fixed:
            return
        level = fixed


def _holders_of(items: list[Any]) -> list[Any]:
    return [
        holder
        for holder in gc.get_referrers(*items)
        if holder is not items and type(holder) not in _PASSING and not isinstance(holder, ShapeTensor)
    ]


def _remove_from(holder: Any, tensors: set[int]) -> None:
    kind = type(holder)
    if issubclass(kind, dict):
        base: Any = OrderedDict if issubclass(kind, OrderedDict) else dict
        for key, value in list(base.items(holder)):
            if id(value) in tensors or id(key) in tensors:
                base.__delitem__(holder, key)
    elif issubclass(kind, (list, deque)):
        base = list if issubclass(kind, list) else deque
        kept = [item for item in base.__iter__(holder) if id(item) not in tensors]
        base.clear(holder)
        base.extend(holder, kept)
    elif issubclass(kind, set):
        set.difference_update(holder, [item for item in set.__iter__(holder) if id(item) in tensors])
    elif kind is CACHE:
        CACHE.cache_clear(holder)
    else:
        for slot in slots_of(kind):
            if id(read_slot(slot, holder)) in tensors:
                slot.__delete__(holder)


def _name_of(item: Any) -> str:
    """Return by what an object is kept, from a module or a class on if that can be found; "" where nothing is seen."""
    path, met = "", {id(item)}
    for _ in range(_LEVELS):
        holder = min((found for found in _holders_of([item]) if id(found) not in met), key=_rank, default=None)
        if holder is None:
            break
        met.add(id(holder))
        path = _step_into(holder, item) + path
        item = holder
        if isinstance(item, nn.Module):
            return type(item).__qualname__ + path
        if isinstance(item, ModuleType):
            return item.__name__ + path
        if isinstance(item, type):
            return f"{item.__module__}.{item.__qualname__}{path}"
    return type(item).__name__ + path if path else ""


def _rank(holder: Any) -> int:
    kinds = (nn.Module, ModuleType, type, FunctionType, GeneratorType, dict)
    return next((place for place, kind in enumerate(kinds) if isinstance(holder, kind)), len(kinds))


def _step_into(holder: Any, item: Any) -> str:
    """Return how an object is reached from what refers to it."""
    if isinstance(holder, dict):
        key = next((key for key, value in dict.items(holder) if value is item), None)
        return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"
    if isinstance(holder, GeneratorType):
        return f" (the generator {holder.__qualname__})"
    if isinstance(holder, CellType):
        return " (in a closure)"
    return "" if isinstance(item, dict) else "[...]"
