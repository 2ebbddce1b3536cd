"""Count the models of the tests on CUDA in every way: forward and a backward pass, in float32 and bfloat16."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.cuda_cases.runs import attempt, run_all_ways
from tests.support.models.whole_models import MODELS, build_case

VARIANTS = ("forward", "training", "forward bf16")


def count_models(share: int, shares: int) -> dict[str, Any]:
    """Return "model, variant" → way → run, of every `shares`-th model from the `share`-th on."""
    found: dict[str, Any] = {}
    for name in list(MODELS)[share::shares]:
        for variant in VARIANTS:
            found[f"{name}, {variant}"] = attempt(lambda name=name, variant=variant: _count(name, variant))  # type: ignore[misc]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


def _count(name: str, variant: str) -> dict[str, Any]:
    model, args = build_case(name)
    train = variant == "training"
    if train:
        model.train()
        # Batch normalisation wants more than one value a channel.
        args = tuple(torch.cat([item, item]) if len(item) == 1 else item for item in args)
    if "bf16" in variant:
        model.bfloat16()
        args = tuple(item.bfloat16() if item.is_floating_point() else item for item in args)
    return run_all_ways(model, args, {}, train=train)
