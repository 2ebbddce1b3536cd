"""Read and restore a mutable object's contents by its base type's methods, since subclasses may override them."""

from __future__ import annotations

import gc
import io
import itertools
import random
import re
import sys
import threading
import types
import warnings
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import cache, partial
from operator import is_, length_hint
from typing import Any

import torch

# Immutable types without references.
VALUE_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
# Types whose objects are not saved, nor the objects that they refer to.
LEAF_TYPES = frozenset(
    {
        *(type(str.join), type(int.__add__), type(int.real), type(vars(type)["__mro__"]), types.UnionType, property),
        *(types.GenericAlias, types.MappingProxyType, types.CodeType, re.Pattern, weakref.ref, object, slice),
    }
)
# Larger NumPy arrays are neither saved nor restored.
_MAX_ARRAY_BYTES = 1 << 26

Restore = Callable[[Any, Any], None]
# An object's contents, the function that restores them, and the objects to visit next. The function is None if the
# object is immutable, read-only or too large, or has no contents but those objects.
Saved = tuple[Any, Restore | None, Iterable[Any]]
Save = Callable[[Any], Saved]

LRU_CACHE_TYPE = type(cache(len))
# One per type of iterator: those over range(1 << 70) and over a non-ASCII string have types of their own.
_ITERABLES: tuple[Any, ...] = (
    [],
    (),
    range(0),
    range(1 << 70),
    "",
    "é",
    b"",
    bytearray(),
    {},
    {}.values(),
    {}.items(),
    set(),
)
_REVERSIBLES: tuple[Any, ...] = ([], range(0), {}, {}.values(), {}.items())
# Types of iterators with a length hint.
_HINTED = frozenset(map(type, [*map(iter, _ITERABLES), *map(reversed, _REVERSIBLES), itertools.repeat(0, 1)]))
_ITERATORS = frozenset(
    (
        *_HINTED,
        *(enumerate, zip, map, filter, reversed),
        *(kind for kind in vars(itertools).values() if type(kind) is type),
    )
)


def save_for(cls: type) -> Save | None:
    """Return the function that saves a class's objects, or None for a class that is not a container."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and issubclass(cls, numpy.ndarray):
        return _save_array
    if numpy is not None and issubclass(cls, (numpy.random.Generator, numpy.random.RandomState)):
        return _save_numpy_generator
    return next((save for base, save in _SAVES if issubclass(cls, base)), None)


def _save_ordered(item: OrderedDict[Any, Any]) -> Saved:
    pairs = list(OrderedDict.items(item))
    return pairs, _restore_ordered, _mutable_parts(pairs)


def _restore_ordered(item: OrderedDict[Any, Any], before: list[tuple[Any, Any]]) -> None:
    if not _same_pairs(list(OrderedDict.items(item)), before):
        OrderedDict.clear(item)
        OrderedDict.update(item, before)


def _save_dict(item: dict[Any, Any]) -> Saved:
    pairs = list(dict.items(item))
    return pairs, restore_dict, _mutable_parts(pairs)


def restore_dict(item: dict[Any, Any], before: list[tuple[Any, Any]]) -> None:
    """Restore a dict's contents and order."""
    if not _same_pairs(list(dict.items(item)), before):
        dict.clear(item)
        dict.update(item, before)


def _mutable_parts(pairs: list[tuple[Any, Any]]) -> list[Any]:
    return [part for pair in pairs for part in pair if type(part) not in VALUE_TYPES]


def _same_pairs(now: list[tuple[Any, Any]], before: list[tuple[Any, Any]]) -> bool:
    flat = itertools.chain.from_iterable
    return len(now) == len(before) and all(map(is_, flat(now), flat(before)))


def same_items(now: list[Any], before: list[Any]) -> bool:
    """Return whether two lists contain the same objects, by identity."""
    return len(now) == len(before) and all(map(is_, now, before))


def _save_list(item: list[Any]) -> Saved:
    before = list.copy(item)
    return before, _restore_list, _mutable(before)


def _restore_list(item: list[Any], before: list[Any]) -> None:
    if not same_items(list.copy(item), before):
        list.__setitem__(item, slice(None), before)


