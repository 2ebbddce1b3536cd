"""timm's models for real execution: random weights, and small images where the model takes them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from sweeping.weights import quick_weights

ways = ("quick", "random")
_QUICK_SIDE = 128  # of an image for models that take other sizes than that of their pretrained configuration


def build(name: str, way: str) -> tuple[Any, Any]:
    """Return an architecture without pretrained weights, and an image."""
    # It imports torchvision, which imports only once its schemas are defined.
    import timm

    with quick_weights() if way == "quick" else nullcontext():
        model: Any = timm.create_model(name, pretrained=False)
    size = model.pretrained_cfg["input_size"]
    if way == "quick" and not model.pretrained_cfg.get("fixed_input_size"):
        size = (size[0], *(min(side, _QUICK_SIDE) for side in size[1:]))
    return model, (torch.rand(1, *size),)
