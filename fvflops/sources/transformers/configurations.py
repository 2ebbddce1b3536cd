"""Configurations of transformers models: defaults that build, and sub-configurations."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from fvflops.sources.transformers.default_settings import ADJUSTMENTS

# Modality → settings with the id of its placeholder token, which processors insert once for each feature.
PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
}


def make_config(model_type: str) -> tuple[Any, dict[str, Any]]:
    """Return the default configuration of a model type, and setting → value of what had to be changed in it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    settings = ADJUSTMENTS.get(model_type, {})
    config = CONFIG_MAPPING[model_type](**copy.deepcopy(settings))
    return config, {**settings, **match_vision_width(config), **fix_special_tokens(config)}


def own_config(model_class: Any, config: Any) -> Any:
    """Return the (sub-)configuration of a model class, such as that of a CLIPTextModel in CLIP's."""
    wanted = model_class.config_class
    if wanted is None or isinstance(config, wanted):
        return config
    return next((part for part in walk_configs(config) if isinstance(part, wanted)), config)


def match_vision_width(config: Any) -> dict[str, Any]:
    """Set the vision encoder's output width to the text model's hidden size, and return what was changed."""
    width = getattr(config.get_text_config(), "hidden_size", None) if hasattr(config, "text_config") else None
    vision = config.__dict__.get("vision_config")
    given = getattr(vision, "out_hidden_size", None)
    if width is None or given is None or given == width:
        return {}
    vision.out_hidden_size = width
    return {"vision_config.out_hidden_size": width}


def fix_special_tokens(config: Any) -> dict[str, Any]:
    """Replace placeholder and padding ids that are not in the vocabulary, and return those that were changed.

    In a default configuration the sub-configurations may be of two checkpoints: a placeholder of 151,655 in a
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
