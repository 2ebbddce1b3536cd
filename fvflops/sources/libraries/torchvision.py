"""Models of torchvision: `torchvision:NAME`, on inputs of the size for which weights are published."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fvflops.sources.call_arguments import call_library, parse_arguments
from fvflops.sources.imports import describe_unknown_model, import_library
from fvflops.sources.input_specs import InputSpec
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions


def list_names() -> Sequence[str]:
    """Return the names of all models."""
    names: list[str] = import_library("torchvision").models.list_models()
    return names


def build(name: str, options: SourceOptions) -> BuiltModel:
    """Return a model without pretrained weights; `options.args` are arguments of its builder."""
    models = import_library("torchvision").models
    if name not in models.list_models():
        raise ValueError(describe_unknown_model("torchvision", name, models.list_models()))
    # With the default weights_backbone a detection model would download its backbone's weights.
    needs_backbone = "detection" in models.get_model_builder(name).__module__ or "segmentation" in (
        models.get_model_builder(name).__module__
    )
    fixed = {"weights": None, **({"weights_backbone": None} if needs_backbone else {})}
    build_model = partial(models.get_model, name)
    model = call_library(build_model, parse_arguments(options.args), f"torchvision:{name}", fixed=fixed)
    return BuiltModel(model, _find_inputs(models.get_model_weights(name)))


def _find_inputs(weights: Any) -> tuple[InputSpec, ...]:
    """Return the input shapes of a model's pretrained weights, () where torchvision has none."""
    if not len(weights):
        return ()
    preset = weights.DEFAULT.transforms()
    size = getattr(preset, "crop_size", None) or getattr(preset, "resize_size", None)
    if size is None:
        return ()
    sides = tuple(size) * 2 if len(size) == 1 else tuple(size)
    frames = weights.DEFAULT.meta.get("min_temporal_size")
    return (InputSpec(None, (1, 3, *((frames,) if frames else ()), *sides[-2:])),)