def _save_deque(item: deque[Any]) -> Saved:
    before = list(deque.__iter__(item))
    return before, _restore_deque, _mutable(before)


def _restore_deque(item: deque[Any], before: list[Any]) -> None:
    if not same_items(list(deque.__iter__(item)), before):
        deque.clear(item)
        deque.extend(item, before)


def _save_set(item: set[Any]) -> Saved:
    before = list(set.__iter__(item))
    return before, _restore_set, _mutable(before)


def _restore_set(item: set[Any], before: list[Any]) -> None:
    if {*map(id, set.__iter__(item))} != {*map(id, before)}:
        set.clear(item)
        set.update(item, before)


def _save_immutable(item: Any) -> Saved:
    base = tuple if issubclass(type(item), tuple) else frozenset
    return None, None, _mutable(base.__iter__(item))


def _mutable(items: Iterable[Any]) -> list[Any]:
    return [item for item in items if type(item) not in VALUE_TYPES]


def _save_bytes(item: bytearray) -> Saved:
    return bytes(memoryview(item)), _restore_bytes, ()


def _restore_bytes(item: bytearray, before: bytes) -> None:
    if bytes(memoryview(item)) != before:
        bytearray.__setitem__(item, slice(None), before)


def _save_numbers(item: array[Any]) -> Saved:
    return array.__getitem__(item, slice(None)), _restore_numbers, ()


def _restore_numbers(item: array[Any], before: array[Any]) -> None:
    if array.tobytes(item) != array.tobytes(before):
        array.__setitem__(item, slice(None), before)


def _save_array(item: Any) -> Saved:
    """Save a NumPy array's elements."""
    numpy = sys.modules["numpy"]
    array = numpy.ndarray.view(item, numpy.ndarray)
    children = _mutable(array.ravel().tolist()) if array.dtype.hasobject else ()
    if not array.flags.writeable or array.nbytes > _MAX_ARRAY_BYTES:
        return None, None, children
    return array.copy(), restore_array, children


def has_new_numbers(item: Any, before: Any) -> bool:
    """Return whether a saved NumPy array is of floating-point numbers and has other contents now."""
    return item.dtype.kind in "fc" and bool(item.shape != before.shape or item.tobytes() != before.tobytes())


def restore_array(item: Any, before: Any) -> None:
    """Restore a NumPy array's elements."""
    numpy = sys.modules["numpy"]
    if item.shape != before.shape:
        numpy.ndarray.resize(item, before.shape, refcheck=False)
    array = numpy.ndarray.view(item, numpy.ndarray)
    if array.dtype.hasobject or array.tobytes() != before.tobytes():
        array[...] = before


def _save_numpy_generator(item: Any) -> Saved:
    if hasattr(item, "bit_generator"):
        return item.bit_generator.state, _restore_numpy_generator, ()
    return item.get_state(legacy=False), _restore_numpy_generator, ()


def _restore_numpy_generator(item: Any, before: Any) -> None:
    if hasattr(item, "bit_generator"):
        item.bit_generator.state = before
    else:
        item.set_state(before)


def _save_random(item: random.Random) -> Saved:
    return random.Random.getstate(item), random.Random.setstate, ()


def _save_generator(item: torch.Generator) -> Saved:
    return item.get_state(), _restore_generator, ()


def _restore_generator(item: torch.Generator, before: torch.Tensor) -> None:
    item.set_state(before)


def _save_stream(item: Any) -> Saved:
    base: Any = io.BytesIO if issubclass(type(item), io.BytesIO) else io.StringIO
    return None if item.closed else base.__getstate__(item)[:-1], _restore_stream, ()


def _restore_stream(item: Any, before: Any) -> None:
    base: Any = io.BytesIO if issubclass(type(item), io.BytesIO) else io.StringIO
    if before is not None and not item.closed and base.__getstate__(item)[:-1] != before:
        base.__setstate__(item, (*before, None))


def _save_cell(item: types.CellType) -> Saved:
    before = [value for value in (contents_of(item),) if value is not _EMPTY]
    return before, _restore_cell, before


