"""Record training loops written with Hugging Face Accelerate."""

from __future__ import annotations

from typing import Any

from torch import nn

from fvflops.analysis.recording import OnTraceReady, record
from fvflops.analysis.schedules import Schedule
from fvflops.formulas import FormulaTable
from fvflops.integrations.saving import Folder, save_when_ready


class FlopsRecording(record):
    """An `fvflops.record` of a loop with an `Accelerator`, whose `step()` is called after each batch.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        plan = fvflops.schedule(wait=1, active=2)
        with FlopsRecording(accelerator, model, schedule=plan, on_trace_ready=log, path="flops") as run:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                run.step()

        def log(run):
            accelerator.log({"flops_per_step": run.per_step().mean})

    `model` is the model as `prepare` returned it, whose wrapper is looked through, or None. A batch whose gradients are
    only accumulated ends no step. With `path`, a folder, the Trace is written there at the end of each cycle of the
    schedule, and of the with block, as `rank0.json`, or the process' own rank. Other options are those of `record`.
    What Accelerate itself computes, the division of the loss and the clipping of gradients, is under no module.
    """

    def __init__(
        self,
        accelerator: Any,
        model: nn.Module | None = None,
        *,
        schedule: Schedule | None = None,
        on_trace_ready: OnTraceReady | None = None,
        path: Folder | None = None,
        table: str | FormulaTable = "default",
    ) -> None:
        if not hasattr(accelerator, "sync_gradients"):
            raise TypeError(
                f"FlopsRecording takes an accelerate.Accelerator, and then a model, not {accelerator!r:.60}"
            )
        super().__init__(
            _unwrap(accelerator, model),
            table=table,
            schedule=schedule,
            on_trace_ready=save_when_ready(path, accelerator.process_index, on_trace_ready),
        )
        self._accelerator = accelerator

    def step(self) -> None:
        """Say that a batch is done, which ends a step unless its gradients are accumulated with those of more."""
        if self._accelerator.sync_gradients:
            super().step()


def _unwrap(accelerator: Any, model: Any) -> Any:
    """Return the model inside what `prepare` made of it, as far as `record` does not look through that itself.

    To unwrap a model Accelerate imports DeepSpeed, where that is installed, whether it is used or not.
    """
    known = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    if known or not isinstance(getattr(model, "module", None), nn.Module):
        return model
    return accelerator.unwrap_model(model, keep_torch_compile=False)
