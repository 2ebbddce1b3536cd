"""Models of transformers: `transformers:CLASS`, built from a configuration without weights."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fvflops.sources.imports import describe_unknown_model, import_library
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions
from fvflops.sources.transformers.configurations import (
    fix_special_tokens,
    make_config_of_class,
    make_config_of_type,
    name_changes,
    own_config,
    read_changes,
)
from fvflops.sources.transformers.transformers_inputs import make_inputs
from fvflops.sources.weights.quantise import quantise


def list_names() -> Sequence[str]:
    """Return the names of the model classes of transformers' Auto classes that transformers exports."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    mappings = [value for name, value in vars(auto).items() if name.startswith("MODEL_") and name.endswith("_NAMES")]
    values = [value for mapping in mappings for value in mapping.values()]
    names = {name for value in values for name in ((value,) if isinstance(value, str) else value) if name}
    return sorted(names.intersection(dir(import_library("transformers"))))


def build(name: str, options: SourceOptions) -> BuiltModel:
    """Return a model of its class's default configuration, or of the one in `options.config`.

    `options.args` are settings of the configuration. The default one has settings of model_tables.yaml, without which
    some do not build. An Auto class needs a configuration with a model_type, which chooses the class.
    """
    transformers = import_library("transformers")
    model_class: Any = getattr(transformers, name, None)
    if model_class is None:
        raise ValueError(describe_unknown_model("transformers", name, list_names()))
    if is_auto_class(model_class):
        if options.config is None:
            raise ValueError(f"transformers:{name} needs a configuration with a model_type: add --config FOLDER")
        where = name_changes(options)
        return build_auto(model_class, make_config_of_type(read_changes(options), where), where)
    if getattr(model_class, "config_class", None) is None or not hasattr(model_class, "forward"):
        raise ValueError(f"transformers' {name} has no configuration: name a model class such as BertModel")
    return build_class(model_class, make_config_of_class(model_class, options))


def is_auto_class(model_class: Any) -> bool:
    """Return whether a class chooses a model's class by its configuration, such as AutoModelForCausalLM."""
    return str(getattr(model_class, "__name__", "")).startswith("Auto") and hasattr(model_class, "from_config")


def build_auto(
    auto_class: Any, config: Any, where: str, *, preprocessor: Mapping[str, Any] | None = None
) -> BuiltModel:
    """Return the model that an Auto class chooses for a configuration; errors begin with `where`."""
    if type(config) not in auto_class._model_mapping:
        names = ", ".join(config.architectures or ())
        hint = f"; its architectures are {names}" if names else ""
        lacking = f"{auto_class.__name__} has no class for the model_type {config.model_type!r}"
        raise ValueError(f"{where}: {lacking}{hint}: choose another class or task")
    fix_special_tokens(config)
    return _with_inputs(auto_class.from_config(config), preprocessor)


def build_class(model_class: Any, config: Any, *, preprocessor: Mapping[str, Any] | None = None) -> BuiltModel:
    """Return a model of a class, or of the part of the configuration that is the class's."""
    fix_special_tokens(config)
    return _with_inputs(model_class._from_config(own_config(model_class, config)), preprocessor)


def _with_inputs(model: Any, preprocessor: Mapping[str, Any] | None) -> BuiltModel:
    settings = getattr(model.config, "quantization_config", None)
    if settings is not None:
        quantise(model, settings if isinstance(settings, Mapping) else settings.to_dict())
    make = partial(make_inputs, model.config.model_type, model, preprocessor=preprocessor)
    return BuiltModel(model, make_inputs=lambda options: make(options=options))
