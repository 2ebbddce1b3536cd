"""The inputs of an analysis, as people give them: a tensor, several, or a mapping of names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn


def bind_inputs(
    model: Callable[..., Any], inputs: Any, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that `inputs` and `kwargs` stand for.

    A tuple or a list holds positional arguments, a mapping keyword arguments, anything else is the only argument; None
    is no argument. A mapping that the model cannot take by keyword and can take as one argument is one argument. A
    name given twice raises TypeError.

    >>> bind_inputs(lambda ids, mask: ids, {"ids": 1}, {"mask": 2})
    ((), {'ids': 1, 'mask': 2})
    >>> bind_inputs(lambda batch: batch, {"image": 1}, None)
    (({'image': 1},), {})
    """
    extra = dict(kwargs or {})
    if inputs is None:
        return (), extra
    if isinstance(inputs, Mapping):
        twice = sorted(inputs.keys() & extra.keys())
        if twice:
            raise TypeError(f"{', '.join(map(repr, twice))} stands both in the inputs and in kwargs: name it once")
        if not _takes(model, (), {**inputs, **extra}) and _takes(model, (inputs,), extra):
            return (inputs,), extra
        return (), {**inputs, **extra}
    # A named tuple is a structure of the model's own, not a list of arguments.
    if isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields"):
        return tuple(inputs), extra
    return (inputs,), extra


def check_repeatable(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError where an input is an iterator, which only the first of several runs would find anything in.

    >>> check_repeatable((), {"batches": iter([1, 2])})
    Traceback (most recent call last):
    ValueError: input 'batches' is a list_iterator, of which only the first run would get anything: give a list
    """
    for name, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Iterator):
            kind = type(value).__name__
            raise ValueError(f"input {name!r} is a {kind}, of which only the first run would get anything: give a list")


def _takes(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):
        return True  # written in C: only calling it can tell
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
