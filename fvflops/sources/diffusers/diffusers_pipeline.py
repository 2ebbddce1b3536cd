"""Pipelines of diffusers from the folder of their model_index.json: encoders, denoising steps and a decoder."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fvflops.capture.shapes.shape_mode import ShapeMode
from fvflops.sources.call_arguments import parse_arguments
from fvflops.sources.diffusers.components import (
    IMAGE_AUTOENCODERS,
    TEMPORAL_DECODER,
    Sizes,
    build_component,
    check_sides,
    find_inputs,
    find_sides,
    is_video,
    make_ones,
)
from fvflops.sources.imports import describe_missing, import_library
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions, chosen_fields, option_of, read_settings
from fvflops.text import suggest
from fvflops.torch_internals import dispatch_mode_stack

INDEX = "model_index.json"
_ENCODERS = ("text_encoder", "image_encoder")
_DENOISERS = ("unet", "transformer")
_DECODER = "vae"
_KINDS = (*_ENCODERS, *_DENOISERS, _DECODER)
# Built for their parameters, but not run: the check of the pictures is optional.
_IDLE = ("safety_checker",)
# Arguments of a pipeline's call that set the sizes.
_CALL_SIZES = ("height", "width", "num_frames", "max_sequence_length")
_CLIP = "CLIPText"  # class names of text encoders that pad every text to their number of positions
_SAMPLE = 128  # side of the latents of pipelines whose configurations have none
_TOKENS = 77


class DiffusionModel(nn.Module):
    """The components of a pipeline as submodules, run as it runs them for one prompt.

    `steps` is denoiser → number of runs; each encoder and the decoder run once. `forward` takes component → keyword
    arguments: the components exchange no tensors, and the scheduler's arithmetic is not included.
    """

    def __init__(self, components: Mapping[str, nn.Module], steps: Mapping[str, int]) -> None:
        super().__init__()
        for name, component in components.items():
            self.add_module(name, component)
        self._steps = dict(steps)

    def forward(self, **inputs: Mapping[str, Any]) -> Any:
        """Run the components in order."""
        result = None
        for name, arguments in inputs.items():
            component: Any = self.get_submodule(name)
            if name == _DECODER:
                result = component.decode(**arguments)
            else:
                repeat(self._steps.get(name, 1), partial(component, **arguments))
        return result


def refuse_pipeline_options(options: SourceOptions, name: str) -> None:
    """Raise ValueError for options of a pipeline, which the model of this name is not."""
    for field in ("denoising_steps", "guidance"):
        if field in chosen_fields(options):
            option = option_of(field)
            raise ValueError(f"{option} applies to a pipeline, diffusers:FOLDER; got {name}: omit {option}")


def build_pipeline(folder: str, options: SourceOptions) -> BuiltModel:
    """Return the pipeline in a folder with model_index.json and its components' configurations, without weights.

    Inputs have the sizes of the options, or else of the defaults of the pipeline's call and of the configurations.
    `options.args` are arguments of that call, such as `num_frames=16`. `options.denoising_steps` (default 1) is how
    often the denoiser runs, and with `options.guidance` it runs on a doubled batch. A folder without an index, an
    unknown class, and a component for which there are no inputs raise ValueError.
    """
    if options.config is not None:
        raise ValueError(f"--config: the pipeline {folder} has its components' configurations: omit it")
    index = read_settings(folder, "", file=INDEX)
    name = index.get("_class_name")
    diffusers = import_library("diffusers")
    known = diffusers._import_structure["pipelines"]
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{os.path.join(folder, INDEX)}: {describe_missing('diffusers', str(name), known)}")
    pipeline_class = getattr(diffusers, name)
    components = _build_components(folder, index)
    defaults = _read_defaults(pipeline_class, options)
    order = [part.strip() for part in pipeline_class.model_cpu_offload_seq.split("->")]
    run = [part for part in (*order, *components) if part in components and part not in _IDLE]
    run = [part for kind in _KINDS for part in dict.fromkeys(run) if part.startswith(kind)]
    denoisers, steps = [part for part in run if part.startswith(_DENOISERS)], options.denoising_steps or 1
    # Two denoisers, as in Wan 2.2, run half of the steps each.
    shares = {name: (steps + index) // len(denoisers) for index, name in enumerate(reversed(denoisers))}
    model = DiffusionModel(components, shares)
    model.__class__ = type(name, (DiffusionModel,), {"__module__": __name__})
    return BuiltModel(model, make_inputs=partial(_make_inputs, model, run, defaults))


def _build_components(folder: str, index: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return name → model of the components that are models; the others are tokenizers, schedulers and the like."""
    components: dict[str, nn.Module] = {}
    for name, entry in index.items():
        is_entry = isinstance(entry, list) and len(entry) == 2 and all(isinstance(item, str) for item in entry)
        if name.startswith("_") or not is_entry:  # a setting, or null for a component that is absent
            continue
        path = os.path.join(folder, name)
        if not name.startswith(_KINDS) and not os.path.isfile(os.path.join(path, "config.json")):
            continue
        if not name.startswith((*_KINDS, *_IDLE)):
            remedy = f"count it alone, such as diffusers:{entry[1]} --config {path}"
            raise ValueError(f"{folder}: the component {name} ({entry[1]}) cannot be counted in a pipeline: {remedy}")
        if not os.path.isdir(path):
            raise ValueError(f"{folder}: {INDEX} lists {name} ({entry[1]}), but there is no folder {path}")
        components[name] = build_component(entry[0], entry[1], read_settings(path, ""), path)
    if not any(name.startswith(_DENOISERS) for name in components):
        raise ValueError(f"{folder}: {INDEX} has no unet and no transformer, so that there is nothing to repeat")
    return components


