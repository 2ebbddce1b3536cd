"""The inputs of an analysis, as people give them: a tensor, several, or a mapping of names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def bind_inputs(inputs: Any, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that `inputs` and `kwargs` stand for.

    A tuple or a list holds positional arguments, a mapping keyword arguments, anything else is the only argument; None
    is no argument. A name given twice raises TypeError.

    >>> bind_inputs({"ids": 1}, {"mask": 2})
    ((), {'ids': 1, 'mask': 2})
    """
    extra = dict(kwargs or {})
    if inputs is None:
        return (), extra
    if isinstance(inputs, Mapping):
        twice = sorted(inputs.keys() & extra.keys())
        if twice:
            raise TypeError(f"{', '.join(map(repr, twice))} stands both in the inputs and in kwargs: name it once")
        return (), {**inputs, **extra}
    # A named tuple is a structure of the model's own, not a list of arguments.
    if isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields"):
        return tuple(inputs), extra
    return (inputs,), extra
