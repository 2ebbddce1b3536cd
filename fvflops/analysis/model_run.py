"""Model, inputs and settings of an analysis, recorded on first access to a result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import torch
from torch import nn

from fvflops.analysis.files.program_archive import is_program, program_module
from fvflops.capture.errors.model_check import check_model
from fvflops.capture.model.input_specs import is_shape, make_arguments, read_sizes
from fvflops.capture.model.read_module_tree import unwrap_compiled
from fvflops.capture.model_call import CallOptions, RunOptions
from fvflops.capture.run import EXECUTIONS, CostEstimate, Model, record_call
from fvflops.text import shown
from fvflops.trace import StopsAt, Trace, TraceError

# A shape, a text such as "ids=1,16:int64", a sequence of these, or a mapping of names to shapes or texts.
InputSize = Any


def inputs_of_size(
    model: Any, inputs: Any, kwargs: Mapping[str, Any] | None, input_size: InputSize
) -> tuple[Any, Mapping[str, Any] | None]:
    """Return the inputs, or tensors of `input_size` on the model's device and, unless it names one, in its dtype."""
    if input_size is None:
        return inputs, kwargs
    if inputs is not None:
        raise ValueError("inputs and input_size are both passed: omit one")
    tensors = list(model.parameters()) if isinstance(model, nn.Module) else []
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    dtype = str(floats[0].dtype).removeprefix("torch.") if floats and floats[0].element_size() > 1 else "float32"
    specs = read_sizes(input_size, dtype=dtype)
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        args, made = make_arguments(specs, device)
    return args, {**(kwargs or {}), **made}


def check_inputs(model: Callable[..., Any], inputs: Any) -> None:
    """Raise TypeError for sizes in place of tensors, unless the model has as many arguments as there are sizes."""
    if is_shape(inputs) and not _accepts(model, tuple(inputs), {}):
        sizes = tuple(inputs)
        raise TypeError(
            f"inputs={sizes} are sizes, but inputs are tensors: pass torch.randn{sizes}, or input_size={sizes}"
        )


def bind_inputs(
    model: Callable[..., Any], inputs: Any, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments for `inputs` and `kwargs`.

    A tuple or a list is positional arguments, a mapping keyword arguments, None no argument, anything else the only
    argument. A mapping that does not match the model's keywords but matches as one argument is one argument. A
    name given twice raises TypeError.
    """
    if not isinstance(kwargs, (Mapping, NoneType)):
        raise TypeError(f"kwargs= has type {type(kwargs).__name__}: pass a dict of the model's keyword arguments")
    extra = dict(kwargs or {})
    if inputs is None:
        return (), extra
    if isinstance(inputs, Mapping):
        if duplicates := sorted(inputs.keys() & extra.keys()):
            raise TypeError(f"{', '.join(map(repr, duplicates))} is in both inputs and kwargs: pass it once")
        if not _accepts(model, (), {**inputs, **extra}) and _accepts(model, (inputs,), extra):
            return (inputs,), extra
        return (), {**inputs, **extra}
    # A named tuple is a single structured argument, not a list of arguments.
    if isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields"):
        check_inputs(model, inputs)
        return tuple(inputs), extra
    return (inputs,), extra


def check_repeatable(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError where an input is an iterator, which the first of several runs would exhaust."""
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


@dataclass(slots=True, eq=False)
class ModelRun:
    """A model with its inputs and the settings of `record_call`; `model` is None for an analysis of a Trace.

    A program of torch.export becomes its module; without `inputs` and `kwargs` it runs on its example inputs. Tensors
    of `input_size` become `inputs`. A `model` of another type, and sizes as inputs, raise TypeError.
    """

    model: Model | None
    inputs: Any
    kwargs: Mapping[str, Any] | None
    input_size: InputSize | None
    options: RunOptions

    def __post_init__(self) -> None:
        if (execution := self.options["execution"]) not in EXECUTIONS:
            raise ValueError(f"execution must be one of {', '.join(EXECUTIONS)}; got {shown(execution)}")
        self.inputs, self.kwargs = inputs_of_size(self.model, self.inputs, self.kwargs, self.input_size)
        self.input_size = None
        if is_program(self.model):
            program: Any = self.model
            if self.inputs is None and self.kwargs is None:
                if program.example_inputs is None:
                    raise ValueError("the exported program has no example inputs: pass inputs")
                self.inputs, self.kwargs = program.example_inputs
            self.model = program_module(program)
        if isinstance(self.model, nn.Module):
            self.model = unwrap_compiled(self.model)
        if self.model is not None or self.inputs is not None:
            check_model(self.model)
            check_inputs(self.require_model(), self.inputs)

    def with_model(self, model: Model | None, inputs: Any) -> ModelRun:
        """Return a copy with another model or other inputs, where these are not None."""
        given: dict[str, Any] = {"model": model, "inputs": inputs}
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def require_model(self) -> Model:
        if self.model is None:
            raise TraceError("an analysis of a trace has no model to run: pass new_model and new_inputs to copy()")
        return self.model

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return bind_inputs(self.require_model(), self.inputs, self.kwargs)

    def record(self, *, stops_at: StopsAt, estimate_cost: CostEstimate, quiet: bool) -> Trace:
        """Run the model once and return its Trace."""
        settings: CallOptions = {**self.options, "quiet": quiet}
        model, (args, kwargs) = self.require_model(), self.arguments()
        return record_call(model, args, kwargs, stops_at=stops_at, estimate_cost=estimate_cost, **settings)
