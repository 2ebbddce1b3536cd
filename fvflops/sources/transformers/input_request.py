"""What a transformers model asks for: its forward's arguments, its configuration, and the tensors made of both."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fvflops.sources.transformers.configurations import read_vocabulary, walk_configs

TEXT = 128  # tokens
IMAGE = 224  # the sides of an image where the configuration names none
DETECTION = 640  # the same for a model that takes a mask of the image's pixels, as detectors do
FRAMES = 16
SOUND = 3000  # frames of a spectrogram: 30 seconds
SAMPLES = 16_000  # of sound: one second


@dataclass(slots=True)
class Asked:
    """What is known of a model while its inputs are made: `made` are those that there are already.

    A text has `text` tokens, unless the model takes fewer.
    """

    name: str
    model: nn.Module
    config: Any
    accepted: Mapping[str, inspect.Parameter]
    text: int = TEXT
    made: dict[str, Any] = field(default_factory=dict)

    def wants(self, *names: str) -> bool:
        """Return whether the forward takes one of these arguments."""
        return any(name in self.accepted for name in names)

    def needs(self, name: str) -> bool:
        """Return whether the forward takes this argument and has no default for it."""
        parameter = self.accepted.get(name)
        return parameter is not None and parameter.default is parameter.empty

    def read(self, *names: str, part: str = "", default: Any = None) -> Any:
        """Return the first setting of these names, looked for in the named part of the configuration first."""
        parts = list(walk_configs(self.config))
        first = [item for item in parts if part and part in type(item).__name__.lower()]
        for item in (*first, *parts):
            for name in names:
                value = getattr(item, name, None)
                if value is not None:
                    return value
        return default


def floats(asked: Asked, *shape: int) -> torch.Tensor:
    """Return a tensor of the model's dtype on the model's device."""
    home = next(asked.model.parameters())
    dtype = home.dtype if home.dtype.is_floating_point else torch.float32
    return torch.rand(*shape, device=home.device, dtype=dtype)


def ones(*shape: int) -> torch.Tensor:
    """Return a mask that masks nothing."""
    return torch.ones(*shape, dtype=torch.int64, device="cpu")


def integers(values: Any) -> torch.Tensor:
    """Return a tensor of integers with the given values."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def image_sides(asked: Asked) -> tuple[int, int]:
    """Return the height and width of an image that the model is made for."""
    size = asked.read("image_size", "img_size", part="vision")
    if asked.wants("pixel_mask") and size is None:
        size = DETECTION
    if size is None:
        size = IMAGE
    if isinstance(size, Mapping):
        size = (size["height"], size["width"])
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))


def image_channels(asked: Asked) -> int:
    """Return the number of an image's channels."""
    for name, layer in asked.model.named_modules():
        if isinstance(layer, nn.Conv2d) and layer.in_channels <= 4 and "audio" not in name:
            return layer.in_channels
    channels: int = asked.read("num_channels", "in_channels", "in_chans", part="vision", default=3)
    return channels


def text_length(asked: Asked) -> int:
    """Return how many tokens a text has."""
    limit = asked.read("max_position_embeddings", "n_positions", "max_source_positions", part="text")
    return min(asked.text, limit) if isinstance(limit, int) and limit > 0 else asked.text


def make_words(asked: Asked, length: int) -> torch.Tensor:
    """Return token ids that are spread over the vocabulary and are no special tokens."""
    vocabulary = read_vocabulary(asked.config) or 100
    special = {
        value
        for part in walk_configs(asked.config)
        for key, value in part.__dict__.items()
        if "token" in key and isinstance(value, int)
    }
    step = max(1, vocabulary // (2 * length))
    words = [word for word in range(min(3, vocabulary - 1), vocabulary, step) if word not in special]
    return torch.tensor([(words * length)[:length]], device="cpu")


# The names under which configurations keep the bins of a spectrogram.
BINS = (
    "input_feat_size",
    "num_mel_bins",
    "input_feat_per_channel",
    "feature_projection_input_dim",
    "n_mel_bins",
    "input_dim",
    "input_size",
    "feature_size",
)
