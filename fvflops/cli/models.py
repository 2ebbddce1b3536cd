"""Load the model that MODEL names, such as `zoo:resnet50`, `timm:NAME` or `file.py:factory`."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from fvflops import paths
from fvflops.capture.model.meta_copy import cast_floats
from fvflops.capture.model.model import describe_inputs
from fvflops.cli.inputs import InputSpec, make_arguments, parse_input
from fvflops.cli.model_errors import describe_module
from fvflops.features.utilisation.device_benchmark import PRODUCTS
from fvflops.features.utilisation.devices import short_dtype
from fvflops.text import nearest

T = TypeVar("T")
_MAX_CONFIG = 1 << 20


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model to count with its inputs; `assumed` is whether these are defaults."""

    model: nn.Module
    inputs: Any
    kwargs: Mapping[str, Any]
    assumed: bool


@dataclass(frozen=True, slots=True)
class _Built:
    """A model from a library or a factory, with the library's input shapes or the factory's inputs."""

    model: nn.Module
    specs: tuple[InputSpec, ...] = ()
    inputs: Any = None


def load_model(
    name: str, inputs: Sequence[str] = (), *, config: str | None = None, device: str | None = None
) -> LoadedModel:
    """Return the model that a MODEL argument names, on its inputs.

    `inputs` are values of `--input`; the default is the shapes given by the model's library. `config` is JSON, or the
    path of a JSON file, for transformers. A missing or misspelt name or value raises ValueError.
    """
    source, separator, rest = name.rpartition(":")
    if name == "zoo:":
        from fvflops.zoo import ZOO

        raise ValueError(f"zoo: names no model: write zoo:NAME with one of {', '.join(ZOO)}")
    if not separator or not rest or not source:
        raise ValueError(
            f"{name!r} names no model: write zoo:resnet50, timm:NAME, torchvision:NAME, "
            "transformers:CLASS, package.module:factory or file.py:factory"
        )
    if config is not None and source != "transformers":
        raise ValueError(f"--config applies to transformers:CLASS only; got {name!r}: omit --config")
    specs = tuple(parse_input(text) for text in inputs)
    if device is not None:
        _check_device(device)
    with torch.device(device) if device is not None else nullcontext():
        built = _SOURCES[source](rest, config) if source in _SOURCES else _from_factory(source, rest)
    device_of_model = _device_of(built.model)
    if not specs and built.inputs is not None:
        return LoadedModel(built.model, built.inputs, {}, assumed=False)
    if not specs and not built.specs:
        raise ValueError(f"{name} has no default input shapes: pass --input SHAPE, such as --input 1,3,224,224")
    args, kwargs = make_arguments(specs or built.specs, device_of_model)
    return LoadedModel(built.model, args, kwargs, assumed=not specs)


def parse_dtype(text: str) -> str:
    """Return the short name of a dtype of `--dtype`, a key of PRODUCTS; another one raises ValueError.

    >>> parse_dtype("bfloat16")
    'bf16'
    """
    dtype = short_dtype(text)
    if dtype not in PRODUCTS:
        raise ValueError(f"--dtype must be one of {', '.join(PRODUCTS)}; got {text!r}")
    return dtype


def cast_model(subject: LoadedModel, dtype: torch.dtype) -> LoadedModel:
    """Return a model with its floating-point weights and inputs cast to a dtype."""
    inputs, kwargs = cast_floats((subject.inputs, dict(subject.kwargs)), dtype)
    return replace(subject, model=subject.model.to(dtype), inputs=inputs, kwargs=kwargs)


def _from_zoo(name: str, _: str | None) -> _Built:
    from fvflops.zoo import ZOO, build

    model = build(name)
    return _Built(model, tuple(InputSpec(None, shape, dtype) for _, shape, dtype in ZOO[name].inputs))


def _from_timm(name: str, _: str | None) -> _Built:
    timm = _import("timm")
    if not timm.is_model(name):
        raise ValueError(_describe_missing("timm", name, timm.list_models()))
    model = timm.create_model(name, pretrained=False)
    return _Built(model, (InputSpec(None, (1, *model.pretrained_cfg["input_size"])),))


def _from_torchvision(name: str, _: str | None) -> _Built:
    models = _import("torchvision").models
    if name not in models.list_models():
        raise ValueError(_describe_missing("torchvision", name, models.list_models()))
    # With the default weights_backbone a detection model would download its backbone's weights.
    needs_backbone = "detection" in models.get_model_builder(name).__module__ or "segmentation" in (
        models.get_model_builder(name).__module__
    )
    options = {"weights_backbone": None} if needs_backbone else {}
    model = models.get_model(name, weights=None, **options)
    return _Built(model, _torchvision_inputs(models.get_model_weights(name)))


def _torchvision_inputs(weights: Any) -> tuple[InputSpec, ...]:
    """Return the input shapes of a model's pretrained weights, () where torchvision has none."""
    if not len(weights):
        return ()
    preset = weights.DEFAULT.transforms()
    size = getattr(preset, "crop_size", None) or getattr(preset, "resize_size", None)
    if size is None:
        return ()
    sides = tuple(size) * 2 if len(size) == 1 else tuple(size)
    frames = weights.DEFAULT.meta.get("min_temporal_size")
    return (InputSpec(None, (1, 3, *((frames,) if frames else ()), *sides[-2:])),)


