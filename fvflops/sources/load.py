"""Load the model that MODEL names, such as `zoo:resnet50`, `timm:NAME` or `file.py:factory`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from fvflops.sources.factory import build_from_factory
from fvflops.sources.files import is_file, load_file
from fvflops.sources.input_specs import InputSpec, make_arguments, parse_input
from fvflops.sources.loaded_model import BuiltModel, LoadedModel
from fvflops.sources.options import DEFAULT_OPTIONS, SourceOptions

# Source → the module that is one; it is imported when a model of the source is named.
SOURCES = {
    "zoo": "fvflops.sources.zoo",
    "timm": "fvflops.sources.timm",
    "torchvision": "fvflops.sources.torchvision",
    "transformers": "fvflops.sources.transformers",
}


class Source(Protocol):
    """What the module of a source contains."""

    def list_names(self) -> Sequence[str]:
        """Return the names of its models, without building one."""

    def build(self, name: str, options: SourceOptions) -> BuiltModel:
        """Return a model without pretrained weights; an unknown name raises ValueError."""


def load_source(name: str) -> Source:
    """Return the module of a source, a key of SOURCES."""
    source: Source = importlib.import_module(SOURCES[name])
    return source


def load_model(name: str, options: SourceOptions = DEFAULT_OPTIONS) -> LoadedModel:
    """Return the model that a MODEL argument names, on its inputs.

    A missing or misspelt name or value raises ValueError.
    """
    specs = tuple(parse_input(text) for text in options.inputs)
    if is_file(name):
        if options.device is not None:
            _check_device(options.device)
        return _with_inputs(name, load_file(name, options), specs)
    source, separator, rest = name.rpartition(":")
    if name == "zoo:":
        names = ", ".join(load_source("zoo").list_names())
        raise ValueError(f"zoo: names no model: write zoo:NAME with one of {names}")
    if not separator or not rest or not source:
        raise ValueError(
            f"{name!r} names no model: write zoo:resnet50, timm:NAME, torchvision:NAME, "
            "transformers:CLASS, package.module:factory, file.py:factory or a file (.pt2, TorchScript, ONNX)"
        )
    if options.config is not None and source != "transformers":
        raise ValueError(f"--config applies to transformers:CLASS only; got {name!r}: omit --config")
    if options.device is not None:
        _check_device(options.device)
    with torch.device(options.device) if options.device is not None else nullcontext():
        if source in SOURCES:
            built = load_source(source).build(rest, options)
        else:
            built = build_from_factory(source, rest, options)
    return _with_inputs(name, built, specs)


def _with_inputs(name: str, built: BuiltModel, specs: tuple[InputSpec, ...]) -> LoadedModel:
    """Return a model on the inputs that the options name, else on its own, else on those of its source."""
    state: dict[str, Any] = {"is_program": built.is_program, "accepts": built.accepts}
    if not specs and (built.inputs is not None or built.kwargs):
        return LoadedModel(built.model, built.inputs, built.kwargs, assumed=False, **state)
    if not specs and not built.specs:
        raise ValueError(f"{name} has no default input shapes: pass --input SHAPE, such as --input 1,3,224,224")
    args, kwargs = make_arguments(specs or built.specs, _device_of(built.model))
    return LoadedModel(built.model, args, kwargs, assumed=not specs, **state)


def _check_device(name: str) -> None:
    """Raise ValueError for a device that torch does not know, or CUDA where there is none."""
    try:
        kind = torch.device(name).type
    except RuntimeError:
        raise ValueError(f"{name!r} is not a device of torch: pass cpu, cuda or meta") from None
    if kind == "cuda" and not torch.cuda.is_available():
        built = "has no CUDA" if torch.version.cuda is None else "finds no CUDA device"
        raise ValueError(
            f"device {name!r}: this torch ({torch.__version__}) {built}: omit the device, or pass cpu or meta"
        )


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
