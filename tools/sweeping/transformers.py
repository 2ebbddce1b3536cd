"""transformers' models: the base model of every configuration class, else the first model with a head."""

from __future__ import annotations

import reprlib
from contextlib import nullcontext
from typing import Any

import torch

from fvflops.sources.transformers.configurations import make_config, own_config, shrink
from fvflops.sources.transformers.input_request import TEXT
from fvflops.sources.transformers.inputs import make_inputs
from sweeping.case import Case
from sweeping.weights import quick_weights

_SMALL = 4 << 30  # bytes of weights that a shrunken model may have
ways = ("meta", "random", "small")
real_ways = ("tiny", "quick")
_TINY_TEXT = 32  # tokens


def version() -> str:
    """Return the version of transformers."""
    return _auto().__version__


def list_names() -> list[str]:
    """Return the model types: those with a base model first, then those that have only models with heads."""
    based = list(_auto().models.auto.modeling_auto.MODEL_MAPPING_NAMES)
    return based + sorted(_heads().keys() - set(based))


def build(name: str, way: str) -> Case:
    """Return a model of the default configuration, or of a shrunken one, with inputs made for its forward."""
    config, adjusted = make_config(name)
    model_class = _find_class(name, config)
    config = own_config(model_class, config)
    if way == "small":
        adjusted |= shrink(config)
        if _weigh(model_class, config) > _SMALL:
            adjusted |= shrink(config, more=True)
    if way == "tiny":
        adjusted |= shrink(config, more=True, eyes=True)
    with quick_weights() if way in real_ways else nullcontext(), torch.device("meta" if way == "meta" else "cpu"):
        model = model_class._from_config(config).eval()
    text = _TINY_TEXT if way == "tiny" else TEXT
    changes = ", ".join(f"{key}={reprlib.repr(value)}" for key, value in adjusted.items())
    return Case(model, lambda: make_inputs(name, model, text), f"{model_class.__name__}({changes})")


def _weigh(model_class: Any, config: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.nbytes for parameter in model_class._from_config(config).parameters())


def _find_class(name: str, config: Any) -> Any:
    auto = _auto().models.auto.modeling_auto
    mapping = auto.MODEL_MAPPING if name in auto.MODEL_MAPPING_NAMES else getattr(auto, _heads()[name])
    found = mapping[type(config)]
    return found[0] if isinstance(found, (list, tuple)) else found


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
