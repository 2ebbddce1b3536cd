"""Inputs of transformers models to which the rules in `transformers_inputs` do not apply, by model type."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fvflops.formulas.language.expression import Expression
from fvflops.sources.transformers.configurations import PLACEHOLDERS, read_tables
from fvflops.sources.transformers.input_request import (
    BINS,
    IMAGE,
    SPECTROGRAM,
    InputRequest,
    floats,
    image_channels,
    image_sides,
    integers,
    make_token_ids,
    ones,
    patch_grid,
)


def make_special_inputs(request: InputRequest) -> dict[str, Any]:
    """Return the inputs that a function below or model_inputs.yaml has for a model type; {} where neither has any."""
    model_type = request.model_type
    if model_type in FUNCTIONS:
        return FUNCTIONS[model_type](request)
    entry = next((item for item in read_tables()["special"] if model_type in item["models"]), None)
    if entry is None:
        return {}
    sizes = _Sizes(request, entry)
    return {
        name.removesuffix("?"): _make(value, sizes)
        for name, value in entry["inputs"].items()
        if not name.endswith("?") or request.accepts(name.removesuffix("?"))
    }


class _Sizes(dict[str, Any]):
    """Name of a size → its value, read from the request when an expression needs it."""

    def __init__(self, request: InputRequest, entry: Mapping[str, Any]) -> None:
        super().__init__()
        self.request, self._entry = request, entry

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> Any:
        self[name] = value = self._read(name)
        return value

    def _read(self, name: str) -> Any:
        if name in ("rows", "columns"):
            patch, square = (self.evaluate(part) for part in self._entry["grid"])
            return patch_grid(self.request, patch, math.isqrt(square))[name == "columns"]
        if name in self._entry.get("settings", {}):
            part, *names = self._entry["settings"][name]
            default = names.pop() if isinstance(names[-1], int) else None
            return self.request.setting(*names, part=part, default=default)
        value = _SIZES[name](self.request) if name in _SIZES else self.request.setting(name)
        return tuple(value) if isinstance(value, list) else value

    def evaluate(self, size: int | str) -> int:
        """Return a size, or the value of its expression."""
        return size if isinstance(size, int) else Expression.parse(size).evaluate(self)


_SIZES: Mapping[str, Callable[[InputRequest], Any]] = {
    "tokens": InputRequest.tokens,
    "channels": image_channels,
    "height": lambda request: image_sides(request)[0],
    "width": lambda request: image_sides(request)[1],
    "chosen": lambda request: request.chosen_image() is not None,
    "patch": lambda request: request.setting("patch_size", part="vision"),
    "bins": lambda request: request.setting(*BINS, part="audio", default=80),
}


def _make(value: Any, sizes: _Sizes) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value[0], str):
        return _KINDS[value[0]](sizes.request, *map(sizes.evaluate, value[1:]))
    is_nested = isinstance(value[0], list)
    rows = [[sizes.evaluate(size) for size in row] for row in (value if is_nested else [value])]
    return integers(rows if is_nested else rows[0])


_KINDS: Mapping[str, Callable[..., torch.Tensor]] = {
    "floats": floats,
    "ones": lambda request, *shape: ones(*shape),
    "zeros": lambda request, *shape: torch.zeros_like(ones(*shape)),
    "true": lambda request, *shape: ones(*shape).bool(),
    "false": lambda request, *shape: ~ones(*shape).bool(),
    "tokens": lambda request, rows, length: make_token_ids(request, length).repeat(rows, 1),
}


def make_fixed_inputs(request: InputRequest) -> dict[str, Any]:
    """Return the inputs of a model type whose shape is fixed, and None for those that are omitted."""
    tables = read_tables()
    fixed = tables["fixed"].get(request.model_type, {})
    made: dict[str, Any] = {name: floats(request, *shape) for name, shape in fixed.items()}
    return made | dict.fromkeys(tables["omitted"].get(request.model_type, ()))


def codebooks_as_rows(request: InputRequest) -> dict[str, Any]:
    """Codes of audio, a row for each codebook (MusicGen), for the decoder of a model that also reads text."""
    if request.accepts("decoder_input_ids"):
        codes = ones(request.setting("num_codebooks"), 32)
        return {"decoder_input_ids": codes, "decoder_attention_mask": ones(1, 32)}
    codes = ones(request.setting("num_codebooks"), request.codes())
    return {"input_ids": codes, "attention_mask": ones(1, codes.shape[1])}


def audio_placeholders(request: InputRequest) -> dict[str, Any]:
    """Text and 750 placeholders, for 30 seconds; the model computes features of audio only together with them."""
    text = make_token_ids(request, request.tokens())
    return {"input_ids": torch.cat([text, _placeholders(request, "audio", SPECTROGRAM // 4)], dim=1)}


def _placeholders(request: InputRequest, modality: str, count: int) -> torch.Tensor:
    return torch.full((1, count), request.setting(*PLACEHOLDERS[modality]), device="cpu")


def forecast_series(request: InputRequest) -> dict[str, Any]:
    """Past and future values of a time series with their features (Autoformer)."""
    config = request.config
    past = config.context_length + max(config.lags_sequence)
    features = config.num_time_features + config.num_dynamic_real_features
    future = config.prediction_length
    return {
        "past_values": floats(request, 1, past),
        "past_time_features": floats(request, 1, past, features),
        "past_observed_mask": floats(request, 1, past),
        "future_values": floats(request, 1, future),
        "future_time_features": floats(request, 1, future, features),
    }


def patches_with_positions(request: InputRequest) -> dict[str, Any]:
    """Flattened patches with the column and row of each (Gemma 4)."""
    patch = request.config.patch_size
    rows, columns = patch_grid(request, patch, 24)
    positions = [[[index % columns, index // columns] for index in range(rows * columns)]]
    return {
        "pixel_values": floats(request, 1, rows * columns, 3 * patch * patch),
        "pixel_position_ids": integers(positions),
    }


def latent_query_mask(request: InputRequest) -> dict[str, Any]:
    """The positions of the image's latent queries in the text (KOSMOS-2)."""
    mask = torch.zeros_like(ones(1, request.tokens()))
    mask[:, 1 : 1 + request.setting("latent_query_num")] = 1
    return {"image_embeds_position_mask": mask}


