"""Models of transformers: `transformers:CLASS`, built from a configuration without weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fvflops import paths
from fvflops.sources.imports import describe_missing, import_module
from fvflops.sources.input_specs import InputSpec
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions

_MAX_CONFIG = 1 << 20


def list_names() -> Sequence[str]:
    """Return the names of the model classes."""
    transformers = import_module("transformers")
    return [item for item in dir(transformers) if item.endswith(("Model", "ForCausalLM", "LMHeadModel"))]


def build(name: str, options: SourceOptions) -> BuiltModel:
    """Return a model of the default configuration, or of the settings in `options.config`."""
    transformers = import_module("transformers")
    if not hasattr(transformers, name):
        raise ValueError(describe_missing("transformers", name, list_names()))
    model_class: Any = getattr(transformers, name)
    config_class: Any = getattr(model_class, "config_class", None)
    if config_class is None:
        raise ValueError(f"transformers' {name} has no configuration: name a model class such as BertModel")
    settings = config_class(**_read_config(options.config))
    return BuiltModel(model_class(settings), _find_inputs(model_class, settings))


def _find_inputs(model_class: Any, config: Any) -> tuple[InputSpec, ...]:
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
