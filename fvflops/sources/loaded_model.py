"""A model that a source has built, and the inputs on which it is counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn

from fvflops.capture.errors.model_errors import describe_module
from fvflops.capture.model.input_specs import InputSpec
from fvflops.capture.model.meta_copy import cast_floats
from fvflops.capture.model.read_module_tree import describe_inputs
from fvflops.capture.run import ExecutionError
from fvflops.devices.device_benchmark import PRODUCTS
from fvflops.devices.devices import short_dtype
from fvflops.sources.options import SourceOptions

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model to count with its inputs; `assumed` is whether these are defaults.

    `is_program`: it was exported in training or eval mode, and keeps that. `accepts` describes the inputs that it takes
    where that is known. `meta_by_default` is whether its source builds it on the meta device by default.
    """

    model: nn.Module
    inputs: Any
    kwargs: Mapping[str, Any]
    assumed: bool
    is_program: bool = False
    accepts: str = ""
    meta_by_default: bool = False

    def train(self, mode: bool, *, option: str = "") -> None:
        """Set training or eval mode; `option` asked for it, which raises ValueError for an exported program."""
        if not self.is_program:
            self.model.train(mode)
        elif mode and option:
            raise ValueError(f"an exported program keeps the mode in which it was exported: omit {option}")


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """Result of a source: a model with its library's input shapes, with own inputs, or with a function that makes them.

    `make_inputs` returns argument name → value in the sizes of the options, on the model's device and in its dtype.
    `is_program` and `accepts` are as in LoadedModel.
    """

    model: nn.Module
    specs: tuple[InputSpec, ...] = ()
    inputs: Any = None
    make_inputs: Callable[[SourceOptions], Mapping[str, Any]] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_program: bool = False
    accepts: str = ""


def parse_dtype(text: str) -> str:
    """Return the short name of a dtype of `--dtype`, a key of PRODUCTS; another one raises ValueError.

    >>> parse_dtype("bfloat16")
    'bf16'
    """
    dtype = short_dtype(text)
    if dtype not in PRODUCTS:
        raise ValueError(f"--dtype must be one of {', '.join(PRODUCTS)}; got {text!r}")
    return dtype


def cast_inputs(subject: LoadedModel, dtype: torch.dtype) -> LoadedModel:
    inputs, kwargs = cast_floats((subject.inputs, dict(subject.kwargs)), dtype)
    return replace(subject, inputs=inputs, kwargs=kwargs)


def with_input_hint(subject: LoadedModel, analyse: Callable[[], T]) -> T:
    """Return the result of `analyse`; an error of the model's forward includes inputs that are defaults.

    An error of an exported program includes the inputs that it accepts. Where the meta device is the default, an error
    that calls for real execution says how to build weights.
    """
    try:
        return analyse()
    except ExecutionError as error:
        if subject.meta_by_default:
            error.args = (f"{error.args[0]}: build them with --build-on cpu", *error.args[1:])
        raise
    except Exception as error:
        if subject.accepts and error.args and describe_module(error):
            error.args = (f"{error.args[0]} (the program accepts {subject.accepts})", *error.args[1:])
        elif subject.assumed and error.args and describe_module(error):
            shapes = ", ".join(describe_inputs(subject.inputs, subject.kwargs))
            error.args = (f"{error.args[0]} (default inputs: {shapes}; pass others by --input)", *error.args[1:])
        raise
