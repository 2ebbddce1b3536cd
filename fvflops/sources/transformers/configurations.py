"""Configurations of transformers models: defaults that build, sub-configurations, and settings from JSON."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fvflops.sources.call_arguments import parse_arguments
from fvflops.sources.options import SourceOptions, read_settings
from fvflops.text import list_nearest

# Modality → settings with the id of its placeholder token, which processors insert once for each feature.
PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
}
# Settings that are numbers of modules: layers, blocks, experts.
_REPEATED = re.compile(r"(layers?|blocks?|depths?|experts?|stages?)$")
_MAX_REPEATED = 4096


@cache
def read_tables() -> dict[str, Any]:
    text = Path(__file__).with_name("model_tables.yaml").read_text(encoding="utf-8")
    tables: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    tables["defaults"] = merge_settings(tables["defaults"], _long_defaults())
    return tables


def default_settings(model_type: str) -> dict[str, Any]:
    """Return settings without which the default configuration of a type builds no model, or one that raises."""
    return dict(copy.deepcopy(read_tables()["defaults"].get(model_type, {})))


def _long_defaults() -> dict[str, Any]:
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    codes = {f"IMGIMG{str(i).translate(letters)}Z": 4 + i for i in range(8192)}
    tokens = {f"<|visual token {i:06}|>": 100 + i for i in range(32_768)}
    return {
        "lfm2_moe": {"layer_types": (["conv"] * 3 + ["full_attention"]) * 8},
        "pp_doclayout_v2": {"class_thresholds": 25 * [0.5], "class_order": list(range(25))},
        "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense"] + 31 * ["sparse"]}},
        # The tokens of an image and of its codes, which a checkpoint's vocabulary names.
        "chameleon": {"image_token_id": 8711, "vocabulary_map": {"<image>": 8711} | codes},
        "emu3": {"image_token_id": 151_600, "vocabulary_map": {"<image>": 151_600, "<|extra_200|>": 151_601} | tokens},
    }


def make_config(model_type: str) -> tuple[Any, dict[str, Any]]:
    """Return the default configuration of a model type, and setting → value of the necessary changes."""
    settings = default_settings(model_type)
    config = _config_mapping()[model_type](**copy.deepcopy(settings))
    return config, {**settings, **match_vision_width(config), **fix_special_tokens(config)}


def own_config(model_class: Any, config: Any) -> Any:
    """Return the (sub-)configuration of a model class, such as CLIP's text configuration for CLIPTextModel."""
    wanted = model_class.config_class
    if wanted is None or isinstance(config, wanted):
        return config
    return next((part for part in walk_configs(config) if isinstance(part, wanted)), config)


def match_vision_width(config: Any) -> dict[str, Any]:
    """Set the vision encoder's output width to the text model's hidden size, and return the changes."""
    width = getattr(config.get_text_config(), "hidden_size", None) if hasattr(config, "text_config") else None
    vision = config.__dict__.get("vision_config")
    given = getattr(vision, "out_hidden_size", None)
    if width is None or given is None or given == width:
        return {}
    vision.out_hidden_size = width
    return {"vision_config.out_hidden_size": width}


def fix_special_tokens(config: Any) -> dict[str, Any]:
    """Replace placeholder and padding ids that are not in the vocabulary, and return the changes.

    In a default configuration the sub-configurations may be from two checkpoints: a placeholder of 151,655 in a
    vocabulary of 32,000.
    """
    changed = {}
    vocabulary = vocabulary_size(config)
    for part in walk_configs(config):
        for offset, names in enumerate(PLACEHOLDERS.values(), start=1):
            for name in names:
                given = part.__dict__.get(name, 0)
                if (given is None or given >= vocabulary) and vocabulary > 100:
                    setattr(part, name, vocabulary - offset)
                    changed[name] = vocabulary - offset
        padding = part.__dict__.get("pad_token_id")
        own = part.__dict__.get("vocab_size")
        if isinstance(padding, int) and isinstance(own, int) and padding >= own:
            part.pad_token_id = changed["pad_token_id"] = 0
    return changed


def vocabulary_size(config: Any) -> int:
    """Return the size of the text model's vocabulary, 0 where there is none."""
    for part in (*_text_configs(config), *walk_configs(config)):
        for name in ("vocab_size", "text_vocab_size", "input_vocab_size", "src_vocab_size"):
            size = getattr(part, name, None)
            if isinstance(size, int):
                return size
    return 0


def _text_configs(config: Any) -> list[Any]:
    try:
        return [config.get_text_config()]
    except ValueError:  # it has two: encoder and decoder
        return []


def walk_configs(config: Any) -> Iterator[Any]:
    """Yield a configuration and its sub-configurations, recursively."""
    from transformers import PreTrainedConfig

    yield config
    for value in list(config.__dict__.values()):
        if isinstance(value, PreTrainedConfig):
            yield from walk_configs(value)


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
    return settings.get("model_type") in _config_mapping()


def _config_mapping() -> Any:
    return importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING


def make_config_of_type(settings: Mapping[str, Any], where: str) -> Any:
    """Return the configuration of the settings' model_type; errors begin with `where`, the source of the settings."""
    mapping = _config_mapping()
    model_type = settings.get("model_type")
    if not isinstance(model_type, str):
        raise ValueError(f'{where}: there is no model_type, such as "bert", which names the model\'s class: add it')
    if model_type not in mapping:
        version = importlib.import_module("transformers").__version__
        near = list_nearest(model_type, list(mapping))
        lacking = f"transformers {version} has no model_type {model_type!r}{near}"
        raise ValueError(f"{where}: {lacking}: install a version that has it")
    return _from_settings(mapping[model_type], settings, where)


def read_changes(options: SourceOptions) -> dict[str, Any]:
    """Return the settings of `--config` and `--arg`."""
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
            own = f"{model_class.__name__}'s, {config_class.model_type!r}"
            problem = f"model_type {settings['model_type']!r} is not {own}"
            raise ValueError(f"{where}: {problem}: name another class, such as transformers:AutoModel")
    else:
        defaults = default_settings(config_class.model_type)
        check_settings(config_class, settings, where)
        config = _from_settings(config_class, merge_settings(defaults, settings), where if settings else "")
        match_vision_width(config)
    fix_special_tokens(config)
    return config


def check_settings(config_class: Any, settings: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for a setting that configurations of a class do not have: transformers would ignore it."""
    if not settings:
        return
    default = _from_settings(config_class, default_settings(config_class.model_type), "")
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
        for item in implementations if name.endswith("_implementation") else ():
            if isinstance(item, str) and "/" in item:
                raise ValueError(f"{where}: {name} {item!r} is code on a hub, which is not run: omit it")
        if _REPEATED.search(name) and isinstance(value, int) and value > _MAX_REPEATED:
            raise ValueError(f"{where}: {name} is {value:,}: a model has at most {_MAX_REPEATED:,} layers or experts")
        checked[name] = False if name == "use_pretrained_backbone" else check_harmless(value, where)
    return checked


def _from_settings(config_class: Any, settings: Mapping[str, Any], where: str) -> Any:
    where = where or f"the default configuration of {config_class.model_type}"
    settings = check_harmless(settings, where)
    try:
        return config_class.from_dict(settings)
    except Exception as error:  # transformers and its validators raise errors of many types
        reason = " ".join(str(error).split())
        raise ValueError(f"{where}: {type(error).__name__}: {reason}") from error
