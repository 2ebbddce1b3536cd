"""Count models, kernels of CUDA and training steps in real execution, and in shape execution in every way."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fvflops import TrainingStepAnalysis, record
from tests.support.cuda_cases import list_cases
from tests.support.cuda_cases.case import Case
from tests.support.cuda_cases.runs import Run, attempt, describe, move, run_all_ways
from tests.support.models.whole_models import MODELS, build_case

VARIANTS = ("forward", "training", "forward bf16")


def count_models(share: int, shares: int) -> dict[str, Any]:
    """Return "model, variant" → way → run, of every `shares`-th model from the `share`-th on."""
    found: dict[str, Any] = {}
    for name in list(MODELS)[share::shares]:
        for variant in VARIANTS:
            found[f"{name}, {variant}"] = attempt(lambda name=name, variant=variant: _count_model(name, variant))  # type: ignore[misc]
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found


def _count_model(name: str, variant: str) -> dict[str, Any]:
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


def count_kernels(share: int, shares: int) -> dict[str, Any]:
    """Return "family: case, variant" → way → run."""
    found: dict[str, Any] = {}
    for name, make in list(list_cases())[share::shares]:
        torch.manual_seed(0)
        for train in (False, True):
            case = attempt(make)
            if isinstance(case, dict):
                found[name] = case
                break
            if train in case.train:
                variant = f"{name}, {'training' if train else 'forward'}"
                found[variant] = attempt(lambda case=case, train=train: _count_case(case, train))  # type: ignore[misc]
    return found


def _count_case(case: Case, train: bool) -> dict[str, Any]:
    with case.context():
        return run_all_ways(case.model, case.args, {}, train=train)


def write_recorded(found: Mapping[str, Any], path: Path) -> None:
    """Write the results of the cases on the device, for tests on machines without one."""
    runs = {name: ways["real"] for name, ways in found.items() if "ops" in ways.get("real", ())}
    kept = {name: {key: run[key] for key in ("flops", "macs", "exact", "ops")} for name, run in runs.items()}
    path.write_bytes(gzip.compress(json.dumps(kept, sort_keys=True).encode(), mtime=0))


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


def _step_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)).train()


def count_steps(share: int, shares: int) -> dict[str, Any]:
    """Return "optimizer, way" → way of counting → run."""
    found: dict[str, Any] = {}
    cases = [(name, way) for name in OPTIMIZERS for way in WAYS if way != "fused" or name in _FUSED]
    for name, way in cases[share::shares]:
        make = partial(OPTIMIZERS[name], **WAYS[way])
        found[f"{name}, {way}"] = _count_step(make)
    return found


def _count_step(make: Callable[..., Any]) -> dict[str, Run]:
    torch.manual_seed(0)
    model, x = _step_net(), torch.randn(4, 3, 8, 8)

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
