"""Find what a model's result leaves to compute: iterators, coroutines, futures, functions; and arrays in it."""

from __future__ import annotations

import asyncio
import io
import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from operator import length_hint
from types import (
    AsyncGeneratorType,
    CellType,
    CodeType,
    CoroutineType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import nn

from fvflops.capture.restore.contents import VALUE_TYPES, contents_of, is_iterator
from fvflops.trace import TensorSpec

# Objects in a result that are looked at.
_MAX_OBJECTS = 4096
_CONTAINERS = (list, tuple, set, frozenset, deque)
_FUNCTIONS = (FunctionType, MethodType, partial)
# What an object computes later needs a tensor or a module.
_COMPUTE = (torch.Tensor, nn.Module)
_NOT_FOLLOWED = (*_COMPUTE, type, ModuleType, torch.dtype, torch.device, io.IOBase, itertools.count, itertools.repeat)


@dataclass(slots=True)
class Leaves:
    """Objects of a result that are no containers: `unfinished` compute when they are used, `numbers` are arrays."""

    unfinished: list[Any] = field(default_factory=list)
    numbers: list[Any] = field(default_factory=list)


def find_leaves(result: Any) -> Leaves:
    """Return the iterators, awaitables, futures, functions and arrays in a result, nested in containers and objects.

    A function counts if it refers to a tensor or a module, and so does an object that has a module as an attribute,
    which a property may call.

    >>> found = find_leaves((1.5, {"steps": map(abs, [1])}))
    >>> [type(item).__name__ for item in (*found.unfinished, *found.numbers)]
    ['map', 'float']
    """
    leaves = Leaves()
    visited: dict[int, Any] = {}
    pending = deque([(result, True)])
    while pending and len(visited) < _MAX_OBJECTS:
        value, is_direct = pending.popleft()
        if id(value) in visited or isinstance(value, _NOT_FOLLOWED):
            continue
        visited[id(value)] = value
        kind = type(value)
        if kind is float or hasattr(kind, "__array__") or hasattr(kind, "__array_interface__"):
            leaves.numbers.append(value)
        elif kind in VALUE_TYPES:
            continue
        elif any(hasattr(kind, name) for name in ("__next__", "__anext__", "__await__")) or _is_future(value):
            leaves.unfinished.append(value)
        elif isinstance(value, _FUNCTIONS):
            if is_direct and _refers_to_tensors(value):
                leaves.unfinished.append(value)
        elif isinstance(value, Mapping):
            pending += [(item, is_direct) for item in value.values()]
        elif isinstance(value, _CONTAINERS):
            pending += [(item, is_direct) for item in value]
        else:
            attributes = list(getattr(value, "__dict__", {}).values())
            if any(isinstance(item, nn.Module) for item in attributes):
                leaves.unfinished.append(value)
            pending += [(item, hasattr(kind, "__dataclass_fields__")) for item in attributes]
    return leaves


def _is_future(value: Any) -> bool:
    return isinstance(value, (Future, torch.futures.Future, torch.jit.Future))


def _refers_to_tensors(function: Any) -> bool:
    visited: set[int] = set()
    pending = [function]
    while pending and len(visited) < _MAX_OBJECTS:
        value = pending.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, _COMPUTE):
            return True
        if isinstance(value, FunctionType):
            pending += [*(value.__closure__ or ()), *(value.__defaults__ or ()), getattr(value, "__wrapped__", None)]
        elif isinstance(value, MethodType):
            pending += [value.__self__, value.__func__]
        elif isinstance(value, partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, CellType):
            pending += contents_of(value)
        elif isinstance(value, (list, tuple)):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
    return False


def code_of(work: Any) -> CodeType | None:
    """Return the code that unfinished work runs, None if it is not Python's."""
    while isinstance(work, (MethodType, partial)):
        work = work.__func__ if isinstance(work, MethodType) else work.func
    for name in ("gi_code", "cr_code", "ag_code", "__code__"):
        code = getattr(work, name, None)
        if isinstance(code, CodeType):
            return code
    return None


def is_finished(work: Any) -> bool | None:
    """Return whether nothing is left to compute, None if that cannot be told.

    >>> steps = map(abs, [1])
    >>> is_finished(steps), list(steps), is_finished(steps)
    (False, [1], True)
    """
    if isinstance(work, GeneratorType):
        return work.gi_frame is None
    if isinstance(work, CoroutineType):
        return work.cr_frame is None
    if isinstance(work, AsyncGeneratorType):
        return work.ag_frame is None
    if _is_future(work) or asyncio.isfuture(work):
        return bool(work.done())
    return _is_exhausted(work) if is_iterator(work) else None


def _is_exhausted(iterator: Iterator[Any]) -> bool | None:
    """Return whether a built-in iterator has ended: if one that it reads has."""
    try:
        return length_hint(iterator) == 0 if hasattr(iterator, "__length_hint__") else _have_ended(iterator)
    except TypeError:  # an iterator of itertools, from Python 3.14 on
        return None


def _have_ended(iterator: Any) -> bool | None:
    _, arguments, *state = iterator.__reduce__()
    parts = (*arguments, *(state[0] if state and type(state[0]) is tuple else state))
    inner = [is_finished(item) for item in parts if hasattr(type(item), "__next__")]
    if not inner:
        return True
    return any(inner) if None not in inner else None


def address_of_array(array: Any) -> int:
    """Return the address of an array's memory, 0 if it does not tell one, as an image."""
    data = getattr(array, "__array_interface__", {}).get("data")
    return int(data[0]) if isinstance(data, tuple) else 0


def describe_array(array: Any) -> TensorSpec:
    """Return the spec of an array, an image, a table or a number, as bytes if torch lacks its dtype."""
    dtype = "float64" if type(array) is float else str(getattr(array, "dtype", ""))
    is_known = isinstance(getattr(torch, dtype, None), torch.dtype)
    shape = getattr(array, "shape", getattr(array, "size", ()))
    return TensorSpec(tuple(map(int, shape)) if isinstance(shape, tuple) else (), dtype if is_known else "uint8")