def _read_defaults(pipeline_class: Any, options: SourceOptions) -> dict[str, int]:
    """Return size → its value in `options.args`, or else its default in the pipeline's call."""
    parameters = inspect.signature(pipeline_class.__call__).parameters
    sizes = {key: parameters[key].default for key in _CALL_SIZES if key in parameters}
    for key, value in parse_arguments(options.args).items():
        if key not in sizes:
            hint = suggest(key, sizes) or f": it has {', '.join(sizes) or 'none'}"
            raise ValueError(f"--arg {key}: {pipeline_class.__name__} has no such size{hint}")
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"--arg {key}={value}: must be an integer of at least 1")
        sizes[key] = value
    return {key: value for key, value in sizes.items() if isinstance(value, int)}


@dataclass(frozen=True, slots=True)
class _Latents:
    """How a decoder maps latents to pixels: channels, and pixels or frames for each of the latent."""

    channels: int
    side: int
    frames: int


def _read_latents(vae: nn.Module | None, channels: int) -> _Latents:
    if vae is None:
        return _Latents(channels, 1, 1)
    config: Any = vae.config
    blocks = config.get("block_out_channels") or config.get("encoder_block_out_channels") or (1,)
    side = config.get("scale_factor_spatial") or config.get("spatial_compression_ratio")
    side = side or getattr(vae, "spatial_compression_ratio", None) or 2 ** (len(blocks) - 1)
    frames = config.get("scale_factor_temporal") or config.get("temporal_compression_ratio")
    frames = frames or getattr(vae, "temporal_compression_ratio", None) or 1
    return _Latents(config.get("latent_channels") or config.get("z_dim") or channels, side, frames)


def _make_inputs(
    model: DiffusionModel, run: Sequence[str], defaults: Mapping[str, int], options: SourceOptions
) -> dict[str, dict[str, Any]]:
    """Return component → keyword arguments, on the model's device."""
    components: dict[str, Any] = {name: model.get_submodule(name) for name in run}
    denoiser = next(module for name, module in components.items() if name.startswith(_DENOISERS))
    vae = components.get(_DECODER)
    latents = _read_latents(vae, denoiser.config["in_channels"])
    sizes = _choose_sizes(components, denoiser, latents, defaults, options)
    batch, inputs = options.batch or 1, dict[str, dict[str, Any]]()
    with next(denoiser.parameters()).device:
        for name, module in components.items():
            if name == _DECODER:
                inputs[name] = _decoder_inputs(module, latents, sizes, batch)
            elif name.startswith(_DENOISERS):
                inputs[name] = find_inputs(module, sizes)
            elif name.startswith("image_encoder"):
                image = module.config.image_size
                inputs[name] = {"pixel_values": torch.zeros(batch, 3, image, image)}
            else:
                text = _count_positions(module) or _long_text(defaults, options)
                inputs[name] = {"input_ids": make_ones(batch, text)}
    return inputs


