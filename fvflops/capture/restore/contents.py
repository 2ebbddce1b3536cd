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
from operator import attrgetter, length_hint
from typing import Any, NamedTuple

import torch

from fvflops.capture.restore.global_state import comparable

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

LRU_CACHE_TYPE = type(cache(len))


class Kind(NamedTuple):
    """How the objects of a type are read and restored.

    `read` returns an object's contents in a list, or its state, or None if that cannot be restored. `write` restores
    what `read` returned; without it the object is immutable.
    """

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object] | None = None

    def restore(self, item: Any, before: Any) -> None:
        now = self.read(item) if self.write is not None and before is not None else None
        if now is not None and self.write is not None and not _are_same(now, before):
            self.write(item, before)


def _are_same(now: Any, before: Any) -> bool:
    """Return whether contents are the same: objects by identity, numbers and states by value."""
    if type(now) is not list:
        return bool(comparable(now) == comparable(before))
    return len(now) == len(before) and all(
        a is b or (type(a) is type(b) and type(a) in VALUE_TYPES and a == b) for a, b in zip(now, before, strict=True)
    )


def kind_of(cls: type) -> Kind | None:
    """Return how a class's objects are read, or None for a class that is not a container."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and issubclass(cls, numpy.ndarray):
        return ARRAY
    if numpy is not None and issubclass(cls, numpy.random.Generator):
        return _NUMPY_GENERATOR
    if numpy is not None and issubclass(cls, numpy.random.RandomState):
        return _NUMPY_LEGACY_GENERATOR
    return next((kind for base, kind in _KINDS if issubclass(cls, base)), None)


def _read_dict(base: Any, item: Any) -> list[Any]:
    return list(itertools.chain.from_iterable(base.items(item)))


def _write_dict(base: Any, item: Any, before: list[Any]) -> None:
    base.clear(item)
    base.update(item, zip(before[::2], before[1::2], strict=True))


def _read_items(base: Any, item: Any) -> list[Any]:
    return list(base.__iter__(item))


def _write_items(base: Any, item: Any, before: Any) -> None:
    base.__setitem__(item, slice(None), before)


def _refill(base: Any, add: Callable[[Any, Any], object], item: Any, before: list[Any]) -> None:
    base.clear(item)
    add(item, before)


def _read_array(item: Any) -> Any:
    numpy: Any = sys.modules["numpy"]
    array = numpy.ndarray.view(item, numpy.ndarray)
    if array.nbytes > _MAX_ARRAY_BYTES:
        return None
    if array.dtype.hasobject:
        return [torch.Size(array.shape), *array.ravel().tolist()]
    return (array.shape, array.tobytes()) if array.flags.writeable else None


def _write_array(item: Any, before: Any) -> None:
    numpy: Any = sys.modules["numpy"]
    shape, values = (before[0], before[1:]) if type(before) is list else before
    if not item.flags.writeable:
        return
    if item.shape != shape:
        numpy.ndarray.resize(item, shape, refcheck=False)
    array = numpy.ndarray.view(item, numpy.ndarray)
    if type(before) is list:
        for index, value in enumerate(values):
            array.flat[index] = value
    else:
        array[...] = numpy.ndarray(shape, array.dtype, values)


def _write_numpy_generator(item: Any, before: Any) -> None:
    item.bit_generator.state = before


def _read_stream(base: Any, item: Any) -> Any:
    return None if item.closed else base.__getstate__(item)[:-1]


def _write_stream(base: Any, item: Any, before: Any) -> None:
    base.__setstate__(item, (*before, None))


def _read_one(read: Callable[[Any], Any], item: Any) -> list[Any]:
    try:
        return [read(item)]
    except (ValueError, LookupError):  # an empty cell, a variable without a value
        return []


def _write_cell(item: types.CellType, before: list[Any]) -> None:
    if before:
        item.cell_contents = before[0]
    else:
        del item.cell_contents


def _read_cache(item: Any) -> list[Any]:
    """Return the referents of a `functools.lru_cache`; only an unbounded one has a dict that can be restored."""
    info = LRU_CACHE_TYPE.cache_info(item)
    attributes = item.__dict__
    referents = [value for value in gc.get_referents(item) if value is not attributes and type(value) is not type]
    if info.maxsize is None:
        return [None, *referents]
    return [info.misses, *(value for value in referents if type(value) is not dict)]


def _write_cache(item: Any, before: list[Any]) -> None:
    misses = before[0]
    if misses is not None and LRU_CACHE_TYPE.cache_info(item).misses != misses:  # hits reorder the referents too
        LRU_CACHE_TYPE.cache_clear(item)


def _read_function(function: types.FunctionType) -> list[Any]:
    parts = [getattr(function, name) for name in _FUNCTION_PARTS]
    return [*parts, *(function.__closure__ or ()), function.__dict__]


def _write_function(function: types.FunctionType, before: list[Any]) -> None:
    for name, value in zip(_FUNCTION_PARTS, before, strict=False):
        setattr(function, name, value)


_FUNCTION_PARTS = ("__defaults__", "__kwdefaults__", "__code__")
ORDERED_DICT, DICT = (Kind(partial(_read_dict, base), partial(_write_dict, base)) for base in (OrderedDict, dict))
LIST = Kind(partial(_read_items, list), partial(_write_items, list))
FUNCTION = Kind(_read_function, _write_function)
ARRAY = Kind(_read_array, _write_array)
_NUMPY_GENERATOR = Kind(lambda item: item.bit_generator.state, _write_numpy_generator)
_NUMPY_LEGACY_GENERATOR = Kind(lambda item: item.get_state(legacy=False), lambda item, before: item.set_state(before))
_RANDOM = Kind(random.Random.getstate, random.Random.setstate)
_TORCH_GENERATOR = Kind(torch.Generator.get_state, torch.Generator.set_state)
# Random generators of Python and NumPy, and these with torch's.
NUMBER_GENERATORS = (_RANDOM, _NUMPY_GENERATOR, _NUMPY_LEGACY_GENERATOR)
GENERATORS = (*NUMBER_GENERATORS, _TORCH_GENERATOR)

_KINDS: tuple[tuple[Any, Kind], ...] = (
    (OrderedDict, ORDERED_DICT),
    (dict, DICT),
    (list, LIST),
    (tuple, Kind(partial(_read_items, tuple))),
    (frozenset, Kind(partial(_read_items, frozenset))),
    (deque, Kind(partial(_read_items, deque), partial(_refill, deque, deque.extend))),
    (set, Kind(partial(_read_items, set), partial(_refill, set, set.update))),
    (bytearray, Kind(lambda item: bytes(memoryview(item)), partial(_write_items, bytearray))),
    (array, Kind(lambda item: array.__getitem__(item, slice(None)), partial(_write_items, array))),
    (types.CellType, Kind(partial(_read_one, attrgetter("cell_contents")), _write_cell)),
    (random.Random, _RANDOM),
    (torch.Generator, _TORCH_GENERATOR),
    *((base, Kind(partial(_read_stream, base), partial(_write_stream, base))) for base in (io.BytesIO, io.StringIO)),
    (LRU_CACHE_TYPE, Kind(_read_cache, _write_cache)),
    (partial, Kind(lambda item: [item.func, item.args, item.keywords])),
    (threading.local, Kind(lambda item: [threading.local.__getattribute__(item, "__dict__")])),
    (ContextVar, Kind(partial(_read_one, ContextVar.get))),
)

# One per type of iterator: range(1 << 70) and a non-ASCII string have types of their own.
_ITERABLES: tuple[Any, ...] = (
    *([], (), range(0), range(1 << 70), "", "é", b"", bytearray(), {}, {}.values(), {}.items(), set()),
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


def is_iterator(value: Any) -> bool:
    """Return whether an object is an iterator of a type that can be copied."""
    return type(value) in _ITERATORS


# An iterator, its copy at its position, and that position.
SavedIterator = tuple[Any, Any, Any]


def save_iterator(iterator: Any) -> SavedIterator | None:
    """Return an iterator with a copy, None if it contains something that cannot be copied, such as a generator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # copying itertools is deprecated until Python 3.14
        try:
            return iterator, _copy(iterator), _position(iterator)
        except TypeError:
            return None


def advanced_iterators(saved: Iterable[SavedIterator]) -> dict[int, Any]:
    """Return the copies of iterators that have advanced, by the id of the iterator to replace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return {id(iterator): copy for iterator, copy, before in saved if _position(iterator) != before}


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
