"""Models of timm: `timm:NAME`, on one image of the size that the pretrained configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fvflops.capture.model.input_specs import InputSpec
from fvflops.sources.call_arguments import call_library, parse_arguments
from fvflops.sources.imports import describe_unknown_model, import_library
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions


def list_names() -> Sequence[str]:
    return list(import_library("timm").list_models())


def build(name: str, options: SourceOptions) -> BuiltModel:
    """Return an architecture without pretrained weights; `options.args` are arguments of `timm.create_model`."""
    timm = import_library("timm")
    if not timm.is_model(name):
        raise ValueError(describe_unknown_model("timm", name, list_names()))
    arguments = parse_arguments(options.args)
    fixed = {"pretrained": False, "checkpoint_path": ""}
    model = call_library(partial(timm.create_model, name), arguments, f"timm:{name}", fixed=fixed)
    channels, *sides = model.pretrained_cfg["input_size"]
    size = arguments.get("img_size", sides)
    sides = [size, size] if isinstance(size, int) else list(size)
    set_image_size(model, options)
    return BuiltModel(model, (InputSpec(None, (1, arguments.get("in_chans", channels), *sides)),))


def set_image_size(model: Any, options: SourceOptions) -> None:
    """Resize a model with position embeddings for one size to `options.image_size`."""
    if options.image_size is not None and hasattr(model, "set_input_size"):
        model.set_input_size(img_size=options.image_size)
