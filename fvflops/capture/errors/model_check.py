"""Reject objects that are not models or recordings, and name the remedy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import nn

from fvflops.text import printable, truncate
from fvflops.trace import Trace

# Modules that load, train and predict → their attribute that is the network.
_WRAPPERS = {"ultralytics.engine.model.Model": "model"}
_ATTRIBUTES = ("model", "module", "net", "network", "backbone")
_REMEDY = "pass a torch.nn.Module or a function"


def check_model(model: Any) -> None:
    """Raise TypeError for an object that is neither a module nor a function, or wraps the module to count.

    >>> check_model(nn.Linear)
    Traceback (most recent call last):
    TypeError: the model is the class Linear: create a module of it, such as Linear(...)
    """
    if isinstance(model, nn.Module):
        attribute = _wrapped_attribute(type(model))  # type: ignore[arg-type]
        description = _describe_wrapper(model, (attribute,)) if attribute else ""
    elif isinstance(model, type):
        is_module = issubclass(model, nn.Module)
        description = f"the class {model.__name__}: create a module of it, such as {model.__name__}(...)" * is_module
    else:
        description = "" if callable(model) else _describe(model)
    if description:
        raise TypeError(f"the model is {printable(description)}")


@lru_cache(maxsize=256)
def _wrapped_attribute(kind: type) -> str:
    names = {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}
    return next((_WRAPPERS[name] for name in names & _WRAPPERS.keys()), "")


class Recorded(Protocol):
    """An object with a Trace: an analysis of a model or of a training step, or a recording."""

    def trace(self) -> Trace:
        """Return the Trace."""


def trace_of(recorded: Trace | Recorded) -> Trace:
    """Return the Trace of an analysis, or the Trace itself; anything else, such as a model, raises TypeError.

    >>> trace_of(nn.Linear(3, 2))
    Traceback (most recent call last):
    TypeError: got a value of type Linear instead of an analysis: pass FlopCountAnalysis(model, inputs), or a Trace
    """
    if isinstance(recorded, Trace):
        return recorded
    if isinstance(recorded, (nn.Module, torch.Tensor, type)) or not callable(getattr(recorded, "trace", None)):
        raise not_analysis(recorded, "FlopCountAnalysis(model, inputs), or a Trace")
    return recorded.trace()


def not_analysis(value: object, remedy: str) -> TypeError:
    """Return the error for a value, such as a model, where an analysis is needed."""
    return TypeError(f"got a value of type {type(value).__name__} instead of an analysis: pass {remedy}")


def _describe(model: Any) -> str:
    name = type(model).__name__
    if isinstance(model, (str, os.PathLike)):
        text = truncate(repr(os.fspath(model)))
        return f"{text}: {_REMEDY}; names and files are counted by the command `fvflops count MODEL`"
    if isinstance(model, Trace):
        return "a Trace: pass it to FlopCountAnalysis.from_trace"
    if isinstance(model, Mapping) and any(isinstance(value, (torch.Tensor, Mapping)) for value in model.values()):
        return f"weights, of type {name}: create the model, and pass them to its load_state_dict"
    if isinstance(model, (tuple, list)):
        kinds = ", ".join(type(item).__name__ for item in model[:3])
        return f"a {name} of {kinds or 'nothing'}: pass one model, and its inputs as the second argument"
    return _describe_wrapper(model, _ATTRIBUTES) or f"of type {name}: {_REMEDY}"


def _describe_wrapper(model: Any, attributes: tuple[str, ...]) -> str:
    """Return which attribute of a wrapper is the module, "" if none is."""
    attribute = next((name for name in attributes if isinstance(getattr(model, name, None), nn.Module)), "")
    name = type(model).__name__
    return f"of type {name}, around a module: count {name.lower()}.{attribute}" if attribute else ""
