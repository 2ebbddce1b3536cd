"""Inputs for transformers models: the arguments of a forward, in the sizes of the configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import nn

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.sources.input_sizes import chosen_sizes, raise_unused
from fvflops.sources.options import DEFAULT_OPTIONS, SourceOptions
from fvflops.sources.transformers.configurations import PLACEHOLDERS, read_tables, walk_configs
from fvflops.sources.transformers.input_request import (
    BINS,
    FRAMES,
    IMAGE,
    SAMPLES,
    SPECTROGRAM,
    TEXT,
    InputRequest,
    floats,
    image_channels,
    image_sides,
    integers,
    make_token_ids,
    ones,
    text_length,
)
from fvflops.sources.transformers.special_inputs import make_fixed_inputs, make_special_inputs
from fvflops.trace import TensorSpec


def make_inputs(
    model_type: str,
    model: nn.Module,
    *,
    text: int = TEXT,
    options: SourceOptions = DEFAULT_OPTIONS,
    preprocessor: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return argument name → value for a model of a type, in the sizes of the options.

    `text` is the number of tokens unless the options have one. For a model on the meta device integers and masks are
    on the CPU, since control flow may depend on their values. An option that sets no input's size raises ValueError.
    """
    accepted = inspect.signature(model.forward).parameters
    request = InputRequest(model_type, model, model.config, accepted, text, options.seq, options.image_size)
    made = request.made
    made.update(make_special_inputs(request))
    if not made:
        request.preprocessor = preprocessor or {}
    made.update(make_fixed_inputs(request))
    for argument, make in ARGUMENTS.items():
        if argument in request.accepted and argument not in made and (value := make(request)) is not None:
            made[argument] = value
    _fit_head(request)
    inputs = {name: value for name, value in made.items() if name in request.accepted and value is not None}
    unused = [name for name in chosen_sizes(options) if name != "batch" and name not in request.used]
    raise_unused(unused, type(model).__name__, (), inputs)
    if options.batch is not None:
        _set_padding(model.config)
        axes = read_tables()["batch_axes"].get(model_type, {})
        inputs = {name: _repeat(value, options.batch, name, axes.get(name, 0)) for name, value in inputs.items()}
    device = next(model.parameters()).device
    if device.type == "meta":
        return inputs
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def _fit_head(request: InputRequest) -> None:
    """Give a multiple-choice text an axis of two choices; end an encoder-decoder classifier's text with EOS."""
    class_name = type(request.model).__name__
    made = request.made
    if class_name.endswith("ForMultipleChoice"):
        for name in _TEXT_ARGUMENTS & made.keys():
            made[name] = torch.stack([made[name], made[name]], dim=1)
    ids, eos = made.get("input_ids"), request.setting("eos_token_id")
    has_decoder = getattr(request.config, "is_encoder_decoder", False)
    if class_name.endswith("ForSequenceClassification") and has_decoder and ids is not None and isinstance(eos, int):
        ids[:, -1] = eos


_TEXT_ARGUMENTS = {"input_ids", "attention_mask", "bbox"}


def _set_padding(config: Any) -> None:
    """Set missing padding tokens, without which classifiers of text refuse batches; the inputs have no padding."""
    for part in walk_configs(config):
        if getattr(part, "pad_token_id", 0) is None:
            part.pad_token_id = 0


def _repeat(value: Any, batch: int, name: str, axis: int) -> Any:
    """Return an input for each sample: the axis is the batch, or an axis along which a processor concatenates."""
    if isinstance(value, torch.Tensor):
        return torch.cat([value] * batch, dim=axis)
    if isinstance(value, (bool, int)) or batch == 1:
        return value
    raise ValueError(f"--batch {batch}: input {name} ({type(value).__name__}) has no batch axis: omit --batch")


# --- images ---


def _pixel_values(request: InputRequest) -> torch.Tensor | None:
    if getattr(request.config, "vision_config", True) is None:
        return None  # this configuration has no vision encoder
    if request.accepts("image_grid_thw", "grid_thw"):
        return _patches(request)
    height, width = image_sides(request)
    frames = request.setting("num_frames", part="vision") if _is_video_model(request) else None
    leading = (1, frames) if frames else (1,)
    return floats(request, *leading, image_channels(request), height, width)


