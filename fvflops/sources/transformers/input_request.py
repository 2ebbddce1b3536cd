"""Request for the inputs of a transformers model: accepted arguments, sizes, and functions that make tensors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fvflops.sources.input_sizes import POSITION_NAMES, refuse_length
from fvflops.sources.transformers.configurations import vocabulary_size, walk_configs

TEXT = 128  # tokens
IMAGE = 224  # height and width of an image where the configuration has none
DETECTION = 640  # the same for a model that accepts a pixel mask, as detectors do
FRAMES = 16  # of a video
SPECTROGRAM = 3000  # frames of a spectrogram: 30 seconds
SAMPLES = 16_000  # of audio: one second
_POSITION_SETTINGS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_source_positions")
_RESERVED_POSITIONS = 4  # rows before the first position, such as the 2 of OPT and BART


@dataclass(slots=True)
class InputRequest:
    """A model whose inputs are being made: `made` so far; `accepted` are its forward's parameters.

    `seq` (tokens) and `image_size` (height, width) are the user's choices, or None; `used` has the names of the choices
    that an input depends on. `text` is the number of tokens otherwise, or fewer where the model has fewer positions.
    `preprocessor` are the settings of the checkpoint's image processor or feature extractor.
    """

    model_type: str
    model: nn.Module
    config: Any
    accepted: Mapping[str, inspect.Parameter]
    text: int = TEXT
    seq: int | None = None
    image_size: tuple[int, int] | None = None
    preprocessor: Mapping[str, Any] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def accepts(self, *names: str) -> bool:
        """Return whether the forward accepts one of these arguments."""
        return any(name in self.accepted for name in names)

    def requires(self, name: str) -> bool:
        """Return whether the forward accepts this argument and has no default for it."""
        parameter = self.accepted.get(name)
        return parameter is not None and parameter.default is parameter.empty

    def setting(self, *names: str, part: str = "", default: Any = None) -> Any:
        """Return the first setting of these names that is not None, from sub-configurations of a `part` first.

        A part is a word in the name of a configuration's class, or the name of a sub-configuration.
        """
        configs = list(walk_configs(self.config))
        preferred = [config for config in configs if part and part in type(config).__name__.lower()]
        ordered = (self.config.__dict__.get(part), *preferred, *configs)
        values = (getattr(config, name, None) for config in ordered for name in names)
        return next((value for value in values if value is not None), default)

    def tokens(self) -> int:
        """Return the number of tokens of text, whatever the number of positions."""
        self.used.add("seq")
        return self.text if self.seq is None else self.seq

    def codes(self) -> int:
        """Return the number of steps of a decoder that reads codes instead of text."""
        self.used.add("seq")
        return 32 if self.seq is None else self.seq

    def chosen_image(self) -> tuple[int, int] | None:
        """Return the height and width that the user chose, or None."""
        self.used.add("image_size")
        return self.image_size


def floats(request: InputRequest, *shape: int) -> torch.Tensor:
    """Return a tensor of the model's dtype on the model's device."""
    weight = next(request.model.parameters())
    dtype = weight.dtype if weight.dtype.is_floating_point else torch.float32
    return torch.rand(*shape, device=weight.device, dtype=dtype)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.int64, device="cpu")


def integers(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def image_sides(request: InputRequest) -> tuple[int, int]:
    """Return an image's height and width: chosen, or else in the preprocessor or the configuration."""
    chosen = request.chosen_image()
    if chosen is not None:
        return chosen
    size = request.preprocessor.get("image_size") or request.setting("image_size", "img_size", part="vision")
    if size is None:
        size = DETECTION if request.accepts("pixel_mask") else IMAGE
    if isinstance(size, Mapping):
        size = (size["height"], size["width"])
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))


def patch_grid(request: InputRequest, patch: int, default: int) -> tuple[int, int]:
    """Return the rows and columns of the patches that the chosen image is cut into, or `default` of each."""
    chosen = request.chosen_image()
    return (default, default) if chosen is None else (max(1, chosen[0] // patch), max(1, chosen[1] // patch))


def image_channels(request: InputRequest) -> int:
    """Return the number of an image's channels."""
    for name, layer in request.model.named_modules():
        if isinstance(layer, nn.Conv2d) and layer.in_channels <= 4 and "audio" not in name:
            return layer.in_channels
    channels: int = request.setting("num_channels", "in_channels", "in_chans", part="vision", default=3)
    return channels


def text_length(request: InputRequest) -> int:
    """Return the number of tokens of text, by default not more than the model has positions.

    Chosen tokens beyond `max_position_embeddings` raise ValueError where positions are learned or stored; rotary and
    relative positions are computed for any number.
    """
    limit = request.setting(*_POSITION_SETTINGS, part="text")
    tokens = request.tokens()
    if not isinstance(limit, int) or limit <= 0 or tokens <= limit:
        return tokens
    if request.seq is None:
        return limit
    table = _find_positions(request.model, limit)
    if table:
        refuse_length(tokens, request.model, table, limit)
    return tokens


def _find_positions(model: nn.Module, limit: int) -> str:
    """Return the name of the weight or buffer with a row for each of `limit` positions, or ""."""
    sinusoids = [module for module in model.modules() if hasattr(module, "make_weights")]  # more are made when needed
    extended = {id(tensor) for module in sinusoids for tensor in (*module.parameters(), *module.buffers())}
    tensors: list[tuple[str, torch.Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        is_table = tensor.ndim in (2, 3) and 0 <= tensor.shape[-2] - limit <= _RESERVED_POSITIONS
        if is_table and id(tensor) not in extended and any(part in name for part in POSITION_NAMES):
            return name
    return ""


def make_token_ids(request: InputRequest, length: int) -> torch.Tensor:
    """Return token ids that are spread over the vocabulary, without special tokens."""
    vocabulary = vocabulary_size(request.config) or 100
    settings = (item for config in walk_configs(request.config) for item in config.__dict__.items())
    special = {value for key, value in settings if "token" in key and isinstance(value, int)}
    step = max(1, vocabulary // (2 * length))
    ids = [token for token in range(min(3, vocabulary - 1), vocabulary, step) if token not in special]
    return torch.tensor([(ids * length)[:length]], device="cpu")


# The names of a spectrogram's number of bins in configurations.
BINS = (
    *("input_feat_size", "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "n_mel_bins"),
    *("input_dim", "input_size", "feature_size", "num_chroma"),
)
