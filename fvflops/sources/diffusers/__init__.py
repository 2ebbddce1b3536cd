"""Models of diffusers: `diffusers:CLASS`, and pipelines by the folder that contains model_index.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from fvflops.sources.call_arguments import check_names, parse_arguments
from fvflops.sources.diffusers.components import (
    Sizes,
    build_model,
    check_sides,
    find_class,
    find_inputs,
    find_sides,
    is_video,
    reads_text,
)
from fvflops.sources.diffusers.components import list_classes as list_names
from fvflops.sources.diffusers.diffusers_pipeline import INDEX, build_pipeline, refuse_pipeline_options
from fvflops.sources.imports import offline
from fvflops.sources.input_sizes import raise_unused
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions, read_settings

__all__ = ["build", "build_pipeline", "list_names"]

# Defaults without an option or a setting: tokens of text, and the side of latents and of images, in pixels.
_TOKENS, _LATENT, _IMAGE = 77, 64, 256
_FRAMES = 17  # of an autoencoder: 1 more than a multiple of both 4 and 8
_LATENT_FRAMES = 5
_LATENT_SIDE = 8  # pixels of an image's side per pixel of a denoiser's latents


def build(name: str, options: SourceOptions) -> BuiltModel:
    """Return the pipeline in a folder, or a model with the default configuration or with `options.config`.

    `options.args` are settings of the configuration, or sizes of the pipeline's call such as `num_frames=16`.
    """
    if os.path.isdir(name):
        with offline("diffusers"):
            return build_pipeline(name, options)
    if os.sep in name or name == INDEX:
        raise ValueError(f"diffusers:{name}: there is no such folder; name the one that contains {INDEX}, or a class")
    refuse_pipeline_options(options, f"diffusers:{name}")
    model_class = find_class(name)
    arguments = parse_arguments(options.args)
    check_names(model_class, arguments, name)
    settings = {} if options.config is None else read_settings(options.config, "--config")
    model = build_model(model_class, {**settings, **arguments}, f"diffusers:{name}")
    return BuiltModel(model, make_inputs=partial(_make_inputs, model))


def _make_inputs(model: Any, options: SourceOptions) -> dict[str, Any]:
    """Return the keyword arguments of a model's forward, with the sizes of the options, on the model's device."""
    config: Mapping[str, Any] = model.config
    is_autoencoder = "encode" in dir(model)
    height, width = find_sides(config, _IMAGE if is_autoencoder else _LATENT)
    if options.image_size is not None:
        unit = 1 if is_autoencoder else _LATENT_SIDE
        check_sides(options.image_size, unit)
        height, width = (side // unit for side in options.image_size)
    frames = _FRAMES if is_autoencoder else _LATENT_FRAMES if is_video(model) else 1
    tokens = options.seq or config.get("max_text_seq_length") or _TOKENS
    sizes = Sizes(options.batch or 1, frames, height, width, tokens)
    with next(model.parameters()).device:
        inputs = find_inputs(model, sizes)
    if options.seq is not None and not reads_text(inputs):
        raise_unused(("seq",), f"diffusers:{type(model).__name__}", (), inputs)
    return inputs
