"""Analysis of a training step in shape execution: forward, recompute, backward and optimizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fvflops.analysis.model_analysis import cost_estimator
from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.analysis.model_run import InputSize
from fvflops.capture.model_call import RunOptions
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.training_step import Checkpointed, OptimizerMaker, StepOptions, list_makers, record_step
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.text import Unpack, explaining_arguments, require_int, shown
from fvflops.trace import StopsAt, Trace

_LOGGER = logging.getLogger("fvflops")


class TrainingStepAnalysis(FlopCountAnalysis):
    """FLOPs of one training step in shape execution: nothing is computed, and weights may be on the meta device.

    `inputs` are for one micro-batch; the step has `micro_batches` of them, each a forward and a backward pass. `loss`
    is a function of the model's result that returns a scalar tensor; by default the attribute `loss` of the result
    (transformers' models with labels), or the result, if it is a scalar. `optimizer` is an optimizer, or a callable
    that creates one from parameters (`torch.optim.AdamW`, a partial, a function), or a list of these; by default there
    is no optimizer step. `checkpoint` selects the modules whose activations are recomputed in the backward pass, by
    names, by classes, or by a function of name and module; `checkpoint_options` are options of torch.utils.checkpoint
    (`use_reentrant` is False by default). The forward pass and the loss run in torch.autocast to the dtype `autocast`,
    if it is given. `device` is the one whose kernels are recorded. The model runs in its current mode (train or eval);
    model, inputs and optimizer are restored. A data-dependent step raises ExecutionError; `fvflops.record` counts a
    real one. `table`, `assume` and `warn` are as for FlopCountAnalysis.

    >>> model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 2))
    >>> step = TrainingStepAnalysis(
    ...     model, torch.ones(4, 8), loss=lambda y: y.sum(), optimizer=torch.optim.SGD, checkpoint=["0"]
    ... )
    >>> [step.macs(phase=phase) for phase in ("forward", "recompute", "backward")]
    [576, 256, 896]
    """

    @explaining_arguments
    def __init__(
        self,
        model: nn.Module,
        inputs: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        input_size: InputSize | None = None,
        table: str | FormulaTable = "default",
        warn: bool = True,
        **step: Unpack[StepOptions],
    ) -> None:
        run: RunOptions = {"execution": "shapes", "device": step["device"], "assume": step["assume"]}
        super().__init__(model, inputs, kwargs=kwargs, input_size=input_size, table=table, warn=warn, **run)
        require_int("micro_batches", step["micro_batches"], least=1)
        for maker in list_makers(step["optimizer"]):
            if not (isinstance(maker, Optimizer) or callable(maker)):
                raise TypeError(
                    f"optimizer must be a torch.optim.Optimizer or create one from parameters; got {shown(maker)}"
                )
        self._step = step
        # All arguments except model and inputs, for `varied`.
        self._options: dict[str, Any] = {"kwargs": self._run.kwargs, "table": self._table, "warn": warn, **step}

    @property
    def optimizers(self) -> tuple[OptimizerMaker, ...]:
        """The optimizers of the step, or their factories."""
        return tuple(list_makers(self._step["optimizer"]))

    @property
    def options(self) -> Mapping[str, Any]:
        """All arguments but the model and the inputs."""
        return self._options

    @property
    def checkpoint(self) -> Checkpointed:
        """Selection of the modules whose activations are recomputed."""
        return self._step["checkpoint"]

    @property
    def table(self) -> FormulaTable:
        """The convention of the counts."""
        return resolve_table(self._options["table"])

    @property
    def assume(self) -> Mapping[str, Any] | None:
        """Op → the assumed size or value of its result."""
        return self._step["assume"]

    def varied(self, model: nn.Module | None = None, inputs: Any = None, **options: Any) -> TrainingStepAnalysis:
        """Return the analysis of the same step with other arguments; handles are not copied.

        >>> step = TrainingStepAnalysis(nn.Linear(4, 2), torch.ones(3, 4), loss=torch.sum)
        >>> step.macs(), step.varied(micro_batches=2).macs()
        (48, 96)
        """
        run = self._run.with_model(model, inputs)
        changed: Any = run.model
        return TrainingStepAnalysis(changed, run.inputs, **{**self._options, **options})

    def _record(self, stops_at: StopsAt) -> Trace:
        model = self._run.require_model()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
        if not model.training:
            _LOGGER.warning(
                "the step is counted in eval mode: call model.train(), or pass --train, if that is not intended"
            )
        args, kwargs = self._run.arguments()
        return record_step(model, args, kwargs, stops_at=stops_at, estimate_cost=cost_estimator(self), **self._step)


def sum_results(result: Any) -> torch.Tensor:
    """Return the sum of all tensors in a model's result that require gradients."""
    sums = [tensor.float().sum() for tensor in tensors_of(result) if tensor.requires_grad]
    if not sums:
        raise ValueError("no tensor in the model's result requires a gradient: pass --loss, or omit --backward")
    return torch.stack(sums).sum()
