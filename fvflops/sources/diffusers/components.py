"""Build models of diffusers and transformers from configurations, without weights."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from fvflops.sources.imports import describe_missing, describe_unknown_model, import_library
from fvflops.sources.transformers.configurations import check_harmless


def find_class(name: str) -> type[nn.Module]:
    """Return a model class of diffusers; an unknown name, or another class, raises ValueError."""
    diffusers = import_library("diffusers")
    if name not in diffusers._import_structure["models"]:
        raise ValueError(describe_unknown_model("diffusers", name, list_classes()))
    return _check_class(getattr(diffusers, name), f"diffusers:{name}")


def list_classes() -> list[str]:
    """Return the names of diffusers' model classes."""
    names = import_library("diffusers")._import_structure["models"]
    suffixes = ("Model", "UNet", "VAE")
    models = [name for name in names if name.endswith(suffixes) or name.startswith("Autoencoder")]
    return [name for name in models if name != "AutoModel" and "Multi" not in name]


def build_model(model_class: type[nn.Module], settings: Mapping[str, Any], name: str) -> nn.Module:
    """Return a model of diffusers or transformers; settings that it refuses raise ValueError, which calls it `name`."""
    constructor: Any = model_class
    try:
        if hasattr(constructor, "config_class"):  # of transformers
            model: nn.Module = constructor(constructor.config_class.from_dict(check_harmless(settings, name)))
        else:
            model = constructor.from_config(dict(settings))
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name} cannot be built from this configuration: {type(error).__name__}: {reason}") from error
    return model


def build_component(library: str, class_name: str, settings: Mapping[str, Any], name: str) -> nn.Module:
    """Return a pipeline's component, of the class and library that model_index.json names for it."""
    if library == "diffusers":
        return build_model(find_class(class_name), settings, name)
    if library == "transformers":
        module = import_library("transformers")
    else:  # of a pipeline, such as stable_diffusion
        try:
            module = importlib.import_module(f"diffusers.pipelines.{library}")
        except ModuleNotFoundError as error:
            raise ValueError(f"{name}: diffusers has no pipeline library {library!r}") from error
    if not hasattr(module, class_name):
        raise ValueError(f"{name}: {describe_missing(library, class_name, dir(module))}")
    return build_model(_check_class(getattr(module, class_name), name), settings, name)


def _check_class(model_class: Any, name: str) -> type[nn.Module]:
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        raise ValueError(f"{name} is {model_class!r:.60}, not a model: name a class such as UNet2DConditionModel")
    return model_class