def contents_of(cell: types.CellType) -> Any:
    """Return a cell's contents, or `_EMPTY`."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


_EMPTY = object()


def _restore_cell(item: types.CellType, before: list[Any]) -> None:
    now = contents_of(item)
    if before and now is not before[0]:
        item.cell_contents = before[0]
    elif not before and now is not _EMPTY:
        del item.cell_contents


def _save_cache(item: Any) -> Saved:
    """Save a `functools.lru_cache`: an unbounded one by its dict; a bounded one can only be cleared."""
    info = LRU_CACHE_TYPE.cache_info(item)
    attributes = item.__dict__
    referents = [value for value in gc.get_referents(item) if value is not attributes and type(value) is not type]
    if info.maxsize is None:
        return None, None, referents
    return info.misses, _restore_cache, [value for value in referents if type(value) is not dict]


def _restore_cache(item: Any, misses: int) -> None:
    if LRU_CACHE_TYPE.cache_info(item).misses != misses:
        LRU_CACHE_TYPE.cache_clear(item)


def _save_partial(item: partial[Any]) -> Saved:
    return None, None, (item.func, item.args, item.keywords)


def _save_local(item: threading.local) -> Saved:
    return None, None, (threading.local.__getattribute__(item, "__dict__"),)


def _save_variable(item: ContextVar[Any]) -> Saved:
    try:
        return None, None, (item.get(),)
    except LookupError:
        return None, None, ()


_SAVES: tuple[tuple[Any, Save], ...] = (
    (OrderedDict, _save_ordered),
    (dict, _save_dict),
    (list, _save_list),
    ((tuple, frozenset), _save_immutable),
    (deque, _save_deque),
    (set, _save_set),
    (bytearray, _save_bytes),
    (array, _save_numbers),
    (types.CellType, _save_cell),
    (random.Random, _save_random),
    (torch.Generator, _save_generator),
    ((io.BytesIO, io.StringIO), _save_stream),
    (LRU_CACHE_TYPE, _save_cache),
    (partial, _save_partial),
    (threading.local, _save_local),
    (ContextVar, _save_variable),
)


# Functions that restore random generators, and those that restore objects without children.
GENERATORS = frozenset({_restore_numpy_generator, random.Random.setstate, _restore_generator})
# For generators of Python and NumPy: the function that restores one → the one that saves it.
SAVES_OF_GENERATORS = {_restore_numpy_generator: _save_numpy_generator, random.Random.setstate: _save_random}
CHILDLESS = GENERATORS | {_restore_bytes, _restore_numbers, _restore_stream}


def is_iterator(value: Any) -> bool:
    """Return whether an object is an iterator of a type that can be copied."""
    return type(value) in _ITERATORS


class Iterators:
    """Iterators, each with a copy at its position."""

    def __init__(self) -> None:
        # The iterator, its copy, and its position.
        self._saved: list[tuple[Any, Any, Any]] = []

    def add(self, iterator: Any) -> None:
        """Save an iterator's position, unless it contains something that cannot be copied, such as a generator."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # copying itertools is deprecated until Python 3.14
            try:
                self._saved.append((iterator, _copy(iterator), _position(iterator)))
            except TypeError:
                return

    def advanced(self) -> dict[int, Any]:
        """Return the copies of iterators that have advanced, by the id of the iterator to replace."""
        if not self._saved:
            return {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return {id(iterator): copy for iterator, copy, before in self._saved if _position(iterator) != before}


def _copy(iterator: Any) -> Any:
    constructor, arguments, *state = iterator.__reduce__()
    copied = constructor(*[_copy(part) if is_iterator(part) else part for part in arguments])
    if state and state[0] is not None:
        copied.__setstate__(_copy_state(state[0]))
    return copied


def _copy_state(state: Any) -> Any:
    if type(state) is tuple:
        return tuple(map(_copy_state, state))
    if type(state) is list:  # itertools.cycle appends to its list
        return list(state)
    return _copy(state) if is_iterator(state) else state


def _position(iterator: Any) -> Any:
    return length_hint(iterator) if type(iterator) in _HINTED else _describe(iterator.__reduce__()[1:])


def _describe(part: Any) -> Any:
    if is_iterator(part):
        return _position(part)
    if type(part) is tuple:
        return tuple(map(_describe, part))
    if type(part) is list:
        return len(part)
    return part if type(part) in VALUE_TYPES else id(part)
