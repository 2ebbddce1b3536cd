"""The calls of fvflops that are timed; no other file of the benchmark knows its interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fvflops import FlopCountAnalysis, load_table, record
from fvflops.capture.run import record_call
from fvflops.capture.shapes.shape_cache import clear_cache
from fvflops.counting import TableCostModel
from fvflops.sources.meta import build_on_meta

__all__ = [
    "build_on_meta",
    "clear_cache",
    "count",
    "count_macs",
    "count_quietly",
    "count_really",
    "record_training",
]

Loss = Callable[[Any], torch.Tensor]


def count(model: nn.Module, value: torch.Tensor, loss: Loss | None = None) -> int:
    """Return the flops of a forward run, or with a loss of forward and backward, from nothing to the number."""
    return _analyse(model, value, loss).total()


def count_quietly(model: nn.Module, value: torch.Tensor) -> int:
    """Return the flops of a forward run, as a search over architectures counts them: without warnings."""
    return FlopCountAnalysis(model, value, warn=False).total()


def count_macs(model: nn.Module, value: torch.Tensor) -> int:
    """Return the multiply-adds alone of a forward run."""
    return sum(entry.macs for entry in _analyse(model, value, None).counts().entries)


def count_really(model: nn.Module, value: torch.Tensor) -> int:
    """Return the flops of a forward run that computes its numbers."""
    return FlopCountAnalysis(model, value, execution="real").total()


def record_training(model: nn.Module, step: Callable[[], None]) -> int:
    """Make a training step and return its flops in all phases."""
    with record(model) as run:
        step()
    return run.total()


def _analyse(model: nn.Module, value: torch.Tensor, loss: Loss | None) -> FlopCountAnalysis:
    if loss is None:
        return FlopCountAnalysis(model, value)
    stops_at = TableCostModel(load_table("default"), "flops").stops_at
    trace = record_call(model, (value,), {}, stops_at=stops_at, execution="shapes", loss=loss)
    return FlopCountAnalysis.from_trace(trace)
