"""torchvision's models for real execution: random weights, and small images where the model takes them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import nn

from fvflops.sources.load import load_model
from sweeping.torchvision_kernels import define_torchvision_kernels
from sweeping.weights import quick_weights

define_torchvision_kernels()  # detection models run them in real execution

ways = ("quick", "random")
_QUICK_SIDE = 128  # of an image for a model that takes any, RAFT's smallest


def build(name: str, way: str) -> tuple[Any, Any]:
    """Return a model without weights, its backbone's included, and its inputs."""
    with quick_weights() if way == "quick" else nullcontext():
        loaded = load_model(f"torchvision:{name}")
    return loaded.model, _make_smaller(loaded.model, loaded.inputs) if way == "quick" else loaded.inputs


def _make_smaller(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return smaller images for a model that takes them; a detection model resizes its own, to a side that is set."""
    transform: Any = getattr(model, "transform", None)
    if isinstance(inputs[0], list):
        if max(transform.min_size) > _QUICK_SIDE:
            transform.min_size = (_QUICK_SIDE,)
        return inputs
    has_size = hasattr(model, "image_size") or type(model).__name__ in ("MaxVit", "MViT")
    return inputs if has_size else tuple(images[..., :_QUICK_SIDE, :_QUICK_SIDE].contiguous() for images in inputs)