def _choose_sizes(
    components: Mapping[str, nn.Module],
    denoiser: nn.Module,
    latents: _Latents,
    defaults: Mapping[str, int],
    options: SourceOptions,
) -> Sizes:
    """Return the sizes of the denoiser's inputs, from the options, the pipeline's call, or the configurations."""
    config: Any = denoiser.config
    height, width = (side * latents.side for side in find_sides(config, _SAMPLE))
    image = options.image_size or (defaults.get("height", height), defaults.get("width", width))
    check_sides(image, latents.side)
    frames = defaults.get("num_frames", config.get("sample_frames") or config.get("num_frames") or 1)
    batch = (options.batch or 1) * (2 if options.guidance else 1)
    return Sizes(
        batch=batch,
        frames=(frames - 1) // latents.frames + 1 if is_video(denoiser) else 1,
        height=image[0] // latents.side,
        width=image[1] // latents.side,
        text=_count_text(components, denoiser, defaults, options),
    )


def _count_positions(encoder: nn.Module) -> int:
    """Return the number of tokens to which a pipeline pads every text for this encoder, 0 if it is not fixed."""
    config: Any = encoder.config
    return int(config.max_position_embeddings) if type(encoder).__name__.startswith(_CLIP) else 0


def _long_text(defaults: Mapping[str, int], options: SourceOptions) -> int:
    return options.seq or defaults.get("max_sequence_length", _TOKENS)


def _count_text(
    components: Mapping[str, nn.Module], denoiser: nn.Module, defaults: Mapping[str, int], options: SourceOptions
) -> int:
    """Return the tokens of text that the denoiser sees."""
    encoders = [module for name, module in components.items() if name.startswith("text_encoder")]
    fixed = [positions for encoder in encoders if (positions := _count_positions(encoder))]
    has_length = bool(encoders) and (len(fixed) < len(encoders) or "max_sequence_length" in defaults)
    if options.seq is not None and not has_length:
        reason = "pads every text to one length" if encoders else "reads no text"
        raise ValueError(f"--seq does not apply to this pipeline, which {reason}: omit it")
    if not encoders:  # one token for the image, or none
        return 1
    long = _long_text(defaults, options) if has_length else 0
    if type(denoiser).__name__ == "SD3Transformer2DModel":  # CLIP's tokens, then T5's
        return max(fixed, default=0) + long
    return long or max(fixed)


def _decoder_inputs(vae: nn.Module, latents: _Latents, sizes: Sizes, batch: int) -> dict[str, Any]:
    name = type(vae).__name__
    if name not in (*IMAGE_AUTOENCODERS, TEMPORAL_DECODER):
        return {"z": torch.zeros(batch, latents.channels, sizes.frames, *sizes.image)}
    images = {"z": torch.zeros(batch * sizes.frames, latents.channels, *sizes.image)}
    return {**images, "num_frames": sizes.frames} if name == TEMPORAL_DECODER else images


def repeat(times: int, iteration: Callable[[], object]) -> None:
    """Call a function `times` times.

    In shape execution without a backward pass only the first two calls run (the second one finds what the first has
    cached) and the events of the second are recorded for all later ones, so that 50 steps take the time of two. Beyond
    2^18 events only call counts are retained.
    """
    mode = next((mode for mode in reversed(dispatch_mode_stack()) if isinstance(mode, ShapeMode)), None)
    runs = times if mode is None or mode.recorder.backward else min(times, 2)
    first = 0
    for _ in range(runs):
        first = 0 if mode is None else len(mode.recorder.events)
        iteration()
    if mode is not None and runs < times:
        mode.recorder.repeat_events(first, times - runs)
