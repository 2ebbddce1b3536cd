"""timm's models, each on one image of the size that its pretrained configuration names."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from sweeping.case import Case
from sweeping.weights import quick_weights

ways = ("meta", "random")
real_ways = ("quick", "random")
_QUICK_SIDE = 128  # of an image for models that take other sizes than that of their pretrained configuration


def version() -> str:
    """Return the version of timm."""
    return _timm().__version__


def list_names() -> list[str]:
    """Return the names of all architectures."""
    return _timm().list_models()


def build(name: str, way: str) -> Case:
    """Return an architecture without pretrained weights."""
    device = torch.device("meta" if way == "meta" else "cpu")
    with quick_weights() if way == "quick" else nullcontext(), device:
        model = _timm().create_model(name, pretrained=False).eval()
    size = model.pretrained_cfg["input_size"]
    if way == "quick" and not model.pretrained_cfg.get("fixed_input_size"):
        size = (size[0], *(min(side, _QUICK_SIDE) for side in size[1:]))
    return Case(model, lambda: (torch.rand(1, *size, device=device),), f"timm.create_model({name!r})")


def _timm() -> Any:
    # It imports torchvision, which imports only once its schemas are defined (the worker does that).
    import timm

    return timm
