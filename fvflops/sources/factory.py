"""Models that a factory returns: a function, or the one that `package.module:factory` or `file.py:factory` names."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from fvflops.sources.call_arguments import call_with, parse_arguments
from fvflops.sources.imports import import_attribute
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions


def build_from_factory(source: str, name: str, options: SourceOptions) -> BuiltModel:
    """Return the model of a factory in a module or file; see `call_factory`."""
    return call_factory(import_attribute(source, name), f"{source}:{name}", options)


def call_factory(factory: Any, name: str, options: SourceOptions) -> BuiltModel:
    """Return the model of a factory, called with `options.args`; errors call it `name`.

    A factory returns a module or (module, inputs), and may be a class; a module itself is accepted too.
    """
    arguments = parse_arguments(options.args)
    if isinstance(factory, nn.Module):
        if arguments:
            raise ValueError(f"--arg {next(iter(arguments))}: {name} is a module, not a factory: omit --arg")
        result = factory
    elif callable(factory):
        try:
            result = call_with(factory, arguments, name)
        except OSError as error:
            if not isinstance(error.filename, str):
                raise
            relative = "" if os.path.isabs(error.filename) else f"; a relative path begins at {os.getcwd()}"
            raise ValueError(f"{name} cannot open {error.filename!r}: {error.strerror}{relative}") from error
    else:
        raise ValueError(
            f"{name} is {type(factory).__name__}: name a function that returns a torch.nn.Module, or a class"
        )
    model, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} returned {type(model).__name__}: return a torch.nn.Module, or (module, inputs)")
    return BuiltModel(model, inputs=inputs)