def pooled_patches(request: InputRequest) -> dict[str, Any]:
    """An image as one crop and the whole, 27 × 27 patches each, of which 2 × 2 are pooled into a token (Molmo)."""
    patches, tokens = 729, 196
    pooled = torch.arange(2 * tokens * 4, device="cpu").reshape(2 * tokens, 4) % (2 * patches)
    return {
        "pixel_values": floats(request, 2, patches, 588),
        "image_token_pooling": pooled,
        "image_grids": integers([[14, 14, 14, 14]]),
        "image_num_crops": integers([2]),
    }


def video_session(request: InputRequest) -> dict[str, Any]:
    """A session of one frame, with a point on one object (SAM 2)."""
    module = inspect.getmodule(type(request.model))
    session_class = next(item for name, item in vars(module).items() if name.endswith("VideoInferenceSession"))
    side = image_sides(request)[0]
    frames = floats(request, 1, 3, side, side)
    session = session_class(
        video=frames,
        video_height=side,
        video_width=side,
        dtype=frames.dtype,
        inference_device=frames.device,
        inference_state_device=frames.device,
        video_storage_device=frames.device,
    )
    index = session.obj_id_to_idx(1)
    points = {"point_coords": torch.full((1, 1, 1, 2), side / 2, device="cpu"), "point_labels": ones(1, 1, 1)}
    session.add_point_inputs(index, 0, points)
    session.obj_with_new_inputs = [1]
    return {"inference_session": session, "frame_idx": 0}


def image_to_image(request: InputRequest) -> dict[str, Any]:
    """One image, with its grid and that of the image to generate (GLM-Image)."""
    patch = request.setting("patch_size", part="vision")
    rows, columns = patch_grid(request, patch, IMAGE // patch)
    placeholders = _placeholders(request, "image", rows * columns)
    return {
        "pixel_values": floats(request, rows * columns, 3 * patch * patch),
        "image_grid_thw": integers([[1, rows, columns]] * 2),
        "images_per_sample": integers([2]),
        "input_ids": torch.cat([make_token_ids(request, request.tokens()), placeholders], dim=1),
    }


def image_and_actions(request: InputRequest) -> dict[str, Any]:
    """An image, an instruction and 51 actions (π0)."""
    token = request.config.vlm_config.image_token_id
    text = make_token_ids(request, 64)
    return {
        "action_embeds": floats(request, 1, 51, request.config.dit_config.hidden_size),
        "pixel_values": floats(request, 1, 1, image_channels(request), *image_sides(request)),
        "pixel_attention_mask": ones(1, 1).bool(),
        "input_ids": torch.cat([torch.full((1, 256), token, device="cpu"), text], dim=1),
    }


# Model type → what makes its inputs, where these are more than shapes.
FUNCTIONS: Mapping[str, Callable[[InputRequest], dict[str, Any]]] = {
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), forecast_series),
    **dict.fromkeys(("sam2_video", "sam3_tracker_video", "edgetam_video"), video_session),
    **dict.fromkeys(("musicflamingo", "qwen2_audio"), audio_placeholders),
    **dict.fromkeys(("musicgen", "musicgen_decoder", "musicgen_melody", "musicgen_melody_decoder"), codebooks_as_rows),
    "kosmos-2": latent_query_mask,
    "gemma4_vision": patches_with_positions,
    "molmo2": pooled_patches,
    "glm_image": image_to_image,
    "pi0": image_and_actions,
}
