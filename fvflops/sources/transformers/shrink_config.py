"""Shrink a configuration to fewer layers and experts, for models that must run and do not fit into memory."""

from __future__ import annotations

import importlib
import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fvflops.sources.options import SourceOptions
from fvflops.sources.transformers.configurations import (
    fix_special_tokens,
    make_config,
    own_config,
    read_tables,
    walk_configs,
)


def shrink(config: Any, *, widths: bool = False, encoders: bool = False) -> dict[str, Any]:
    """Lower the numbers of layers and experts of a configuration in place, and return setting → value of the changed.

    Widths stay, so that weights have the shapes of the full model; `widths` lowers vocabularies and the inner
    widths of feed-forward layers too. Vision and audio encoders stay as they are unless `encoders` is set: they are
    small, and other settings refer to their layers by number.
    """
    changed: dict[str, Any] = {}
    for part in walk_configs(config):
        if not encoders and any(word in type(part).__name__ for word in ("Vision", "Audio", "Backbone")):
            continue
        changed |= _shrink_part(part)
        if widths:
            changed |= _lower(part, read_tables()["shrinking"]["widths"])
    return {**changed, **fix_special_tokens(config)}


def _lower(config: Any, limits: Mapping[str, int]) -> dict[str, Any]:
    counts = {name: config.__dict__.get(name) for name in limits}
    changed = {name: limits[name] for name, count in counts.items() if isinstance(count, int) and count > limits[name]}
    for name, value in changed.items():
        setattr(config, name, value)
    return changed


def _shrink_part(config: Any) -> dict[str, Any]:
    tables = read_tables()["shrinking"]
    changed = _lower(config, tables["limits"])
    depths = {name: config.__dict__.get(name) for name in tables["depths"]}
    depths = {name: depth for name, depth in depths.items() if isinstance(depth, int) and depth > 2}
    for name, depth in depths.items():
        kept = changed[name] = min(depth, _count_layers(config, depth))
        for key, value in list(config.__dict__.items()):
            if isinstance(value, (list, tuple)) and len(value) == depth and not key.startswith("_"):
                setattr(config, key, value[:kept])
        setattr(config, name, kept)
    return changed


def _count_layers(config: Any, depth: int) -> int:
    """Return how many of the first layers contain each kind of layer, at least 2."""
    tables, settings = read_tables()["shrinking"], config.__dict__
    lists = [settings[name] for name in tables["kinds"] if isinstance(settings.get(name), (list, tuple))]
    needed = [1 + max(map(kinds.index, kinds)) for kinds in lists if len(kinds) == depth]
    periods = [settings[name] for name in tables["periods"] if isinstance(settings.get(name), int)]
    return int(max([2, *needed, *periods]))


_PREFIX = "transformers:"
_MAX_WEIGHTS = 4 << 30  # bytes; beyond, inner widths are lowered too


class ShrunkenModel(NamedTuple):
    """The options with which the same class is built smaller, and their changes, as in `num_hidden_layers=2`."""

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
    with torch.device("meta"):
        weights = sum(parameter.nbytes for parameter in model_class._from_config(config).parameters())
    if weights > _MAX_WEIGHTS:
        changed |= shrink(config, widths=True)
    changes = ", ".join(f"{key}={reprlib.repr(value)}" for key, value in changed.items())
    return ShrunkenModel(replace(options, config=config.to_json_string()), changes) if changes else None
