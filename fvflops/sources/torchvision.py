"""Models of torchvision: `torchvision:NAME`, on inputs of the size for which weights are published."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fvflops.capture.model.input_specs import InputSpec
from fvflops.sources.call_arguments import call_library, parse_arguments
from fvflops.sources.imports import describe_unknown_model, import_library
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions

_DETECTION_SIDE = 800  # the shorter side to which a detection model resizes its images
_FRAMES = 16  # of a clip, unless a model needs more
_FLOW_SIZE = (368, 768)  # of both images: a crop of Sintel, in which RAFT's published weights were tuned


def list_names() -> Sequence[str]:
    return list(import_library("torchvision").models.list_models())


def build(name: str, options: SourceOptions) -> BuiltModel:
    """Return a model without pretrained weights; `options.args` are arguments of its builder."""
    models = import_library("torchvision").models
    if name not in models.list_models():
        raise ValueError(describe_unknown_model("torchvision", name, models.list_models()))
    # With the default weights_backbone a detection model would download its backbone's weights.
    kind = models.get_model_builder(name).__module__.split(".")[2]
    fixed = {"weights": None, **({"weights_backbone": None} if kind in ("detection", "segmentation") else {})}
    sized = {} if options.image_size is None else _set_image_size(name, options.image_size)
    given, build_model = parse_arguments(options.args), partial(models.get_model, name)
    model = call_library(build_model, given, f"torchvision:{name}", fixed=fixed, image_size=sized)
    if kind == "detection":  # a list of images, which may have different sizes
        return BuiltModel(model, inputs=([torch.rand(3, _DETECTION_SIDE, _DETECTION_SIDE)],))
    return BuiltModel(model, _find_inputs(kind, models.get_model_weights(name), model))


def _set_image_size(name: str, sides: tuple[int, int]) -> dict[str, Any]:
    """Return the argument that sets the image size of a model with positions for one size, {} for others."""
    if name.startswith("maxvit"):
        return {"input_size": sides}
    if not name.startswith("vit_"):
        return {}
    if sides[0] != sides[1]:
        problem = f"torchvision:{name} accepts square images only"
        raise ValueError(f"--image-size {sides[0]}x{sides[1]}: {problem}: pass one N")
    return {"image_size": sides[0]}


def _find_inputs(kind: str, weights: Any, model: nn.Module) -> tuple[InputSpec, ...]:
    """Return the input shapes of a model's pretrained weights, () where torchvision has none."""
    if kind == "optical_flow":
        return (InputSpec(None, (1, 3, *_FLOW_SIZE)),) * 2
    if not len(weights):
        return ()
    preset = weights.DEFAULT.transforms()
    size = getattr(preset, "crop_size", None) or getattr(preset, "resize_size", None)
    if hasattr(model, "image_size"):  # vit_h_14's default weights are for larger images than the model
        size = (model.image_size,)
    if size is None:
        return ()
    sides = tuple(size) * 2 if len(size) == 1 else tuple(size)
    frames = max(_FRAMES, weights.DEFAULT.meta.get("min_temporal_size", 0)) if kind == "video" else None
    return (InputSpec(None, (1, 3, *((frames,) if frames else ()), *sides[-2:])),)
