"""Models of transformers: `transformers:CLASS`, built from a configuration without weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fvflops.sources.imports import describe_unknown_model, import_library
from fvflops.sources.input_specs import InputSpec
from fvflops.sources.json_settings import read_settings
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions


def list_names() -> Sequence[str]:
    """Return the names of the model classes."""
    transformers = import_library("transformers")
    return [item for item in dir(transformers) if item.endswith(("Model", "ForCausalLM", "LMHeadModel"))]


def build(name: str, options: SourceOptions) -> BuiltModel:
    """Return a model of the default configuration, or of the settings in `options.config`."""
    transformers = import_library("transformers")
    if not hasattr(transformers, name):
        raise ValueError(describe_unknown_model("transformers", name, list_names()))
    model_class: Any = getattr(transformers, name)
    config_class: Any = getattr(model_class, "config_class", None)
    if config_class is None:
        raise ValueError(f"transformers' {name} has no configuration: name a model class such as BertModel")
    settings = config_class(**({} if options.config is None else read_settings(options.config, "--config")))
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
