"""Build models of diffusers and transformers without weights, and their inputs by the names of parameters."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fvflops.sources.imports import describe_missing, describe_unknown_model, import_library
from fvflops.sources.transformers.configurations import check_harmless


def find_class(name: str) -> type[nn.Module]:
    """Return a model class of diffusers; an unknown name, or another class, raises ValueError."""
    diffusers = import_library("diffusers")
    if name not in diffusers._import_structure["models"]:
        raise ValueError(describe_unknown_model("diffusers", name, list_classes()))
    return _check_class(getattr(diffusers, name), f"diffusers:{name}")


def list_classes() -> list[str]:
    """Return the names of diffusers' model classes."""
    names = import_library("diffusers")._import_structure["models"]
    suffixes = ("Model", "UNet", "VAE")
    models = [name for name in names if name.endswith(suffixes) or name.startswith("Autoencoder")]
    return [name for name in models if name != "AutoModel" and "Multi" not in name]


def build_model(model_class: type[nn.Module], settings: Mapping[str, Any], name: str) -> nn.Module:
    """Return a model of diffusers or transformers; settings that it refuses raise ValueError, which calls it `name`."""
    constructor: Any = model_class
    try:
        if hasattr(constructor, "config_class"):  # of transformers
            model: nn.Module = constructor(constructor.config_class.from_dict(check_harmless(settings, name)))
        else:
            model = constructor.from_config(dict(settings))
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name} cannot be built from this configuration: {type(error).__name__}: {reason}") from error
    return model


def build_component(library: str, class_name: str, settings: Mapping[str, Any], name: str) -> nn.Module:
    """Return a pipeline's component, of the class and library that model_index.json names for it."""
    if library == "diffusers":
        return build_model(find_class(class_name), settings, name)
    if library == "transformers":
        module = import_library("transformers")
    else:  # of a pipeline, such as stable_diffusion
        try:
            module = importlib.import_module(f"diffusers.pipelines.{library}")
        except ModuleNotFoundError as error:
            raise ValueError(f"{name}: diffusers has no pipeline library {library!r}") from error
    if not hasattr(module, class_name):
        raise ValueError(f"{name}: {describe_missing(library, class_name, dir(module))}")
    return build_model(_check_class(getattr(module, class_name), name), settings, name)


def _check_class(model_class: Any, name: str) -> type[nn.Module]:
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        raise ValueError(f"{name} is {model_class!r:.60}, not a model: name a class such as UNet2DConditionModel")
    return model_class


# Parameters that only models have whose latents are a sequence of tokens, each of 2 x 2 of the latent image.
_PACKED = ("img_ids", "img_shapes")
# The same, with a token for each pixel of the latent video.
_UNPATCHED = ("LTXVideoTransformer3DModel",)
# Video models whose latents are (batch, frames, channels, height, width); others have channels before frames.
_FRAMES_FIRST = ("UNetSpatioTemporalConditionModel", "CogVideoXTransformer3DModel")
# Settings with the width of a denoiser's text embeddings, the first that a configuration has.
_TEXT_WIDTHS = (
    *("encoder_hid_dim", "caption_channels", "joint_attention_dim", "text_embed_dim", "text_dim", "cap_feat_dim"),
    "cross_attention_dim",
)
_CONTROL_SCALE = 8  # pixels of a ControlNet's image for each of the latent


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model's inputs: `frames`, `height`, `width` of latents or an autoencoder's images, `text` tokens."""

    batch: int
    frames: int
    height: int
    width: int
    text: int

    @property
    def image(self) -> tuple[int, int]:
        return self.height, self.width


def find_inputs(model: nn.Module, sizes: Sizes) -> dict[str, Any]:
    """Return the keyword arguments of a model's forward, on torch's default device.

    A model with a required parameter of unknown meaning raises ValueError.
    """
    inputs: dict[str, Any] = {}
    unknown: list[str] = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        make = _MAKERS.get(name)
        value = None if make is None else make(model, sizes)
        if value is not None:
            inputs[name] = value
        elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            unknown.append(name)
    if unknown:
        remedy = f"pass all of its inputs, such as --input {unknown[0]}=1,16"
        raise ValueError(f"diffusers:{type(model).__name__} has no default input {', '.join(unknown)}: {remedy}")
    return inputs


def find_sides(config: Mapping[str, Any], default: int) -> tuple[int, int]:
    """Return the height and width of a configuration's samples."""
    sample = config.get("sample_size") or default
    height, width = (sample, sample) if isinstance(sample, int) else sample
    return config.get("sample_height") or height, config.get("sample_width") or width


