"""Configurations of transformers models from JSON: a text, a file, or a folder with config.json."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

from fvflops.sources.call_arguments import parse_arguments
from fvflops.sources.json_settings import read_settings
from fvflops.sources.options import SourceOptions
from fvflops.sources.transformers.configurations import fix_special_tokens, match_vision_width, own_config
from fvflops.sources.transformers.default_settings import ADJUSTMENTS
from fvflops.text import list_nearest

# Settings that are numbers of modules: layers, blocks, experts.
_REPEATED = re.compile(r"(layers?|blocks?|depths?|experts?|stages?)$")
_MAX_REPEATED = 4096


def merge_settings(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with changes, merged recursively.

    >>> merge_settings({"text_config": {"width": 8, "depth": 2}}, {"text_config": {"depth": 3}})
    {'text_config': {'width': 8, 'depth': 3}}
    """
    merged = copy.deepcopy(dict(settings))
    for name, value in changes.items():
        old = merged.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            merged[name] = merge_settings(old, value)
        else:
            merged[name] = copy.deepcopy(value)
    return merged


def has_model_type(settings: Mapping[str, Any]) -> bool:
    """Return whether the installed transformers has the settings' model_type."""
    return (
        settings.get("model_type")
        in importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    )


def make_config_of_type(settings: Mapping[str, Any], where: str) -> Any:
    """Return the configuration of the settings' model_type; errors begin with `where`, the source of the settings."""
    mapping = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    model_type = settings.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f'{where}: there is no model_type, such as "bert", which names the model\'s class: add it')
    if model_type not in mapping:
        version = importlib.import_module("transformers").__version__
        near = list_nearest(model_type, list(mapping))
        raise ValueError(
            f"{where}: transformers {version} has no model_type {model_type!r}{near}: install a version that has it"
        )
    return _from_settings(mapping[model_type], settings, where)


def read_changes(options: SourceOptions) -> dict[str, Any]:
    """Return the settings of `--config`, with those of `--arg`."""
    settings = {} if options.config is None else read_settings(options.config, "--config")
    return merge_settings(settings, parse_arguments(options.args))


def name_changes(options: SourceOptions) -> str:
    """Return the options that `read_changes` reads, for messages."""
    config = [] if options.config is None else [f"--config {options.config}"]
    return " ".join([*config, *(f"--arg {text}" for text in options.args)])


def make_config_of_class(model_class: Any, options: SourceOptions) -> Any:
    """Return the configuration of a model class: its default, with the settings of `--config` and `--arg`.

    Settings with a model_type are a complete configuration, of which a model of a part takes its part. Of others, one
    that the class does not have raises ValueError.
    """
    config_class = model_class.config_class
    settings, where = read_changes(options), name_changes(options)
    if "model_type" in settings:
        config = own_config(model_class, make_config_of_type(settings, where))
        if not isinstance(config, config_class):
            raise ValueError(
                f"{where}: model_type {settings['model_type']!r} is not that of {model_class.__name__}, "
                f"{config_class.model_type!r}: name another class, such as transformers:AutoModel"
            )
    else:
        defaults = ADJUSTMENTS.get(config_class.model_type, {})
        check_settings(config_class, settings, where)
        config = _from_settings(config_class, merge_settings(defaults, settings), where if settings else "")
        match_vision_width(config)
    fix_special_tokens(config)
    return config


def check_settings(config_class: Any, settings: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for a setting that configurations of a class do not have: transformers would ignore it."""
    if not settings:
        return
    default = _from_settings(config_class, ADJUSTMENTS.get(config_class.model_type, {}), "")
    known = {*dir(default), *inspect.signature(config_class).parameters, *(default.attribute_map or {})}
    for name in settings:
        # Of attn_implementation and such the attribute has an underscore.
        if not known & {name, f"_{name}"} and not name.startswith("_"):
            shown = sorted(item for item in known if not item.startswith("_"))
            raise ValueError(f"{where}: {config_class.__name__} has no setting {name!r}{list_nearest(name, shown)}")


def check_harmless(settings: Any, where: str) -> Any:
    """Return a copy of settings that names no code or weights of a hub, and builds no endless model.

    Weights are not needed, so pretrained backbones are not. An attention kernel of a hub and a number of layers or
    experts above the limit raise ValueError.
    """
    if isinstance(settings, list):
        return [check_harmless(item, where) for item in settings]
    if not isinstance(settings, Mapping):
        return copy.deepcopy(settings)
    checked = {}
    for name, value in settings.items():
        implementations = value.values() if isinstance(value, Mapping) else (value,)
        if name.endswith("_implementation"):
            for item in implementations:
                if isinstance(item, str) and "/" in item:
                    raise ValueError(f"{where}: {name} {item!r} is code on a hub, which is not run: omit it")
        if _REPEATED.search(name) and isinstance(value, int) and value > _MAX_REPEATED:
            raise ValueError(f"{where}: {name} is {value:,}: a model has at most {_MAX_REPEATED:,} layers or experts")
        checked[name] = False if name == "use_pretrained_backbone" else check_harmless(value, where)
    return checked


def _from_settings(config_class: Any, settings: Mapping[str, Any], where: str) -> Any:
    settings = check_harmless(settings, where or f"the default configuration of {config_class.model_type}")
    try:
        return config_class.from_dict(settings)
    except Exception as error:  # transformers and its validators raise errors of many types
        reason = " ".join(str(error).split())
        where = where or f"the default configuration of {config_class.model_type}"
        raise ValueError(f"{where}: {type(error).__name__}: {reason}") from error
