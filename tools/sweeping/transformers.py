"""transformers' models: the base model of every model type, else the first with a head; and for real execution."""

from __future__ import annotations

from typing import Any

from fvflops.sources.transformers.configurations import make_config, own_config
from fvflops.sources.transformers.input_request import TEXT
from fvflops.sources.transformers.shrink_config import shrink
from fvflops.sources.transformers.transformers_inputs import make_inputs
from sweeping.weights import quick_weights

_SMALL = 4 << 30  # bytes of weights that a shrunken model may have
ways = ("tiny", "quick")
_TINY_TEXT = 32  # tokens


def list_classes() -> list[str]:
    """Return the base model's class of each model type, then the first with a head of those without a base model."""
    auto = _auto().models.auto.modeling_auto
    mappings = [auto.MODEL_MAPPING_NAMES, *(getattr(auto, f"{name}_NAMES") for name in sorted(set(_heads().values())))]
    found: dict[str, str] = {}
    for mapping in mappings:
        for model_type, names in mapping.items():
            found.setdefault(model_type, names if isinstance(names, str) else names[0])
    return list(dict.fromkeys(found.values()))


def build(name: str, way: str) -> tuple[Any, Any]:
    """Return a model of the default configuration, or of a smaller one, with inputs made for its forward."""
    model_class: Any = getattr(_auto(), name)
    model_type = model_class.config_class.model_type
    config, _ = make_config(model_type)
    config = own_config(model_class, config)
    if way == "tiny":
        shrink(config, widths=True, encoders=True)
    with quick_weights():
        model = model_class._from_config(config)
    return model, make_inputs(model_type, model, text=_TINY_TEXT if way == "tiny" else TEXT)


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
