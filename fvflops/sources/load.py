"""Load the model that MODEL names, such as `zoo:resnet50`, `timm:NAME` or `file.py:factory`."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from inspect import getattr_static
from typing import Any

import torch
from torch import nn

from fvflops.analysis.files.archive_checks import recognise
from fvflops.analysis.trace_file import ENDINGS
from fvflops.capture.model.input_specs import InputSpec, make_arguments, parse_input
from fvflops.devices.device_benchmark import PRODUCTS
from fvflops.sources.call_arguments import call_factory, parse_arguments
from fvflops.sources.imports import import_attribute
from fvflops.sources.input_sizes import check_positions, chosen_sizes, resize_inputs
from fvflops.sources.loaded_model import BuiltModel, LoadedModel, cast_inputs, parse_dtype
from fvflops.sources.meta import building_on
from fvflops.sources.model_files import is_file, load_file
from fvflops.sources.options import DEFAULT_OPTIONS, SourceOptions, chosen_fields, option_of, read_settings
from fvflops.sources.weights.adapters import add_adapter, check_adapter
from fvflops.text import nearest, suggest

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
# Source → the module that is one; it is imported when a model of the source is named.
SOURCES = {name: f"fvflops.sources.{name}" for name in FORMS if name not in ("", FILE)}
SOURCES["hf"] = "fvflops.sources.hugging_face"
# Field of SourceOptions → the sources to which it applies; others apply to all.
_APPLIES = {
    "config": ("transformers", "hf", "diffusers"),
    "task": ("hf",),
    "trust_remote_code": ("hf",),
    "args": (*SOURCES, ""),
    "denoising_steps": ("diffusers", "hf"),
    "guidance": ("diffusers", "hf"),
}
# Sources whose models are built on the meta device by default: checkpoints may be larger than memory.
_BUILT_ON_META = ("diffusers", "hf")


_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_UNOWNED = re.compile(r"\w+-[\w.-]+", re.ASCII)  # old repositories of the hub have no owner, but hyphens
# Sources whose names are looked up, in the order in which they are suggested; classes begin with a capital letter.
_LIBRARIES = ("zoo", "timm", "torchvision")
_CLASSES = ("transformers", "diffusers")


def load_source(name: str) -> Any:
    """Return the module of a source, a key of SOURCES.

    Its `list_names()` returns the names of its models without building one; its `build(name, options)` returns a
    BuiltModel without pretrained weights, and raises ValueError for an unknown name.
    """
    return importlib.import_module(SOURCES[name])


def is_built_on_meta(name: str) -> bool:
    """Return whether the model that a MODEL argument names is on the meta device unless the options name another."""
    return name.partition(":")[0] in _BUILT_ON_META


def load_model(name: str, options: SourceOptions = DEFAULT_OPTIONS) -> LoadedModel:
    """Return the model that MODEL names, on its inputs; a missing or misspelt name or value raises ValueError."""
    add_paths(options.paths)
    source, rest = split_name(name)
    check_applies(options, source, name)
    check_options(options)
    device = options.device or ("meta" if is_built_on_meta(name) else None)
    with nullcontext() if source == FILE else building_on(device):
        if source in SOURCES:
            built = load_source(source).build(rest, options)
        else:
            built = load_file(name, options) if source == FILE else _build_from_factory(rest, options)
    subject = _finish(name, built, options)
    return replace(subject, meta_by_default=options.device is None and is_built_on_meta(name))


def load_from_factory(factory: Any, name: str, options: SourceOptions = DEFAULT_OPTIONS) -> LoadedModel:
    """Return the model that a function returns, on its inputs; with the options of a factory that has a name."""
    check_applies(options, "", name)
    with building_on(options.device):
        built = call_factory(factory, name, options)
    if built.inputs is None and not options.inputs:
        raise ValueError("the model has no inputs: return (module, inputs), or pass options=SourceOptions(inputs=...)")
    return _finish(name, built, options)


def _finish(name: str, built: BuiltModel, options: SourceOptions) -> LoadedModel:
    specs = tuple(parse_input(text) for text in options.inputs)
    dtype = None if options.dtype is None else PRODUCTS[parse_dtype(options.dtype)]
    _require_forward(built.model)
    model = built.model if options.adapter is None else add_adapter(built.model, options.adapter)
    if dtype is not None:
        model.to(dtype)
    subject = _with_inputs(name, replace(built, model=model), specs, options)
    return subject if dtype is None else cast_inputs(subject, dtype)


def _require_forward(model: nn.Module) -> None:
    """Raise ValueError for a container of models without a forward of its own, such as BarkModel of transformers."""
    if getattr_static(type(model), "forward") is nn.Module.forward and "forward" not in vars(model):
        parts = list(dict.fromkeys(type(child).__name__ for child in model.children()))
        remedy = f": count one of its parts ({', '.join(parts[:5])})" if parts else ""
        raise ValueError(f"{type(model).__name__} has no forward{remedy}")


def _build_from_factory(name: str, options: SourceOptions) -> BuiltModel:
    source, _, factory = name.rpartition(":")
    try:
        return call_factory(import_attribute(source, factory), name, options)
    except ValueError as error:
        near = suggest(f"{source.lower()}:", [f"{key}:" for key in SOURCES], separator="; ")
        if near and isinstance(error.__cause__, ModuleNotFoundError):
            raise ValueError(f"{error}{near}") from error
        raise


def _with_inputs(name: str, built: BuiltModel, specs: tuple[InputSpec, ...], options: SourceOptions) -> LoadedModel:
    """Return a model with explicit inputs, else the model's, else the source's."""
    state: dict[str, Any] = {"is_program": built.is_program, "accepts": built.accepts}
    if specs:
        return LoadedModel(built.model, *make_arguments(specs, _device_of(built.model)), assumed=False, **state)
    if built.make_inputs is not None:
        return LoadedModel(built.model, (), built.make_inputs(options), assumed=True, **state)
    inputs: Any = built.inputs
    kwargs: Mapping[str, Any] = built.kwargs
    is_default = inputs is None and not kwargs
    if is_default and not built.specs:
        token_ids = any(isinstance(module, nn.Embedding) for module in built.model.modules())
        shape = "4,1024:int64 for token ids" if token_ids else "1,3,224,224"
        remedy = "" if find_source(name) else ", or return (module, inputs)"
        raise ValueError(f"{name} has no default input shapes: pass --input SHAPE, such as --input {shape}{remedy}")
    if is_default:
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
    source, rest = find_source(name), name.partition(":")[2]
    if name == "zoo:":
        names = ", ".join(load_source("zoo").list_names())
        raise ValueError(f"zoo: names no model: write zoo:NAME with one of {names}")
    if source in SOURCES and not rest:
        listed = "" if source == "torchhub" else f"; 'fvflops list {source}' lists the names"
        raise ValueError(f"{name!r} names no model: write {FORMS[source]}{listed}")
    if name.endswith(".py") and source not in SOURCES:
        raise ValueError(f"{name!r} names no factory: write {name}:FACTORY")
    if source == FILE:
        return FILE, name
    if not all(name.rpartition(":")):
        forms = ", ".join(FORMS.values()).replace("zoo:NAME", "zoo:resnet50")
        suggested = suggest_models(name, lambda source: load_source(source).list_names())
        raise ValueError(f"{name!r} names no model{suggested or f': write {forms}'}")
    return (source, rest) if source in SOURCES else ("", name)


def find_source(name: str) -> str:
    """Return the source of a MODEL argument: a key of SOURCES, FILE, or "" for a factory."""
    source = name.partition(":")[0]
    return source if source in SOURCES else FILE if is_file(name) else ""


def is_saved_trace(name: str) -> bool:
    """Return whether a MODEL argument is a file that contains a saved Trace, or names a missing one."""
    if os.path.isfile(name):
        return recognise(name) == "trace"
    return name.endswith(ENDINGS) and find_source(name) == FILE


def contains_inputs(name: str) -> bool:
    """Return whether a MODEL argument is a file that contains its inputs: a saved Trace or a torch.export program.

    >>> contains_inputs("zoo:lenet5"), contains_inputs("before.json")
    (False, True)
    """
    return is_saved_trace(name) or (os.path.isfile(name) and recognise(name) == "program")


def check_trace_options(name: str, options: SourceOptions, run: Mapping[str, object] | None = None) -> None:
    """Raise ValueError for options of a model, and for option → value of a run: a saved Trace has both behind it."""
    chosen = [option_of(field) for field in chosen_fields(options) if field != "paths"]
    chosen += [option for option, value in (run or {}).items() if value]
    if chosen:
        raise ValueError(f"{name} is a saved Trace and contains its inputs: omit {chosen[0]}")


def check_models(names: Sequence[str], options: SourceOptions) -> None:
    """Raise ValueError for options that are wrong or do not apply to one of the models; a name may be wrong."""
    for name in names:
        if is_saved_trace(name):
            check_trace_options(name, options)
        else:
            check_applies(options, find_source(name), name)
    check_options(options)
    add_paths(options.paths)


def check_options(options: SourceOptions) -> None:
    """Raise ValueError for options that are wrong whatever the model is."""
    parse_arguments(options.args)
    for text in options.inputs:
        parse_input(text)
    if options.inputs and (sizes := chosen_sizes(options)):
        raise ValueError(f"{option_of(sizes[0])} sets the size of default inputs: omit it, or --input")
    if options.dtype is not None:
        parse_dtype(options.dtype)
    if options.device is not None:
        _check_device(options.device)
    if options.config is not None:
        read_settings(options.config, "--config")
    if options.task is not None:
        importlib.import_module("fvflops.sources.hugging_face").check_task(options.task)
    if options.adapter is not None:
        check_adapter(options.adapter)


def check_applies(options: SourceOptions, source: str, name: str) -> None:
    """Raise ValueError for an option that does not apply to the source of a MODEL argument."""
    for field in chosen_fields(options):
        sources = _APPLIES.get(field)
        if sources is not None and source not in sources:
            forms = ", ".join(FORMS[item] for item in sources)
            raise ValueError(f"{option_of(field)} applies to {forms}; got {name!r}: omit {option_of(field)}")


def keep_applicable(options: SourceOptions, name: str) -> SourceOptions:
    """Return the options that apply to a MODEL argument."""
    fields = [field for field, sources in _APPLIES.items() if find_source(name) not in sources]
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
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--build-on {name}: {name!r} is not a device of torch: pass cpu, cuda or meta") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        built = f"({torch.__version__}) {'has no CUDA' if torch.version.cuda is None else 'finds no CUDA device'}"
        raise ValueError(f"device {name!r}: this torch {built}: omit the device, or pass cpu or meta")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # a kind of device that this torch has no kernels for, or an index
        raise ValueError(f"device {name!r}: torch cannot create tensors there: pass cpu, cuda or meta") from None


def _device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def suggest_models(name: str, list_names: Callable[[str], Sequence[str]]) -> str:
    """Return ": did you mean SOURCE:NAME?", as the end of a message; "" where no source has such a name.

    `list_names` returns the names of a source.

    >>> suggest_models("meta-llama/Llama-3.1-8B", {}.__getitem__)
    ': did you mean hf:meta-llama/Llama-3.1-8B?'
    >>> suggest_models("resnet50", lambda source: ["resnet50"] if source != "torchvision" else [])
    ': did you mean zoo:resnet50 or timm:resnet50?'
    """
    *others, last = list(_list_models(name, list_names)) or [""]
    return f": did you mean {', '.join(others)}{' or ' * bool(others)}{last}?" if last else ""


def _list_models(name: str, list_names: Callable[[str], Sequence[str]]) -> Iterator[str]:
    library, _, rest = name.partition("/")
    module, _, factory = name.rpartition(".")
    if _is_module(name):
        yield f"{name}:CLASS"
    elif _is_module(module) and factory.isidentifier():
        yield f"{module}:{factory}"
    elif os.path.isfile(os.path.join(name, "config.json")):
        yield f"hf:{name}"
    elif library.lower() in _LIBRARIES and rest:
        architecture = rest.partition(".")[0]  # timm's repositories on the hub end in the name of their weights
        yield from (f"{library.lower()}:{found}" for found in (rest, architecture)[: 1 + (rest != architecture)])
    elif _REPOSITORY.fullmatch(name):
        yield f"hf:{name}"
    else:
        classes = _list_exact(name, _CLASSES, list_names) if name[:1].isupper() else []
        yield from classes or _list_named(name, list_names)


def _is_module(name: str) -> bool:
    """Return whether a name is a Python file or package, without importing it."""
    path = name.replace(".", os.sep)
    files = (f"{path}.py", os.path.join(path, "__init__.py"))
    return bool(path) and any(os.path.isfile(os.path.join(entry, file)) for entry in ("", *sys.path) for file in files)


def _list_exact(name: str, sources: Sequence[str], list_names: Callable[[str], Sequence[str]]) -> list[str]:
    return [f"{source}:{name}" for source in sources if name in _names_of(source, list_names)]


def _list_named(name: str, list_names: Callable[[str], Sequence[str]]) -> list[str]:
    if exact := _list_exact(name.lower(), _LIBRARIES, list_names):
        return exact
    near = ((source, nearest(name.lower(), _names_of(source, list_names), cutoff=0.85)) for source in _LIBRARIES)
    return [f"{source}:{match}" for source, match in near if match] or [f"hf:{name}"] * bool(_UNOWNED.fullmatch(name))


def _names_of(source: str, list_names: Callable[[str], Sequence[str]]) -> Sequence[str]:
    try:
        return list_names(source)
    except (ValueError, ImportError, RuntimeError):  # not installed, or not for this torch: nothing of it can be named
        return ()
