"""Inputs for transformers' models: what a forward asks for, in the sizes that the configuration names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import nn

from fvflops.analysis import FlopCountAnalysis
from fvflops.sources.transformers.configurations import PLACEHOLDERS
from fvflops.sources.transformers.input_request import (
    BINS,
    FRAMES,
    IMAGE,
    SAMPLES,
    SOUND,
    TEXT,
    Asked,
    floats,
    image_channels,
    image_sides,
    make_words,
    ones,
    text_length,
)
from fvflops.sources.transformers.model_inputs import LEFT_OUT, OWN, SHAPES
from fvflops.trace import TensorSpec


def make_inputs(name: str, model: nn.Module, text: int = TEXT) -> dict[str, Any]:
    """Return argument name → value. Integers and masks are on the CPU; what is floating point is as the model."""
    parameters = inspect.signature(model.forward).parameters
    asked = Asked(name, model, model.config, parameters, text)
    if name in OWN:
        asked.made.update(OWN[name](asked))
    asked.made.update({argument: floats(asked, *shape) for argument, shape in SHAPES.get(name, {}).items()})
    asked.made.update(dict.fromkeys(LEFT_OUT.get(name, ())))
    for argument, make in ARGUMENTS.items():
        if argument in asked.accepted and argument not in asked.made:
            value = make(asked)
            if value is not None:
                asked.made[argument] = value
    return {key: value for key, value in asked.made.items() if key in asked.accepted and value is not None}


# --- images ---


def _pixel_values(asked: Asked) -> torch.Tensor | None:
    if getattr(asked.config, "vision_config", True) is None:
        return None  # the default configuration has no part that sees
    if asked.wants("image_grid_thw", "grid_thw"):
        return _patches(asked)
    height, width = image_sides(asked)
    frames = asked.read("num_frames", part="vision") if _is_video(asked) else None
    leading = (1, frames) if frames else (1,)
    return floats(asked, *leading, image_channels(asked), height, width)


def _is_video(asked: Asked) -> bool:
    modalities: Any = asked.model.input_modalities
    return "video" in modalities and "image" not in modalities


def _patches(asked: Asked) -> torch.Tensor:
    """Return the patches of one image in the order in which Qwen's processors cut them, and keep their grid."""
    patch = asked.read("patch_size", part="vision")
    time = asked.read("temporal_patch_size", "patch_temporal", part="vision", default=1)
    merge = asked.read("spatial_merge_size", "merge_size", part="vision", default=1)
    side = max(merge, IMAGE // patch // merge * merge)
    grid = torch.tensor([[1, side, side]], device="cpu")
    for name in ("grid_thw", "image_grid_thw"):
        asked.made[name] = grid
    return floats(asked, side * side, image_channels(asked) * time * patch * patch)


def _hidden_states(asked: Asked) -> torch.Tensor | None:
    return _patches(asked) if asked.wants("grid_thw") else None


def _pixel_values_videos(asked: Asked) -> torch.Tensor | None:
    if asked.wants("pixel_values") or "video_grid_thw" in asked.accepted:
        return None  # one image stands for what the model sees
    frames = asked.read("frames_per_clip", "num_frames", part="vision", default=FRAMES)
    height, width = image_sides(asked)
    return floats(asked, 1, frames, image_channels(asked), height, width)


# --- sound ---


def _input_features(asked: Asked) -> torch.Tensor | None:
    """Return a spectrogram: (1, bins, frames) for a model that begins with a Conv1d, else (1, frames, bins)."""
    if asked.wants("input_values") and not asked.needs("input_features"):
        return None
    if getattr(asked.config, "audio_config", True) is None:
        return None  # the default configuration has no part that hears
    first = _first_layer(asked.model)
    bins = asked.read(*BINS, part="audio", default=80)
    for name in ("input_features_mask", "feature_attention_mask"):
        if asked.wants(name):
            asked.made.setdefault(name, ones(1, SOUND))
    return floats(asked, 1, bins, SOUND) if isinstance(first, nn.Conv1d) else floats(asked, 1, SOUND, bins)


def _first_layer(model: nn.Module) -> nn.Module | None:
    """Return the first layer of the part that hears, by the order in which layers were made."""
    heard = [part for name, part in model.named_modules() if name.rpartition(".")[2] in _HEARING] or [model]
    kinds = (nn.Conv1d, nn.Conv2d, nn.Linear, nn.LayerNorm)
    return next((module for module in heard[0].modules() if isinstance(module, kinds)), None)


_HEARING = ("audio_tower", "audio_encoder", "audio_model", "speech_encoder", "audio", "encoder")


def _input_values(asked: Asked) -> torch.Tensor:
    """Return sound as samples: (1, samples), with an axis of channels for a codec."""
    channels = asked.read("audio_channels", part="audio")
    hop = asked.read("samples_per_token", "hop_length", part="audio", default=1)
    codec = channels is not None or asked.wants("n_quantizers", "num_quantizers", "bandwidth")
    samples = SAMPLES // hop * hop if isinstance(hop, int) else SAMPLES
    return floats(asked, 1, channels or 1, samples) if codec else floats(asked, 1, samples)


# --- text ---


def _input_ids(asked: Asked) -> torch.Tensor:
    length = text_length(asked)
    pieces = []
    kinds = []
    for index, (kind, names) in enumerate(PLACEHOLDERS.items(), start=1):
        token = asked.read(*names)
        count = count_placeholders(asked, kind) if token is not None else 0
        if count:
            pieces.append(torch.full((1, count), token, device="cpu"))
            kinds.append(torch.full((1, count), index, device="cpu"))
    words = make_words(asked, length)
    half = length // 2
    asked.made["mm_token_type_ids"] = torch.cat(
        [torch.zeros_like(words[:, :half]), *kinds, torch.zeros_like(words[:, half:])], dim=1
    )
    if not kinds:
        del asked.made["mm_token_type_ids"]
    return torch.cat([words[:, :half], *pieces, words[:, half:]], dim=1)


class _Probe(nn.Module):
    """A model that makes only its features of an image or a sound, and returns those."""

    def __init__(self, model: nn.Module, getter: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._getter = getter

    def forward(self, **given: Any) -> Any:
        features = self._getter(**given)
        pooled = getattr(features, "pooler_output", features)
        if pooled is None:
            pooled = getattr(features, "last_hidden_state", None)
        if pooled is None:  # Granite Vision gives (layer of the text model, features) for some layers
            pooled = features.deepstack_features[0][1]
        return pooled


def count_placeholders(asked: Asked, kind: str) -> int:
    """Return how many placeholders a processor would write: as many as the model makes features of the inputs."""
    name = f"get_{kind}_features"
    getter = next((getattr(part, name) for part in asked.model.modules() if hasattr(part, name)), None)
    if getter is None:
        return 0
    accepted = inspect.signature(getter).parameters
    given = {name: value for name, value in asked.made.items() if name in accepted}
    needed = [
        name for name, item in accepted.items() if item.default is item.empty and item.kind is not item.VAR_KEYWORD
    ]
    if not given or any(name not in given for name in needed):
        return 0
    trace = FlopCountAnalysis(_Probe(asked.model, getter), None, kwargs=given).trace()
    # What the model keeps meanwhile is restored, so the result is read from the trace.
    (features,) = [item.outputs for item in trace.region_signatures if not trace.regions[item.region].name]
    return sum(prod(item.shape[:-1]) for item in features if isinstance(item, TensorSpec))


def _decoder_input_ids(asked: Asked) -> torch.Tensor:
    return make_words(asked, text_length(asked))


def _attention_mask(asked: Asked) -> torch.Tensor | None:
    # A processor gives one. A model that is left to make its own makes some of floating point, whose values are asked.
    ids = asked.made.get("input_ids")
    return None if ids is None else ones(1, ids.shape[1])


def _decoder_attention_mask(asked: Asked) -> torch.Tensor | None:
    ids = asked.made.get("decoder_input_ids")
    return None if ids is None or "input_ids" not in asked.made else ones(1, ids.shape[-1])


def _pixel_mask(asked: Asked) -> torch.Tensor | None:
    image = asked.made.get("pixel_values")
    return None if image is None else ones(1, *image.shape[-2:])


def _bbox(asked: Asked) -> torch.Tensor:
    return torch.tensor([[[10, 20, 30, 40]]], device="cpu").repeat(1, asked.made["input_ids"].shape[1], 1)


# Argument → what makes it, or None for "not given"; an earlier one may make a later one too. Arguments that are not
# here are left to their defaults.
ARGUMENTS: dict[str, Callable[[Asked], Any]] = {
    "pixel_values": _pixel_values,
    "pixel_values_videos": _pixel_values_videos,
    "hidden_states": _hidden_states,
    "input_features": _input_features,
    "input_values": _input_values,
    "input_ids": _input_ids,
    "attention_mask": _attention_mask,
    "pixel_mask": _pixel_mask,
    "bbox": _bbox,
    "decoder_input_ids": _decoder_input_ids,
    "decoder_attention_mask": _decoder_attention_mask,
}
