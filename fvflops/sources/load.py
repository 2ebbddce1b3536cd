"""Load the model that MODEL names, such as `zoo:resnet50`, `timm:NAME` or `file.py:factory`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from fvflops.features.utilisation.device_benchmark import PRODUCTS
from fvflops.sources.adapters import add_adapter
from fvflops.sources.factory import build_from_factory
from fvflops.sources.files import is_file, load_file
from fvflops.sources.input_sizes import SIZE_OPTIONS, check_positions, chosen_sizes, resize_inputs
from fvflops.sources.input_specs import InputSpec, make_arguments, parse_input
from fvflops.sources.loaded_model import BuiltModel, LoadedModel, cast_inputs, parse_dtype
from fvflops.sources.meta import building_on
from fvflops.sources.options import DEFAULT_OPTIONS, SourceOptions

# Source → the module that is one; it is imported when a model of the source is named.
SOURCES = {
    "zoo": "fvflops.sources.libraries.zoo",
    "timm": "fvflops.sources.libraries.timm",
    "torchvision": "fvflops.sources.libraries.torchvision",
    "transformers": "fvflops.sources.transformers",
    "hf": "fvflops.sources.hugging_face",
    "diffusers": "fvflops.sources.diffusers",
    "open_clip": "fvflops.sources.libraries.open_clip",
    "torchhub": "fvflops.sources.libraries.torchhub",
}
# Source → how a model of it is written; "" is a factory.
FORMS = {
    "zoo": "zoo:NAME",
    "timm": "timm:NAME",
    "torchvision": "torchvision:NAME",
    "transformers": "transformers:CLASS",
    "hf": "hf:FOLDER or hf:ORG/NAME",
    "diffusers": "diffusers:CLASS or FOLDER",
    "open_clip": "open_clip:NAME",
    "torchhub": "torchhub:FOLDER:ENTRYPOINT",
    "": "package.module:FACTORY or file.py:FACTORY",
    "file": "a file (a torch.export program, TorchScript, ONNX, a pickled module)",
}
# The source of a model in a file, which has no prefix.
FILE = "file"
# Option of the command line → its field of SourceOptions, and the sources to which it applies.
_APPLIES = {
    "--config": ("config", ("transformers", "hf", "diffusers")),
    "--task": ("task", ("hf",)),
    "--trust-remote-code": ("trust_remote_code", ("hf",)),
    "--arg": ("args", ("timm", "torchvision", "diffusers", "hf", "open_clip", "torchhub", "")),
    "--denoising-steps": ("denoising_steps", ("diffusers", "hf")),
    "--guidance": ("guidance", ("diffusers", "hf")),
}
# Sources whose models are built on the meta device by default: checkpoints may be larger than memory.
_BUILT_ON_META = ("diffusers", "hf")


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


def is_built_on_meta(name: str) -> bool:
    """Return whether the model that a MODEL argument names is on the meta device unless the options name another."""
    return name.partition(":")[0] in _BUILT_ON_META


def load_model(name: str, options: SourceOptions = DEFAULT_OPTIONS) -> LoadedModel:
    """Return the model that a MODEL argument names, on its inputs.

    A missing or misspelt name or value raises ValueError.
    """
    source, rest = split_name(name)
    check_applies(options, source, name)
    add_paths(options.paths)
    specs = tuple(parse_input(text) for text in options.inputs)
    sizes = chosen_sizes(options)
    if specs and sizes:
        option = SIZE_OPTIONS[sizes[0]]
        raise ValueError(f"{option} sets the size of default inputs: omit it, or --input")
    dtype = None if options.dtype is None else PRODUCTS[parse_dtype(options.dtype)]
    device = options.device or ("meta" if is_built_on_meta(name) else None)
    if device is not None:
        _check_device(device)
    with nullcontext() if source == FILE else building_on(device):
        if source == FILE:
            built = load_file(name, options)
        elif source in SOURCES:
            built = load_source(source).build(rest, options)
        else:
            file, _, factory = rest.rpartition(":")
            built = build_from_factory(file, factory, options)
    model = built.model if options.adapter is None else add_adapter(built.model, options.adapter)
    if dtype is not None:
        model.to(dtype)
    subject = _with_inputs(name, replace(built, model=model), specs, options)
    subject = replace(subject, meta_by_default=options.device is None and is_built_on_meta(name))
    return subject if dtype is None else cast_inputs(subject, dtype)


def _with_inputs(name: str, built: BuiltModel, specs: tuple[InputSpec, ...], options: SourceOptions) -> LoadedModel:
    """Return a model on the inputs that the options name, else on its own, else on those of its source."""
    state: dict[str, Any] = {"is_program": built.is_program, "accepts": built.accepts}
    if specs:
        return LoadedModel(built.model, *make_arguments(specs, _device_of(built.model)), assumed=False, **state)
    if built.make_inputs is not None:
        return LoadedModel(built.model, (), built.make_inputs(options), assumed=True, **state)
    inputs: Any = built.inputs
    kwargs: Mapping[str, Any] = built.kwargs
    is_default = inputs is None and not kwargs
    if is_default:
        if not built.specs:
            raise ValueError(f"{name} has no default input shapes: pass --input SHAPE, such as --input 1,3,224,224")
        inputs, kwargs = make_arguments(built.specs, _device_of(built.model))
    if chosen_sizes(options):
        check_positions(built.model, options)
        inputs, kwargs = resize_inputs(inputs, kwargs, options, name)
    return LoadedModel(built.model, inputs, kwargs, assumed=is_default, **state)


def split_name(name: str) -> tuple[str, str]:
    """Return the source of a MODEL argument, a key of SOURCES, FILE or "" for a factory, and the rest of the name.

    >>> split_name("zoo:resnet50"), split_name("net.py:build"), split_name("net.pt2")
    (('zoo', 'resnet50'), ('', 'net.py:build'), ('file', 'net.pt2'))
    """
    source, _, rest = name.partition(":")
    if name == "zoo:":
        names = ", ".join(load_source("zoo").list_names())
        raise ValueError(f"zoo: names no model: write zoo:NAME with one of {names}")
    if source in SOURCES and not rest:
        raise ValueError(f"{name!r} names no model: write {FORMS[source]}; 'fvflops list {source}' lists the names")
    if source not in SOURCES and is_file(name):
        return FILE, name
    if not all(name.rpartition(":")):
        forms = ", ".join(FORMS.values()).replace("zoo:NAME", "zoo:resnet50")
        raise ValueError(f"{name!r} names no model: write {forms}")
    return (source, rest) if source in SOURCES else ("", name)


def check_applies(options: SourceOptions, source: str, name: str) -> None:
    """Raise ValueError for an option that does not apply to the source of a MODEL argument."""
    for option, (field, sources) in _APPLIES.items():
        if getattr(options, field) != getattr(DEFAULT_OPTIONS, field) and source not in sources:
            forms = ", ".join(FORMS[item] for item in sources)
            raise ValueError(f"{option} applies to {forms}; got {name!r}: omit {option}")


def keep_applicable(options: SourceOptions, name: str) -> SourceOptions:
    """Return the options without those that do not apply to a MODEL argument."""
    source = name.partition(":")[0]
    if source not in SOURCES:
        source = FILE if is_file(name) else ""
    fields = [field for field, sources in _APPLIES.values() if source not in sources]
    return replace(options, **{field: getattr(DEFAULT_OPTIONS, field) for field in fields})


def add_paths(folders: Sequence[str]) -> None:
    """Put folders at the front of `sys.path`; one that does not exist raises ValueError."""
    for folder in reversed(folders):
        if not os.path.isdir(folder):
            raise ValueError(f"--path {folder}: there is no such folder")
        path = os.path.abspath(folder)
        if path not in sys.path:
            sys.path.insert(0, path)


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
