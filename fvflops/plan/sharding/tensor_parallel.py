"""Tensor parallelism: how known models are split among the ranks of a group, by torch's or transformers' code."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib import import_module
from typing import Any, Literal

import torch
from torch import nn

from fvflops.plan.sharding.sharding_styles import (
    ShardingError,
    list_divisors,
    name_class,
    parallelism_of,
    styles_of_zoo,
)
from fvflops.text import suggest


@dataclass(frozen=True, slots=True)
class Sharding:
    """Patterns of module names with their sharding styles, as in transformers' tp_plan.

    `divided` are patterns of attributes with a number of heads, which is divided by the number of ranks. The styles are
    defined by `library`, fvflops or transformers.
    """

    styles: Mapping[str, str]
    divided: tuple[str, ...] = field(default=())
    library: Literal["fvflops", "transformers"] = "fvflops"


def find_sharding(model: nn.Module, *, sequence: bool = False) -> Sharding:
    """Return how a model is split: a zoo model by its `zoo_parallelism`, one of transformers by its `_tp_plan`.

    With `sequence` the sequence is sharded between the layers too. A model without a known plan raises ShardingError.

    >>> from fvflops.zoo import build
    >>> find_sharding(build("llama_tiny", device="meta")).styles["lm_head"]
    'colwise_gather_output'
    """
    known = parallelism_of(model)
    styles = None if known is None else known.sequence if sequence else known.tensor
    if known is not None and styles is not None:
        _check_patterns(model, styles, known.divided)
        return Sharding(styles, known.divided)
    tp_plan = None if sequence else getattr(model, "_tp_plan", None)
    if not tp_plan:
        kind = "sequence-parallel" if sequence else "tensor-parallel"
        raise ShardingError(
            f"no {kind} plan is known for {name_class(model)}: pass shard_by (--shard), a function of (model, mesh) "
            "that applies one, such as with torch.distributed.tensor.parallel.parallelize_module"
        )
    return Sharding(dict(tp_plan), library="transformers" if find_styles("tensor") else "fvflops")


def _check_patterns(model: nn.Module, styles: Iterable[str], divided: Iterable[str]) -> None:
    """Raise ShardingError for a pattern in `zoo_parallelism` that matches no module or attribute."""
    for pattern in styles:
        _find_modules(model, pattern)
    for path, _, attribute in (pattern.rpartition(".") for pattern in divided):
        for module in _find_modules(model, path).values():
            if not hasattr(module, attribute):
                raise ShardingError(
                    f"zoo_parallelism of {type(model).__name__}: {path} has no attribute {attribute!r}"
                    f"{suggest(attribute, vars(module))}"
                )


def _find_modules(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Return the modules that a pattern matches, {} where they are in other stages or in a list without layers."""
    modules, found = dict(model.named_modules()), matching_modules(model, pattern)
    parts = pattern.split(".")
    # Identities replace modules of other stages.
    emptied = (nn.Identity, nn.ModuleList)
    absent = [name for name, module in modules.items() if isinstance(module, emptied) and not any(module.children())]
    if not found and not any(matches(name, ".".join(parts[: name.count(".") + 1])) for name in absent):
        known = {re.sub(r"\b\d+\b", "*", name) for name in modules}
        raise ShardingError(
            f"zoo_parallelism of {type(model).__name__}: no module matches {pattern!r}{suggest(pattern, known)}"
        )
    return found


