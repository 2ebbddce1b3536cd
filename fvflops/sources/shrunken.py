"""A smaller model in place of one that neither can be counted without weights nor fits into memory."""

from __future__ import annotations

import importlib
import reprlib
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fvflops.sources.options import SourceOptions
from fvflops.sources.transformers.configurations import make_config, own_config
from fvflops.sources.transformers.shrink_config import shrink

_PREFIX = "transformers:"
_MAX_WEIGHTS = 4 << 30  # bytes; beyond, inner widths are lowered too


class ShrunkenModel(NamedTuple):
    """The options with which the same class is built smaller, and what they change, as in `num_hidden_layers=2`."""

    options: SourceOptions
    changes: str


def shrink_model(name: str, options: SourceOptions) -> ShrunkenModel | None:
    """Return options of a model with fewer layers and experts, None for a name that has no default configuration.

    Only `transformers:CLASS` has one. The widths of layers stay, unless the model still has more than 4 GiB of weights.
    """
    if not name.startswith(_PREFIX) or options.config is not None or options.args:
        return None
    model_class: Any = getattr(importlib.import_module("transformers"), name.removeprefix(_PREFIX), None)
    config_class = getattr(model_class, "config_class", None)
    if config_class is None:
        return None
    config, _ = make_config(config_class.model_type)
    config = own_config(model_class, config)
    changed = shrink(config)
    if _weigh(model_class, config) > _MAX_WEIGHTS:
        changed |= shrink(config, widths=True)
    changes = ", ".join(f"{key}={reprlib.repr(value)}" for key, value in changed.items())
    return ShrunkenModel(replace(options, config=config.to_json_string()), changes) if changes else None


def _weigh(model_class: Any, config: Any) -> int:
    with torch.device("meta"):
        return sum(parameter.nbytes for parameter in model_class._from_config(config).parameters())
