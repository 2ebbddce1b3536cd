"""The libraries whose models are swept: their names, and how they are built for real execution.

A library's ways to build are tried in turn: "quick" is random weights made quickly, and smaller inputs where the model
takes them, "random" random weights, and "tiny" a smaller configuration. Workers import this file first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from fvflops.sources.load import load_model, load_source
from fvflops.sources.transformers.configurations import make_config, own_config
from fvflops.sources.transformers.input_request import TEXT
from fvflops.sources.transformers.shrink_config import shrink
from fvflops.sources.transformers.transformers_inputs import make_inputs
from tests.support.models.quick_weights import quick_weights
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

_QUICK_SIDE = 128  # of an image for a model that takes any, RAFT's smallest
_TINY_TEXT = 32  # tokens

define_torchvision_schemas()
# A configuration that names a model to be fetched must fail, not wait for a network.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")


def list_names(library: str) -> list[str]:
    """Return the MODEL arguments of all models of a library; of transformers, of the first class of each model type."""
    names = _list_classes() if library == "transformers" else load_source(library).list_names()
    return [f"{library}:{name}" for name in names]


def make_factory(name: str, way: str) -> Callable[[], Any]:
    """Return the factory of a model and its inputs for real execution in a worker."""
    library, _, model = name.partition(":")
    return partial(_BUILDERS[library], model, way)


def _build_timm(name: str, way: str) -> tuple[Any, Any]:
    # It imports torchvision, which imports only once its schemas are defined.
    import timm

    with quick_weights() if way == "quick" else nullcontext():
        model: Any = timm.create_model(name, pretrained=False)
    size = model.pretrained_cfg["input_size"]
    if way == "quick" and not model.pretrained_cfg.get("fixed_input_size"):
        size = (size[0], *(min(side, _QUICK_SIDE) for side in size[1:]))
    return model, (torch.rand(1, *size),)


def _build_torchvision(name: str, way: str) -> tuple[Any, Any]:
    define_torchvision_kernels()  # detection models run them in real execution
    with quick_weights() if way == "quick" else nullcontext():
        loaded = load_model(f"torchvision:{name}")
    model: Any = loaded.model
    if way != "quick":
        return model, loaded.inputs
    if isinstance(loaded.inputs[0], list):  # a detection model resizes its images itself, to a side that is set
        if max(model.transform.min_size) > _QUICK_SIDE:
            model.transform.min_size = (_QUICK_SIDE,)
        return model, loaded.inputs
    if hasattr(model, "image_size") or type(model).__name__ in ("MaxVit", "MViT"):
        return model, loaded.inputs
    return model, tuple(images[..., :_QUICK_SIDE, :_QUICK_SIDE].contiguous() for images in loaded.inputs)


def _build_transformers(name: str, way: str) -> tuple[Any, Any]:
    model_class: Any = getattr(_auto(), name)
    model_type = model_class.config_class.model_type
    config, _ = make_config(model_type)
    config = own_config(model_class, config)
    if way == "tiny":
        shrink(config, widths=True, encoders=True)
    with quick_weights():
        model = model_class._from_config(config)
    return model, make_inputs(model_type, model, text=_TINY_TEXT if way == "tiny" else TEXT)


_BUILDERS = {"timm": _build_timm, "torchvision": _build_torchvision, "transformers": _build_transformers}
# Library → its ways to build a model, in the order in which they are tried.
LIBRARIES = {"timm": ("quick", "random"), "torchvision": ("quick", "random"), "transformers": ("tiny", "quick")}


def _list_classes() -> list[str]:
    """Return the base model's class of each model type, then the first with a head of those without a base model."""
    auto = _auto().models.auto.modeling_auto
    mappings = [auto.MODEL_MAPPING_NAMES, *(getattr(auto, f"{name}_NAMES") for name in sorted(set(_heads().values())))]
    found: dict[str, str] = {}
    for mapping in mappings:
        for model_type, names in mapping.items():
            found.setdefault(model_type, names if isinstance(names, str) else names[0])
    return list(dict.fromkeys(found.values()))


def _heads() -> dict[str, str]:
    """Return model type → a mapping that has a model with a head for it, a backbone only if there is nothing else."""
    auto = _auto().models.auto.modeling_auto
    mappings = [name for name in dir(auto) if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES")]
    found: dict[str, str] = {}
    for name in sorted(mappings, key=lambda item: ("BACKBONE" in item, item)):
        for model_type in getattr(auto, name):
            found.setdefault(model_type, name.removesuffix("_NAMES"))
    return found


def _auto() -> Any:
    import transformers.models.auto.modeling_auto  # its mappings are attributes of a lazy module

    return transformers


_ROIS_AT_ONCE = 64  # the Python roi_align holds every sample of every bin

_libraries: list[torch.library.Library] = []


def define_torchvision_kernels() -> None:
    """Define both on the CPU, once, unless torchvision's own are there."""
    import torchvision

    if _libraries or torchvision.extension._has_ops():
        return
    library = torch.library.Library("torchvision", "IMPL", "CPU")
    library.impl("nms", suppress)
    library.impl("roi_align", align)
    _libraries.append(library)
    # torchvision asks this before it calls an operator; `torchvision.ops.roi_align` is the function, not the module.
    torchvision.extension._has_ops = lambda: True
    sys.modules["torchvision.ops.roi_align"]._has_ops = lambda: True  # type: ignore[attr-defined]


def suppress(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Return the indices of the boxes that are kept, best first: none overlaps a better one by more than the threshold.

    >>> suppress(torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 1.9], [5, 5, 6, 6]]), torch.tensor([0.5, 0.9, 0.1]), 0.5)
    tensor([1, 2])
    """
    order = scores.sort(descending=True, stable=True).indices
    boxes = boxes[order]
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    alive = torch.ones(len(boxes), dtype=torch.bool)
    kept = []
    for index in range(len(boxes)):
        if not alive[index]:
            continue
        kept.append(index)
        corner = torch.maximum(boxes[index, :2], boxes[index + 1 :, :2])
        opposite = torch.minimum(boxes[index, 2:], boxes[index + 1 :, 2:])
        shared = (opposite - corner).clamp(min=0).prod(dim=1)
        alive[index + 1 :] &= shared <= iou_threshold * (areas[index] + areas[index + 1 :] - shared)
    return order[torch.tensor(kept, dtype=torch.int64)]


def align(features: torch.Tensor, rois: torch.Tensor, *options: Any) -> torch.Tensor:
    """Return torchvision's own Python version of roi_align, without the compiler that it asks for."""
    plain = sys.modules["torchvision.ops.roi_align"]._roi_align.__wrapped__
    parts = [plain(features, part, *options) for part in rois.split(_ROIS_AT_ONCE)]
    return torch.cat(parts)