def _from_transformers(name: str, config: str | None) -> _Built:
    transformers = _import("transformers")
    if not hasattr(transformers, name):
        names = [item for item in dir(transformers) if item.endswith(("Model", "ForCausalLM", "LMHeadModel"))]
        raise ValueError(_describe_missing("transformers", name, names))
    model_class: Any = getattr(transformers, name)
    config_class: Any = getattr(model_class, "config_class", None)
    if config_class is None:
        raise ValueError(f"transformers' {name} has no configuration: name a model class such as BertModel")
    settings = config_class(**_read_config(config))
    return _Built(model_class(settings), _transformers_inputs(model_class, settings))


def _transformers_inputs(model_class: Any, config: Any) -> tuple[InputSpec, ...]:
    """Return input shapes of a common size for the model's main input: text, images or audio; () for others."""
    main = model_class.main_input_name
    if main == "pixel_values":
        size = getattr(config, "image_size", 224)
        sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
        return (InputSpec(main, (1, getattr(config, "num_channels", 3), *sides)),)
    if main == "input_values":
        return (InputSpec(main, (1, 16_000)),)
    text = (1, min(128, getattr(config, "max_position_embeddings", None) or 128))
    if main == "input_features":
        features = InputSpec(main, (1, getattr(config, "num_mel_bins", 80), 3000))
        return (features, InputSpec("decoder_input_ids", (1, 1), "int64"))
    if main == "input_ids":
        decoder = (InputSpec("decoder_input_ids", text, "int64"),) if config.is_encoder_decoder else ()
        return (InputSpec(main, text, "int64"), *decoder)
    return ()


def _read_config(config: str | None) -> dict[str, Any]:
    if config is None:
        return {}
    try:
        text = config if config.lstrip()[:1] in ("{", "[") else paths.read_text(config, _MAX_CONFIG)
    except OSError as error:
        raise ValueError(f"--config {config}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"--config {config}: this is not UTF-8 text ({error})") from error
    if text is None:
        raise ValueError(f"--config {config}: a configuration has at most {_MAX_CONFIG:,} characters")
    try:
        settings = json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--config {config}: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f'--config {config}: a configuration is a JSON object, such as {{"num_hidden_layers": 2}}')
    return settings


def load_function(text: str, option: str) -> Callable[..., Any]:
    """Return the function that `package.module:NAME` or `file.py:NAME` names; errors name `option`."""
    source, _, name = text.rpartition(":")
    if not source or not name:
        raise ValueError(f"{option} {text}: write package.module:function or file.py:function")
    function: Callable[..., Any] = _import_attribute(source, name)
    if not callable(function):
        raise ValueError(f"{option} {text} must be a function; got {type(function).__name__}")
    return function


def _import_attribute(source: str, name: str) -> Any:
    module = _import_file(source) if source.endswith(".py") else _import(source)
    value = getattr(module, name, None)
    if value is None:
        raise ValueError(_describe_missing(source, name, [item for item in dir(module) if not item.startswith("_")]))
    return value


def _from_factory(source: str, name: str) -> _Built:
    factory = _import_attribute(source, name)
    result = factory if isinstance(factory, nn.Module) else factory()
    model, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{source}:{name} returned {type(model).__name__}: return a torch.nn.Module, or (module, inputs)"
        )
    return _Built(model, inputs=inputs)


def _import_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path!r}")
    state = os.stat(path)
    return _run_file(os.path.abspath(path), state.st_mtime_ns, state.st_size)


@cache
def _run_file(path: str, _changed: int, _size: int) -> ModuleType:
    """Import a file as a module, once: one that registers ops cannot be run again."""
    spec = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(path))[0], path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path!r} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    # As for `python file.py`, modules in the file's folder can be imported.
    sys.path.insert(0, os.path.dirname(path))
    spec.loader.exec_module(module)
    return module


def _import(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] and error.name != name:
            raise
        raise ValueError(f"there is no package {error.name!r} here: install it, or check the name") from error


def _describe_missing(source: str, name: str, names: Sequence[str]) -> str:
    near = nearest(name, names)
    return f"{source} has no {name!r}" + (f": the nearest is {near!r}" if near else "")


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


_SOURCES: dict[str, Callable[[str, str | None], _Built]] = {
    "zoo": _from_zoo,
    "timm": _from_timm,
    "torchvision": _from_torchvision,
    "transformers": _from_transformers,
}


def with_input_hint(subject: LoadedModel, analyse: Callable[[], T]) -> T:
    """Return the result of `analyse`; if the inputs are defaults, an error of the model's forward includes them."""
    try:
        return analyse()
    except Exception as error:
        if subject.assumed and error.args and describe_module(error):
            shapes = ", ".join(describe_inputs(subject.inputs, subject.kwargs))
            error.args = (
                f"{error.args[0]} (default inputs: {shapes}; pass others by --input)",
                *error.args[1:],
            )
        raise