def check_sides(image: tuple[int, int], unit: int) -> None:
    """Raise ValueError for the height or width of an image that is not a multiple of a latent's side in pixels."""
    for name, size in zip(("height", "width"), image, strict=True):
        if size % unit:
            raise ValueError(f"a {name} of {size} pixels is not a multiple of {unit}, one latent: choose another")


def reads_text(inputs: Mapping[str, Any]) -> bool:
    """Return whether one of a model's inputs has the length of the text."""
    return any(name in inputs for name in ("encoder_hidden_states", "encoder_attention_mask", "txt_ids"))


def is_video(model: nn.Module) -> bool:
    """Return whether a denoiser's latents have frames."""
    name = type(model).__name__
    return name in _FRAMES_FIRST or "3D" in name or "Motion" in name


def _setting(model: nn.Module, *names: str) -> Any:
    config: Any = model.config
    return next((config[name] for name in names if config.get(name) is not None), None)


def _latents(model: nn.Module, sizes: Sizes) -> torch.Tensor | None:
    name, channels = type(model).__name__, _setting(model, "in_channels")
    if channels is None:
        return None
    if _token_side(model):
        return torch.zeros(sizes.batch, _count_tokens(model, sizes), channels)
    if name in _FRAMES_FIRST:
        return torch.zeros(sizes.batch, sizes.frames, channels, *sizes.image)
    return torch.zeros(sizes.batch, channels, *((sizes.frames,) if is_video(model) else ()), *sizes.image)


def _sample(model: nn.Module, sizes: Sizes) -> torch.Tensor | None:
    name = type(model).__name__
    if name == TEMPORAL_DECODER:
        return torch.zeros(sizes.batch * sizes.frames, _setting(model, "in_channels"), *sizes.image)
    if not name.startswith("Autoencoder") or name in IMAGE_AUTOENCODERS:
        return _latents(model, sizes)
    channels = _setting(model, "in_channels") or 3
    return torch.zeros(sizes.batch, channels, sizes.frames, *sizes.image)


def _token_side(model: nn.Module) -> int:
    """Return the side of a token in pixels of the latent image, 0 where the latents are an image or a video."""
    if type(model).__name__ in _UNPATCHED:
        return 1
    return 2 if set(_PACKED) & set(inspect.signature(model.forward).parameters) else 0


def make_ones(*shape: int) -> torch.Tensor:
    """Return ids or a mask: with values, as the control flow of models reads them, also for a model on meta."""
    device = torch.get_default_device()
    return torch.ones(shape, dtype=torch.int64, device="cpu" if device.type == "meta" else device)