def _is_video_model(request: InputRequest) -> bool:
    modalities: Any = request.model.input_modalities
    return "video" in modalities and "image" not in modalities


def _patches(request: InputRequest) -> torch.Tensor:
    """Return the flattened patches of one image, in the order of Qwen's processors, and make their grid."""
    patch = request.setting("patch_size", part="vision")
    time = request.setting("temporal_patch_size", "patch_temporal", part="vision", default=1)
    merge = request.setting("spatial_merge_size", "merge_size", part="vision", default=1)
    # The processors resize an image to the nearest whole numbers of merged patches.
    sides = request.chosen_image() or (IMAGE, IMAGE)
    rows, columns = (merge * max(1, round(side / (patch * merge))) for side in sides)
    grid = torch.tensor([[1, rows, columns]], device="cpu")
    for name in ("grid_thw", "image_grid_thw"):
        request.made[name] = grid
    return floats(request, rows * columns, image_channels(request) * time * patch * patch)


def _pixel_values_videos(request: InputRequest) -> torch.Tensor | None:
    if request.accepts("pixel_values") or "video_grid_thw" in request.accepted:
        return None  # the inputs contain an image already
    frames = request.setting("frames_per_clip", "num_frames", part="vision", default=FRAMES)
    height, width = image_sides(request)
    return floats(request, 1, frames, image_channels(request), height, width)


def _interpolate_positions(request: InputRequest) -> bool | None:
    """Return True for an image that differs in size from the model's learned positions."""
    size = request.setting("image_size", part="vision")
    sides = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    image = request.made.get("pixel_values")
    return True if image is not None and size is not None and tuple(image.shape[-2:]) != sides else None


# --- audio ---


def _input_features(request: InputRequest) -> torch.Tensor | None:
    """Return a spectrogram: (1, bins, frames) for a model whose first layer is a Conv1d, else (1, frames, bins)."""
    if request.accepts("input_values") and not request.requires("input_features"):
        return None
    if getattr(request.config, "audio_config", True) is None:
        return None  # this configuration has no audio encoder
    first = _first_layer(request.model)
    bins = request.setting(*BINS, part="audio", default=request.preprocessor.get("bins", 80))
    for name in ("input_features_mask", "feature_attention_mask"):
        if request.accepts(name):
            request.made.setdefault(name, ones(1, SPECTROGRAM))
    shape = (bins, SPECTROGRAM) if isinstance(first, nn.Conv1d) else (SPECTROGRAM, bins)
    return floats(request, 1, *shape)


def _first_layer(model: nn.Module) -> nn.Module | None:
    """Return the first layer of the audio encoder, in the order of construction."""
    encoders = [part for name, part in model.named_modules() if name.rpartition(".")[2] in _AUDIO_ENCODERS] or [model]
    kinds = (nn.Conv1d, nn.Conv2d, nn.Linear, nn.LayerNorm)
    return next((module for module in encoders[0].modules() if isinstance(module, kinds)), None)


_AUDIO_ENCODERS = ("audio_tower", "audio_encoder", "audio_model", "speech_encoder", "audio", "encoder")


def _input_values(request: InputRequest) -> torch.Tensor:
    """Return one second of audio: (1, samples), or (1, channels, samples) for a codec."""
    channels = request.setting("audio_channels", part="audio")
    hop = request.setting("samples_per_token", "hop_length", part="audio", default=1)
    is_codec = channels is not None or request.accepts("n_quantizers", "num_quantizers", "bandwidth")
    samples = request.preprocessor.get("sampling_rate", SAMPLES)
    samples = samples // hop * hop if isinstance(hop, int) else samples
    return floats(request, 1, channels or 1, samples) if is_codec else floats(request, 1, samples)


# --- text ---


