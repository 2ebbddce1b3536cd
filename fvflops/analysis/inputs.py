"""Bind the inputs of an analysis, a tensor, a sequence or a mapping, to a model's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn


def bind_inputs(
    model: Callable[..., Any], inputs: Any, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments for `inputs` and `kwargs`.

    A tuple or a list is positional arguments, a mapping keyword arguments, None no argument, anything else the only
    argument. A mapping that does not match the model's keywords but matches as one argument is one argument. A
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
        duplicates = sorted(inputs.keys() & extra.keys())
        if duplicates:
            raise TypeError(f"{', '.join(map(repr, duplicates))} is in both inputs and kwargs: pass it once")
        if not _accepts(model, (), {**inputs, **extra}) and _accepts(model, (inputs,), extra):
            return (inputs,), extra
        return (), {**inputs, **extra}
    # A named tuple is a single structured argument, not a list of arguments.
    if isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields"):
        return tuple(inputs), extra
    return (inputs,), extra


def check_repeatable(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError where an input is an iterator, which the first of several runs would exhaust.

    >>> check_repeatable((), {"batches": iter([1, 2])})
    Traceback (most recent call last):
    ValueError: input 'batches' is a list_iterator, which the first of several runs would exhaust: pass a list
    """
    for name, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Iterator):
            kind = type(value).__name__
            raise ValueError(f"input {name!r} is a {kind}, which the first of several runs would exhaust: pass a list")


def _accepts(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):
        return True  # written in C, without a signature
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