def _count_tokens(model: nn.Module, sizes: Sizes) -> int:
    side = _token_side(model)
    return sizes.frames * (sizes.height // side) * (sizes.width // side)


def _text(model: nn.Module, sizes: Sizes) -> torch.Tensor | None:
    width = _setting(model, *_TEXT_WIDTHS)
    width = width[0] if isinstance(width, (list, tuple)) else width  # one for each block, which see the same text
    # A motion model has the text once for each frame.
    batch = sizes.batch * (sizes.frames if type(model).__name__ == "UNetMotionModel" else 1)
    return None if width is None else torch.zeros(batch, sizes.text, width)


def _text_mask(model: nn.Module, sizes: Sizes) -> torch.Tensor | None:
    parameter = inspect.signature(model.forward).parameters["encoder_attention_mask"]
    return make_ones(sizes.batch, sizes.text) if parameter.default is parameter.empty else None


def _class_labels(model: nn.Module, sizes: Sizes) -> torch.Tensor | None:
    if _setting(model, "class_embed_type") == "projection":
        return torch.zeros(sizes.batch, _setting(model, "projection_class_embeddings_input_dim"))
    is_conditional = _setting(model, "class_embed_type", "num_class_embeds") is not None
    if is_conditional or type(model).__name__ == "DiTTransformer2DModel":
        return make_ones(sizes.batch)
    return None


def _of_width(setting: str, model: nn.Module, sizes: Sizes) -> torch.Tensor | None:
    """Return an input whose width is a setting, None where the configuration has none."""
    width = _setting(model, setting)
    return None if width is None else torch.zeros(sizes.batch, width)


def _ids(model: nn.Module, tokens: int) -> torch.Tensor:
    return torch.zeros(tokens, len(_setting(model, "axes_dims_rope")))


def _added_conditions(model: nn.Module, sizes: Sizes) -> dict[str, Any] | None:
    """Return SDXL's pooled text and sizes, or PixArt's sizes."""
    if _setting(model, "addition_embed_type") == "text_time":
        width, time = (
            _setting(model, "projection_class_embeddings_input_dim"),
            _setting(model, "addition_time_embed_dim"),
        )
        return {"text_embeds": torch.zeros(sizes.batch, width - 6 * time), "time_ids": torch.ones(sizes.batch, 6)}
    if type(model).__name__ == "PixArtTransformer2DModel":
        conditions = {"resolution": torch.ones(sizes.batch, 2), "aspect_ratio": torch.ones(sizes.batch, 1)}
        uses = bool(model.use_additional_conditions)
        return conditions if uses else dict.fromkeys(conditions)
    return None


def _added_times(model: nn.Module, sizes: Sizes) -> torch.Tensor:
    count = _setting(model, "projection_class_embeddings_input_dim") // _setting(model, "addition_time_embed_dim")
    return torch.ones(sizes.batch, count)


def _image_shapes(model: nn.Module, sizes: Sizes) -> list[list[tuple[int, int, int]]]:
    side = _token_side(model)
    return [[(sizes.frames, sizes.height // side, sizes.width // side)]] * sizes.batch


def _rotary(model: nn.Module, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return CogVideoX's cosines and sines, one of each for every token of the video."""
    if not _setting(model, "use_rotary_positional_embeddings"):
        return None
    side, frames = _setting(model, "patch_size"), sizes.frames // (_setting(model, "patch_size_t") or 1)
    shape = frames * (sizes.height // side) * (sizes.width // side), _setting(model, "attention_head_dim")
    return torch.zeros(shape), torch.zeros(shape)


def _control_image(model: nn.Module, sizes: Sizes) -> torch.Tensor | None:
    channels = _setting(model, "conditioning_channels")
    if channels is None:
        return _latents(model, sizes)
    return torch.zeros(sizes.batch, channels, sizes.height * _CONTROL_SCALE, sizes.width * _CONTROL_SCALE)


# The autoencoder whose frames are a batch of images.
TEMPORAL_DECODER = "AutoencoderKLTemporalDecoder"
# Autoencoders of images; the latents of other ones have frames too.
IMAGE_AUTOENCODERS = (
    *("AsymmetricAutoencoderKL", "AutoencoderDC", "AutoencoderKL", "AutoencoderKLFlux2", "AutoencoderTiny"),
    "ConsistencyDecoderVAE",
)

_MAKERS: Mapping[str, Callable[[nn.Module, Sizes], Any]] = {
    "sample": _sample,
    "hidden_states": _latents,
    "timestep": lambda model, sizes: torch.ones(sizes.batch),
    "encoder_hidden_states": _text,
    "encoder_attention_mask": _text_mask,
    "class_labels": _class_labels,
    "timestep_cond": partial(_of_width, "time_cond_proj_dim"),
    "added_cond_kwargs": _added_conditions,
    "added_time_ids": _added_times,
    "pooled_projections": partial(_of_width, "pooled_projection_dim"),
    "guidance": lambda model, sizes: torch.ones(sizes.batch) if _setting(model, "guidance_embeds") else None,
    "img_ids": lambda model, sizes: _ids(model, _count_tokens(model, sizes)),
    "txt_ids": lambda model, sizes: _ids(model, sizes.text),
    "img_shapes": _image_shapes,
    "image_rotary_emb": _rotary,
    "controlnet_cond": _control_image,
    **dict.fromkeys(("original_size", "target_size", "crop_coords"), lambda model, sizes: torch.ones(sizes.batch, 2)),
    "num_frames": lambda model, sizes: sizes.frames,
    "height": lambda model, sizes: sizes.height,
    "width": lambda model, sizes: sizes.width,
}
