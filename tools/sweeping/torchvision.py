"""torchvision's models: classification, quantization, detection, segmentation, video and optical flow."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from sweeping.case import Case
from sweeping.torchvision_kernels import define_torchvision_kernels
from sweeping.weights import quick_weights

ways = ("meta", "random")
real_ways = ("quick", "random")

_QUICK_SIDE = 128  # of an image for a model that takes any, RAFT's smallest

# The kinds whose inputs are not an image of the size that the weights' preset names.
_DETECTION_SIDE = 800  # the shorter side to which a detection model resizes its images
_FRAMES = 16  # a clip's length, unless a model asks for more
_FLOW_SIZE = (368, 768)  # of both images: a crop of Sintel, in which RAFT's published weights were tuned


def version() -> str:
    """Return the version of torchvision."""
    return _torchvision().__version__


def list_names() -> list[str]:
    """Return the names of all models."""
    return _torchvision().models.list_models()


def build(name: str, way: str) -> Case:
    """Return a model without weights, its backbone's included."""
    models = _torchvision().models
    builder = models.get_model_builder(name)
    kind = builder.__module__.split(".")[2]
    accepted = inspect.signature(builder).parameters
    options: dict[str, Any] = {"weights": None}
    if "weights_backbone" in accepted:
        options["weights_backbone"] = None
    device = torch.device("meta" if way == "meta" else "cpu")
    with quick_weights() if way == "quick" else nullcontext(), device:
        model = models.get_model(name, **options).eval()

    def make_inputs() -> tuple[Any, ...]:
        with device:
            inputs = _make_inputs(kind, models.get_model_weights(name), model)
            return _make_smaller(inputs, kind, model) if way == "quick" else inputs

    return Case(model, make_inputs, f"torchvision.models.get_model({name!r})")


def _make_inputs(kind: str, weights: Any, model: nn.Module) -> tuple[Any, ...]:
    if kind == "detection":
        # A list of images, each of a size of its own.
        return ([torch.rand(3, _DETECTION_SIDE, _DETECTION_SIDE)],)
    if kind == "optical_flow":
        return torch.rand(1, 3, *_FLOW_SIZE), torch.rand(1, 3, *_FLOW_SIZE)
    preset = weights.DEFAULT.transforms()
    sides = getattr(preset, "crop_size", None) or preset.resize_size
    # vit_h_14's default weights are for larger images than the model that is built without weights.
    sides = (model.image_size,) * 2 if hasattr(model, "image_size") else (sides[0], sides[-1])
    if kind == "video":
        return (torch.rand(1, 3, max(_FRAMES, weights.DEFAULT.meta.get("min_temporal_size", 0)), *sides),)
    return (torch.rand(1, 3, *sides),)


def _make_smaller(inputs: tuple[Any, ...], kind: str, model: nn.Module) -> tuple[Any, ...]:
    """Return smaller images for a model that takes them; a detection model resizes its own, to a side that is set."""
    if kind == "detection":
        transform: Any = model.transform
        if max(transform.min_size) > _QUICK_SIDE:
            transform.min_size = (_QUICK_SIDE,)
        return inputs
    has_size = hasattr(model, "image_size") or type(model).__name__ in ("MaxVit", "MViT")
    return inputs if has_size else tuple(images[..., :_QUICK_SIDE, :_QUICK_SIDE].contiguous() for images in inputs)


def _torchvision() -> Any:
    import torchvision

    define_torchvision_kernels()
    return torchvision