def _input_ids(request: InputRequest) -> torch.Tensor:
    """Return the first half of the text, the placeholders of images and audio, and the other half."""
    length = text_length(request)
    placeholders, types = [], []
    for index, (modality, names) in enumerate(PLACEHOLDERS.items(), start=1):
        token = request.setting(*names)
        count = count_placeholders(request, modality) if token is not None else 0
        if count:
            placeholders.append(torch.full((1, count), token, device="cpu"))
            types.append(torch.full((1, count), index, device="cpu"))
    text = make_token_ids(request, length)
    half = length // 2
    first, second = text[:, :half], text[:, half:]
    if types:
        outer = torch.zeros_like(first), torch.zeros_like(second)
        request.made["mm_token_type_ids"] = torch.cat([outer[0], *types, outer[1]], dim=1)
    return torch.cat([first, *placeholders, second], dim=1)


class _FeatureModel(nn.Module):
    """A wrapper that computes only a model's features of an image, video or audio."""

    def __init__(self, model: nn.Module, getter: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._getter = getter

    def forward(self, **given: Any) -> Any:
        features = self._getter(**given)
        pooled = getattr(features, "pooler_output", features)
        if pooled is None:
            pooled = getattr(features, "last_hidden_state", None)
        if pooled is None:  # Granite Vision's are (layer of the text model, features) pairs
            pooled = features.deepstack_features[0][1]
        return pooled


def count_placeholders(request: InputRequest, modality: str) -> int:
    """Return the number of placeholders of a modality: one for each feature that the model computes of it."""
    name = f"get_{modality}_features"
    getters = [getattr(part, name) for part in request.model.modules() if hasattr(part, name)]
    if not getters:
        return 0
    # A model with a head may pass arguments on by **kwargs: its base model names them.
    getter = max(getters, key=lambda item: len(request.made.keys() & inspect.signature(item).parameters.keys()))
    accepted = inspect.signature(getter).parameters
    given = {name: value for name, value in request.made.items() if name in accepted}
    named = {name: item for name, item in accepted.items() if item.kind is not item.VAR_KEYWORD}
    if not given or any(item.default is item.empty and name not in given for name, item in named.items()):
        return 0
    trace = FlopCountAnalysis(_FeatureModel(request.model, getter), None, kwargs=given).trace()
    # The result is discarded with the run, so its shape is read from the Trace.
    (features,) = [item.outputs for item in trace.region_signatures if not trace.regions[item.region].name]
    return sum(prod(item.shape[:-1]) for item in features if isinstance(item, TensorSpec))


def _attention_mask(request: InputRequest) -> torch.Tensor | None:
    # Without one some models create a floating-point mask, and control flow depends on its values.
    ids = request.made.get("input_ids")
    return None if ids is None else ones(1, ids.shape[1])


def _decoder_attention_mask(request: InputRequest) -> torch.Tensor | None:
    ids = request.made.get("decoder_input_ids")
    return None if ids is None or "input_ids" not in request.made else ones(1, ids.shape[-1])


def _pixel_mask(request: InputRequest) -> torch.Tensor | None:
    image = request.made.get("pixel_values")
    return None if image is None else ones(1, *image.shape[-2:])


# Argument → the function that makes it, or returns None to omit it. They are called in this order, and one may add
# other arguments to `made`. Arguments that are not listed keep their defaults.
ARGUMENTS: dict[str, Callable[[InputRequest], Any]] = {
    "pixel_values": _pixel_values,
    "pixel_values_videos": _pixel_values_videos,
    "interpolate_pos_encoding": _interpolate_positions,
    "hidden_states": lambda request: _patches(request) if request.accepts("grid_thw") else None,
    "input_features": _input_features,
    "input_values": _input_values,
    "input_ids": _input_ids,
    "attention_mask": _attention_mask,
    "pixel_mask": _pixel_mask,
    "bbox": lambda request: integers([[[10, 20, 30, 40]]]).repeat(1, request.made["input_ids"].shape[1], 1),
    "decoder_input_ids": lambda request: make_token_ids(request, text_length(request)),
    "decoder_attention_mask": _decoder_attention_mask,
}
