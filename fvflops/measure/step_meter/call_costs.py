"""Cost of the calls of a step: each distinct one counted once in shape execution."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.analysis.training_step_analysis import TrainingStepAnalysis
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.devices.devices import Device, short_dtype
from fvflops.devices.utilisation import MODEL_PHASES, product_dtype
from fvflops.formulas import FormulaTable
from fvflops.measure.step_meter.metered_calls import ModelCall
from fvflops.measure.step_meter.step_figures import StepCost
from fvflops.plan.memory.predict_memory import predict_memory
from fvflops.trace import Counts, Entry

Warn = Callable[[str, str], None]  # called with a figure's name and the reason why it is unknown


class Peaks:
    """Least times of counts on one device; of work in a dtype without a peak they are NaN.

    `device` is None if its peaks are unknown.
    """

    def __init__(self, device: Device | None, float32_matmul: str | None, warn: Warn) -> None:
        self._device = device
        self._float32_matmul = float32_matmul
        self._warn = warn

    def cost_of(self, entries: Iterable[Entry]) -> StepCost:
        return sum((self._cost_of(entry) for entry in entries if entry.macs or entry.flops), StepCost())

    def _cost_of(self, entry: Entry) -> StepCost:
        flops, seconds = 2 * entry.macs + entry.flops, self._seconds(entry, entry.macs)
        if entry.phase not in MODEL_PHASES:
            return StepCost(hardware_flops=flops, hardware_seconds=seconds)
        macs = entry.macs - entry.recomputed
        model_seconds = self._seconds(entry, macs) if entry.recomputed else seconds
        return StepCost(macs, 2 * macs + entry.flops, flops, model_seconds, seconds)

    def _seconds(self, entry: Entry, macs: int) -> float:
        if self._device is None:
            return math.nan
        try:
            dtype = short_dtype(entry.dtype)
            product = product_dtype(entry.op, dtype, self._device, self._float32_matmul)
            parts = (2 * macs, product), (entry.flops, dtype)
            return sum(flops / self._device.peak(name) for flops, name in parts if flops)
        except ValueError as error:  # no peak for the dtype: the utilisation is unknown, the FLOPs are not
            self._warn("mfu", str(error))
            return math.nan


def count_call(call: ModelCall, table: FormulaTable) -> Counts:
    """Return the counts of a call that holds its inputs, with its backward pass, in shape execution.

    Outputs that had a gradient in the real call have one here. A call that cannot be counted without values raises an
    error of the analysis.
    """
    with _analysis_of(call, table=table) as analysis:
        return analysis.counts()


def predict_call_memory(call: ModelCall, optimizers: Iterable[torch.optim.Optimizer]) -> float:
    """Return the predicted peak of a call with its backward pass and the step of its optimizer, in bytes."""
    parameters = set(map(id, call.model.parameters()))
    stepped = ((item, {id(one) for group in item.param_groups for one in group["params"]}) for item in optimizers)
    own = next((item for item, ids in stepped if not ids.isdisjoint(parameters)), None)
    with _analysis_of(call, optimizer=own) as analysis:
        return predict_memory(analysis).peak


@contextmanager
def _analysis_of(
    call: ModelCall, *, table: str | FormulaTable = "default", optimizer: torch.optim.Optimizer | None = None
) -> Iterator[FlopCountAnalysis]:
    """Yield the analysis of a call under the call's modes."""
    assert call.modes is not None
    autocast = nullcontext() if call.autocast is None else torch.autocast(call.autocast[0], dtype=call.autocast[1])
    with autocast, quiet_log(), call.modes.applied():
        args, kwargs = call.arguments()
        if call.gradients:
            options: dict[str, Any] = {"table": table, "loss": partial(_join, call.gradients), "optimizer": optimizer}
            yield TrainingStepAnalysis(call.model, args, kwargs=kwargs, warn=False, **options)
        else:
            with torch.no_grad():
                yield FlopCountAnalysis(call.model, args, kwargs=kwargs, table=table, execution="shapes", warn=False)


def count_optimizer(optimizer: torch.optim.Optimizer, table: FormulaTable) -> Counts:
    """Return the counts of one step of an optimizer, all its trainable parameters having gradients."""
    with quiet_log():
        step = TrainingStepAnalysis(_Parameters(optimizer), (), optimizer=optimizer, table=table, warn=False)
        return step.counts()


class _Parameters(nn.Module):
    """The parameters of an optimizer as a model whose result has gradients with respect to each."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.parameters_of_groups = nn.ParameterList(
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
        )

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = _Join.apply(*self.parameters_of_groups)
        return loss


class _Join(torch.autograd.Function):
    """A scalar of several tensors whose gradients are empty tensors."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].new_empty((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


@contextmanager
def quiet_log() -> Iterator[None]:
    """Log no warnings of fvflops meanwhile: the log of a loop is the user's."""
    logger = logging.getLogger("fvflops")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _join(indexes: Set[int], result: Any) -> torch.Tensor:
    """Return a loss of no cost whose gradients reach some of the outputs."""
    loss: torch.Tensor = _Join.apply(*(tensor for index, tensor in enumerate(tensors_of(result)) if index in indexes))
    return loss
