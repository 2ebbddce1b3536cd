"""Find shape tensors that outlive a run, and remove them from the objects that refer to them."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import OrderedDict, deque
from traceback import walk_tb
from types import CellType, FrameType, FunctionType, GeneratorType, ModuleType, TracebackType
from typing import Any

from torch import nn

from fvflops.capture.restore.contents import LRU_CACHE_TYPE
from fvflops.capture.restore.namespaces import read_slot, slots_of
from fvflops.capture.shapes.shape_tensor import ShapeTensor

# Referrers that last only as long as a call or an error.
_TRANSIENT = (FrameType, TracebackType)
# Depth of the search through referrers (a tuple in a tuple in a list) for a mutable container or a name.
_MAX_DEPTH = 8


def release(run: weakref.ref[Any], *, describe: bool = True) -> list[str]:
    """Remove a run's tensors from objects that refer to them; return the names of objects that still do.

    `run` refers to the run's ShapeMode, which its tensors keep alive. References from stack frames and tracebacks are
    ignored. Without `describe` no names are looked for, which takes 0.1 s for each tensor in the frames of an error.
    """
    if run() is None:
        return []
    gc.collect(0)  # runs pause the garbage collector, so everything they created is in the youngest generation
    if run() is None:
        return []
    _remove(_survivors(run))
    if run() is None or not describe:
        return []
    remaining = list(map(weakref.ref, _survivors(run)))  # weak, so that this list is not a referrer
    return list(dict.fromkeys([name for tensor in remaining if (name := _name_of(tensor()))]))


def describe_survivors(names: list[str]) -> str:
    """Return a message about the objects that refer to shape tensors, "" for none."""
    return f"shape tensors (no values) are still referenced by {', '.join(names)}" if names else ""


def _survivors(run: weakref.ref[Any]) -> list[Any]:
    tensors = [item for item in gc.get_objects() if type(item) is ShapeTensor]
    refs = [(item, getattr(item, "storage_ref", None)) for item in tensors]
    return [item for item, storage_ref in refs if storage_ref is not None and storage_ref.mode is run()]


def _remove(tensors: list[Any]) -> None:
    """Remove tensors, and tuples of them, from their containers.

    Keyword arguments in the frames of an error that is being handled stay, since its message describes them.
    """
    error = sys.exc_info()[1]
    frames = walk_tb(None if error is None else error.__traceback__)
    arguments = {id(frame.f_locals.get("kwargs")) for frame, _ in frames}
    objects = tensors
    for _ in range(_MAX_DEPTH):
        immutable = []
        for referrer in _referrers_of(objects):
            if isinstance(referrer, (tuple, frozenset)):
                immutable.append(referrer)
            elif id(referrer) not in arguments:
                _remove_from(referrer, set(map(id, objects)))
        if not immutable:
            return
        objects = immutable


def _referrers_of(items: list[Any]) -> list[Any]:
    referrers = gc.get_referrers(*items)
    if sys.version_info < (3, 11):  # where a generator refers to its variables through a frame
        frames = [referrer for referrer in referrers if type(referrer) is FrameType]
        generators = (item for item in gc.get_referrers(*frames) if isinstance(item, GeneratorType))
        referrers += [item for item in generators if not item.gi_running]
    lasting = [item for item in referrers if item is not items and type(item) not in _TRANSIENT]
    return [item for item in lasting if not isinstance(item, ShapeTensor)]


def _remove_from(referrer: Any, ids: set[int]) -> None:
    kind = type(referrer)
    if issubclass(kind, dict):
        base: Any = OrderedDict if issubclass(kind, OrderedDict) else dict
        for key, value in list(base.items(referrer)):
            if id(value) in ids or id(key) in ids:
                base.__delitem__(referrer, key)
    elif issubclass(kind, (list, deque)):
        base = list if issubclass(kind, list) else deque
        remaining = [item for item in base.__iter__(referrer) if id(item) not in ids]
        base.clear(referrer)
        base.extend(referrer, remaining)
    elif issubclass(kind, set):
        set.difference_update(referrer, [item for item in set.__iter__(referrer) if id(item) in ids])
    elif kind is LRU_CACHE_TYPE:
        LRU_CACHE_TYPE.cache_clear(referrer)
    else:
        for slot in slots_of(kind):
            if id(read_slot(slot, referrer)) in ids:
                slot.__delete__(referrer)
        attributes = _attributes_of(referrer)
        if attributes is not None:
            _remove_from(attributes, ids)


def _attributes_of(item: Any) -> dict[str, Any] | None:
    """Return the attributes of an object, which may refer to their values without a dict (since Python 3.11)."""
    try:
        attributes = object.__getattribute__(item, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict else None


def _name_of(item: Any) -> str:
    """Return the path through an object's referrers, from a module or class if there is one, "" without referrers."""
    path, visited = "", {id(item)}
    for _ in range(_MAX_DEPTH):
        referrers = [referrer for referrer in _referrers_of([item]) if id(referrer) not in visited]
        referrer = min(referrers, key=_rank, default=None)
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
    return next((rank for rank, kind in enumerate(kinds) if isinstance(referrer, kind)), len(kinds))


def _step_into(referrer: Any, item: Any) -> str:
    if isinstance(referrer, dict):
        key = next((key for key, value in dict.items(referrer) if value is item), None)
        return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"
    if isinstance(referrer, GeneratorType):
        return f" (the generator {referrer.__qualname__})"
    if isinstance(referrer, CellType):
        return " (in a closure)"
    attributes = _attributes_of(referrer) or {}
    name = next((name for name, value in attributes.items() if value is item), None)
    if name is not None:
        return f".{name}"
    return "" if isinstance(item, dict) else "[...]"
