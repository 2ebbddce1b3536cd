"""Count training steps with their optimizers on CUDA: by shapes beside recorded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fvflops import TrainingStepAnalysis, record
from tests.support.cuda_cases.runs import Run, attempt, describe, move

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "AdamW amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
}
WAYS: dict[str, dict[str, Any]] = {
    "by default": {},
    "foreach": {"foreach": True},
    "one by one": {"foreach": False},
    "fused": {"fused": True},
}
_FUSED = ("SGD", "Adam", "AdamW", "AdamW amsgrad", "Adagrad")


def _net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)).train()


def count_steps(share: int, shares: int) -> dict[str, Any]:
    """Return "optimizer, way" → way of counting → run."""
    found: dict[str, Any] = {}
    cases = [(name, way) for name in OPTIMIZERS for way in WAYS if way != "fused" or name in _FUSED]
    for name, way in cases[share::shares]:
        make = partial(OPTIMIZERS[name], **WAYS[way])
        found[f"{name}, {way}"] = _count(make)
    return found


def _count(make: Callable[..., Any]) -> dict[str, Run]:
    torch.manual_seed(0)
    model, x = _net(), torch.randn(4, 3, 8, 8)

    def by_shapes(model: nn.Module, x: torch.Tensor, device: str | None = None) -> Run:
        return describe(TrainingStepAnalysis(model, x, loss=torch.sum, optimizer=make, device=device).trace())

    if not torch.cuda.is_available():
        return {"without": attempt(lambda: by_shapes(model, x, "cuda"))}
    found = {"asked": attempt(lambda: by_shapes(model, x, "cuda"))}
    model, x = model.cuda(), move(x, "cuda")
    found["shapes"] = attempt(lambda: by_shapes(model, x))

    def real() -> Run:
        with record(model) as run:
            optimizer = make(model.parameters())
            model(x).sum().backward()
            optimizer.step()
        return describe(run.trace())

    found["real"] = attempt(real)
    return found
