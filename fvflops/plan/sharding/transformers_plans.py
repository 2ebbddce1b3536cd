"""Tensor and expert parallelism of transformers' models, by the code of transformers itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from importlib import import_module
from typing import Any

import torch
from torch import nn

from fvflops.torch_internals import disable_dispatch_modes


def matches(name: str, pattern: str) -> bool:
    """Return whether a dotted name matches a pattern, part by part.

    >>> matches("layers.3.mlp", "layers.*.mlp"), matches("layers.3.mlp.down_proj", "layers.*.mlp")
    (True, False)
    """
    parts, pattern_parts = name.split("."), pattern.split(".")
    return len(parts) == len(pattern_parts) and all(map(fnmatch, parts, pattern_parts))


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
    return dict(_expand(model, plan))


def _expand(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Identity):
            continue
        style = _style_of(name, plan)
        for key, _ in module.named_parameters(recurse=False):
            path = f"{name}.{key}"
            own = _style_of(path, plan) or style
            if own is not None:
                yield path, own
        if style is not None:
            yield name, style


def _style_of(name: str, plan: Mapping[str, str]) -> str | None:
    return next((style for pattern, style in plan.items() if matches(name, pattern)), None)


def shard_tensors(model: nn.Module, mesh: Any, plan: Mapping[str, str]) -> None:
    """Split a model, in place, over the mesh of tp by transformers' own code and an expanded plan."""
    import_module("transformers.distributed.tensor_parallel").apply_tensor_parallelism(model, mesh, dict(plan))


def divide_experts(model: nn.Module, expert_mesh: Any, batch_mesh: Any, plan: Mapping[str, str]) -> None:
    """Divide a model's experts, in place, over the mesh of ep by transformers' own code and an expanded plan.

    The ranks of `batch_mesh` have the same tokens.
    """
    module = import_module("transformers.distributed.expert_parallel")
    module.apply_expert_parallelism(model, expert_mesh, batch_mesh, dict(plan), ep_implementation="all_to_all")


@contextmanager
def knowing_counts(received: Callable[[], torch.Tensor]) -> Iterator[None]:
    """Let transformers' dispatch take the numbers of tokens that this rank's experts get as received.

    The collective runs on a tensor of the same size, so that the one with the numbers keeps them.
    """
    module: Any = import_module("transformers.distributed.expert_parallel")
    exchange = module.all_to_all_single

    def replace(output: torch.Tensor, input: torch.Tensor, **options: Any) -> Any:
        with disable_dispatch_modes():
            unused = torch.empty_like(output)
        exchange(unused, input, **options)
        with disable_dispatch_modes():
            output.copy_(received())

    module.all_to_all_single = replace
    try:
        yield
    finally:
        module.all_to_all_single = exchange