def shard(model: nn.Module, mesh: Any, sharding: Sharding) -> None:
    """Split a model in place over a one-dimensional DeviceMesh; tied parameters stay tied.

    An unknown style, and a number of heads that is not divisible by the mesh's size, raise ShardingError.
    """
    styles = find_styles("tensor") if sharding.library == "transformers" else styles_of_zoo()
    for pattern, style in sharding.styles.items():
        if style not in styles:
            raise ShardingError(
                f"the sharding style of {pattern} in {type(model).__name__} must be one of {', '.join(styles)}; got "
                f"{style!r}: pass shard_by (--shard), a function of (model, mesh) that splits the model"
            )
    ties = _find_ties(model)
    _check_heads(model, sharding, mesh.size())
    if sharding.library == "transformers":
        for _, *others in ties:  # transformers shards each before it ties them
            for module, key in others:
                module.register_parameter(key, nn.Parameter(torch.empty_like(getattr(module, key), device="meta")))
        apply = import_module("transformers.distributed.tensor_parallel").apply_tensor_parallelism
        apply(model, mesh, expand_plan(model, sharding.styles))
    else:
        for pattern, style in sharding.styles.items():
            for module in matching_modules(model, pattern).values():
                if not isinstance(module, nn.Identity):  # of another stage
                    styles[style](module, mesh)
    for path, _, attribute in (pattern.rpartition(".") for pattern in sharding.divided):
        for name, module in matching_modules(model, path).items():
            heads = getattr(module, attribute)
            if heads % mesh.size():
                raise ShardingError(
                    f"tp={mesh.size()} must divide the number of heads ({name}.{attribute} is {heads}): "
                    f"use tp={list_divisors(heads)}"
                )
            setattr(module, attribute, heads // mesh.size())
    for (first_module, first_key), *others in ties:
        for module, key in others:
            module._parameters[key] = first_module._parameters[first_key]


def _check_heads(model: nn.Module, sharding: Sharding, ranks: int) -> None:
    """Raise ShardingError where a column-wise split would cut an attention head."""
    heads = {}
    for pattern in (pattern for pattern, style in sharding.styles.items() if style == "colwise"):
        for name, module in matching_modules(model, pattern).items():
            if isinstance(module, nn.Linear):
                owner = model.get_submodule(name.rpartition(".")[0])
                # The name in the zoo, and in transformers.
                head_size = getattr(owner, "head_size", None) or getattr(owner, "head_dim", None)
                if isinstance(head_size, int) and not module.out_features % head_size:
                    heads[name] = module.out_features // head_size
    for name, count in heads.items():
        if count % ranks:
            attention = name.rpartition(".")[0]
            counts = {key.rpartition(".")[2]: heads[key] for key in heads if key.rpartition(".")[0] == attention}
            described = ", ".join(f"{key} {number}" for key, number in counts.items())
            raise ShardingError(
                f"tp={ranks} must divide the numbers of heads of {attention} ({described}): "
                f"use tp={list_divisors(math.gcd(*heads.values()))}"
            )


def _find_ties(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the modules of each tied parameter, with its name in each."""
    owners: dict[torch.Tensor, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append((module, key))
    return [modules for modules in owners.values() if len(modules) > 1]


def matches(name: str, pattern: str) -> bool:
    """Return whether a dotted name matches a pattern, part by part.

    >>> matches("layers.3.mlp", "layers.*.mlp"), matches("layers.3.mlp.down_proj", "layers.*.mlp")
    (True, False)
    """
    parts, pattern_parts = name.split("."), pattern.split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatch, parts, pattern_parts))


def matching_modules(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if matches(name, pattern)}


def find_styles(kind: str) -> Mapping[str, Any]:
    """Return name → style of transformers' `tensor` or `expert` parallelism, {} of a transformers without that code."""
    try:
        import_module(f"transformers.distributed.{kind}_parallel")
        return dict(import_module("transformers.distributed.parallel_utils").ALL_PARALLEL_STYLES.items())
    except ImportError:
        return {}


def expand_plan(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return name → style for the modules and parameters that a plan's patterns match.

    As in transformers, a module's parameters precede it and have its style unless the plan names them. Identities, the
    modules of other pipeline stages, are left out.
    """

    def style_of(name: str) -> str | None:
        return next((style for pattern, style in plan.items() if matches(name, pattern)), None)

    expanded: dict[str, str | None] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Identity):
            style = style_of(name)
            paths = [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
            expanded.update({path: style_of(path) or style for path in paths})
            expanded[name] = style
    return {path: style for path, style in expanded.items() if style is not None}
