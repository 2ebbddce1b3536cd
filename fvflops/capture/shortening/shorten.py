"""Shorten a model in place, and expand what is recorded with it to the full model."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from fvflops.capture.restore.interrupts import is_interrupt
from fvflops.capture.run import record_call
from fvflops.capture.shortening.layer_runs import find_layer_runs
from fvflops.garbage_collector import gc_paused
from fvflops.trace import StopsAt, Trace
from fvflops.trace.expansion.expand import Expansion, expand_layers
from fvflops.trace.expansion.layer_run import KEPT, LayerRun, UnequalLayersError, repeat_periods
from fvflops.trace.expansion.recorded_rows import are_equal_runs

T = TypeVar("T")
_LOGGER = logging.getLogger("fvflops")
_COMPOSITE = StopsAt(everything=True)  # fewer calls than with decomposed ops, and the model's code makes the same ones


@dataclass(frozen=True, slots=True)
class Shortened:
    """A model that has been shortened in place to a few layers of each of its runs of equal layers."""

    model: nn.Module = field(repr=False)
    runs: tuple[LayerRun, ...]
    _children: tuple[tuple[nn.Module, dict[str, nn.Module | None]], ...] = field(repr=False)
    _attributes: tuple[tuple[nn.Module, str, int], ...] = field(repr=False)

    def expand(self, trace: Trace, *, below: str = "") -> Expansion | None:
        """Return the Trace of the full model from one recorded with the shortened model.

        `below` is the name of the model in the recorded one, if that contains it. The result is None where equal layers
        did not run equally, so that the full model must be recorded: call `restore`.
        """
        expansion = Expansion.unchanged(trace)
        try:
            with gc_paused():
                for run in reversed(self.runs):
                    path = ".".join(filter(None, (below, run.path)))
                    expansion = expansion.then(expand_layers(expansion.trace, replace(run, path=path)))
        except UnequalLayersError as error:
            _LOGGER.debug("the full model is recorded: %s", error)
            return None
        return expansion

    def repeat(self, named: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
        """Return what belongs to the full model's names from (name, item) pairs of the shortened model, in order.

        For parameters in the order of `named_parameters` these are those of the full model, in its order.
        """
        items = list(named)
        for run in reversed(self.runs):
            items = list(repeat_periods(items, run))
        return items

    def restore(self) -> None:
        """Restore the layers that the model lacks."""
        for module, children in self._children:
            module._modules = children
        for module, name, value in self._attributes:
            module.__dict__[name] = value


def shorten(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    marked: Collection[nn.Module] = (),
    device: str | torch.device | None = None,
    assume: Mapping[str, Any] | None = None,
) -> Shortened | None:
    """Shorten a model in place: of equal successive layers it keeps the first two and the last two.

    Layers are equal if they have equal classes, tensors (but for values), attributes and hooks, but for attributes that
    count them, which count the remaining ones. Layers that share modules or tensors with others, or of which others
    of their submodules are `marked` (such as those that activation checkpointing reruns), are not equal. So that a
    model's code cannot treat layers unequally, its forward pass on `args` and `kwargs` is recorded with all layers
    (without autograd; `device` and `assume` are those of `record_call`) and must be that of the shortened model,
    expanded.

    None, with the model unchanged, if nothing can be left out.

    >>> layers = [nn.Linear(4, 4) for _ in range(9)]
    >>> model = nn.Sequential(*layers)
    >>> shortened = shorten(model, (torch.ones(1, 4),))
    >>> expansion = shortened.expand(record_call(model, (torch.ones(1, 4),)))
    >>> len(model), model[3] is layers[8], len(expansion.trace.modules.by_name)
    (4, True, 10)
    """
    runs = find_layer_runs(model, {id(module) for module in marked})
    if not runs:
        return None
    record = partial(
        record_call,
        *(model, args, dict(kwargs or {})),
        stops_at=_COMPOSITE,
        execution="shapes",
        device=device,
        assume=assume,
        quiet=True,
    )
    try:
        full = record()
    except Exception as error:  # the caller runs the model too, and shows its error
        if is_interrupt(error):
            raise
        return None
    shortened = _shorten(model, runs)
    is_equal = False
    try:
        expansion = shortened.expand(record())
        is_equal = expansion is not None and are_equal_runs(expansion.trace, full)
    except Exception as error:
        if is_interrupt(error):
            raise
        _LOGGER.debug("the full model is recorded: it does not run with fewer layers (%s)", error)
    finally:
        if not is_equal:
            shortened.restore()
    return shortened if is_equal else None


def _shorten(model: nn.Module, runs: Iterable[LayerRun]) -> Shortened:
    """Remove the middle layers of each run."""
    saved: dict[str, tuple[nn.Module, dict[str, nn.Module | None]]] = {}
    attributes: list[tuple[nn.Module, str, int]] = []
    runs = tuple(runs)
    for run in runs:
        layers = model.get_submodule(run.path)
        saved.setdefault(run.path, (layers, layers._modules))
        members = list(layers._modules.values())
        begin, removed = run.start + run.period * (KEPT // 2), run.period * run.added
        for member in members[begin + removed : begin + removed + run.period * (KEPT - KEPT // 2)]:
            for path, name in run.index_attributes:
                module = member.get_submodule(path) if member is not None else None
                if module is not None:
                    attributes.append((module, name, module.__dict__[name]))
                    module.__dict__[name] -= removed
        kept = [*members[:begin], *members[begin + removed :]]
        layers._modules = {str(index): member for index, member in enumerate(kept)}
    return Shortened(model, runs, tuple(saved.values()), tuple(attributes[::-1]))
