"""Models of timm: `timm:NAME`, on one image of the size that the pretrained configuration names."""

from __future__ import annotations

from collections.abc import Sequence

from fvflops.sources.imports import describe_missing, import_module
from fvflops.sources.input_specs import InputSpec
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions


def list_names() -> Sequence[str]:
    """Return the names of all architectures."""
    names: list[str] = import_module("timm").list_models()
    return names


def build(name: str, _: SourceOptions) -> BuiltModel:
    """Return an architecture without pretrained weights."""
    timm = import_module("timm")
    if not timm.is_model(name):
        raise ValueError(describe_missing("timm", name, list_names()))
    model = timm.create_model(name, pretrained=False)
    return BuiltModel(model, (InputSpec(None, (1, *model.pretrained_cfg["input_size"])),))
