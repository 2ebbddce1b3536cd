"""Find shape tensors that outlive a run, and remove them from the objects that refer to them."""

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

# Referrers that last only as long as a call or an error.
_TRANSIENT = (FrameType, TracebackType)
# Depth of the search through referrers (a tuple in a tuple in a list) for a mutable container, and for a name.
_LEVELS = 8


def release(run: weakref.ref[Any]) -> list[str]:
    """Remove a run's tensors from objects that refer to them; return the names of those where this is impossible.

    A run that is itself garbage has left none. References from frames, of a program or of an error, are ignored.
    """
    if run() is None:
        return []
    gc.collect(0)  # runs pause the garbage collector, so everything they created is in the youngest generation
    if run() is None:
        return []
    _remove(_survivors(run))
    if run() is None:
        return []
    remaining = list(map(weakref.ref, _survivors(run)))  # weak, so that this list is not a referrer
    return list(dict.fromkeys([name for tensor in remaining if (name := _name_of(tensor()))]))


def describe_survivors(names: list[str]) -> str:
    """Return in one line what refers to shape tensors, "" for nothing."""
    return f"shape tensors (no values) are still referenced by {', '.join(names)}" if names else ""


def _survivors(run: weakref.ref[Any]) -> list[Any]:
    tensors = [item for item in gc.get_objects() if type(item) is ShapeTensor]
    return [
        item
        for item in tensors
        if (storage_ref := getattr(item, "storage_ref", None)) is not None and storage_ref.run is run()
    ]


def _remove(tensors: list[Any]) -> None:
    """Remove tensors, and tuples of them, from their containers."""
    level = tensors
    for _ in range(_LEVELS):
        fixed = []
        for referrer in _referrers_of(level):
            if isinstance(referrer, (tuple, frozenset)):
                fixed.append(referrer)
            else:
                _remove_from(referrer, set(map(id, level)))
        if not fixed:
            return
        level = fixed


def _referrers_of(items: list[Any]) -> list[Any]:
    return [
        referrer
        for referrer in gc.get_referrers(*items)
        if referrer is not items and type(referrer) not in _TRANSIENT and not isinstance(referrer, ShapeTensor)
    ]


def _remove_from(referrer: Any, tensors: set[int]) -> None:
    kind = type(referrer)
    if issubclass(kind, dict):
        base: Any = OrderedDict if issubclass(kind, OrderedDict) else dict
        for key, value in list(base.items(referrer)):
            if id(value) in tensors or id(key) in tensors:
                base.__delitem__(referrer, key)
    elif issubclass(kind, (list, deque)):
        base = list if issubclass(kind, list) else deque
        kept = [item for item in base.__iter__(referrer) if id(item) not in tensors]
        base.clear(referrer)
        base.extend(referrer, kept)
    elif issubclass(kind, set):
        set.difference_update(referrer, [item for item in set.__iter__(referrer) if id(item) in tensors])
    elif kind is CACHE:
        CACHE.cache_clear(referrer)
    else:
        for slot in slots_of(kind):
            if id(read_slot(slot, referrer)) in tensors:
                slot.__delete__(referrer)


def _name_of(item: Any) -> str:
    """Return the path to an object's referrer, from a module or class if found, "" for none."""
    path, visited = "", {id(item)}
    for _ in range(_LEVELS):
        referrer = min((found for found in _referrers_of([item]) if id(found) not in visited), key=_rank, default=None)
        if referrer is None:
            break
        visited.add(id(referrer))
        path = _step_into(referrer, item) + path
        item = referrer
        if isinstance(item, nn.Module):
            return type(item).__qualname__ + path
        if isinstance(item, ModuleType):
            return item.__name__ + path
        if isinstance(item, type):
            return f"{item.__module__}.{item.__qualname__}{path}"
    return type(item).__name__ + path if path else ""


def _rank(referrer: Any) -> int:
    kinds = (nn.Module, ModuleType, type, FunctionType, GeneratorType, dict)
    return next((place for place, kind in enumerate(kinds) if isinstance(referrer, kind)), len(kinds))


def _step_into(referrer: Any, item: Any) -> str:
    """Return the path segment from a referrer to an object."""
    if isinstance(referrer, dict):
        key = next((key for key, value in dict.items(referrer) if value is item), None)
        return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"
    if isinstance(referrer, GeneratorType):
        return f" (the generator {referrer.__qualname__})"
    if isinstance(referrer, CellType):
        return " (in a closure)"
    return "" if isinstance(item, dict) else "[...]"
