"""Record training loops written with Hugging Face Accelerate."""

from __future__ import annotations

from typing import Any

from torch import nn

from fvflops.analysis.recording import OnTraceReady, record
from fvflops.analysis.steps import Schedule
from fvflops.formulas import FormulaTable
from fvflops.integrations.loop import Folder, save_when_ready
from fvflops.text import shown


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
            accelerator.log({"flops_per_step": run.per_step().flops.mean})

    `model` is the model as `prepare` returned it, which is unwrapped, or None. A batch whose gradients are only
    accumulated does not end a step. With `path`, a folder, the Trace is written there as `rank0.json`, with the
    process's rank, at the end of each cycle of the schedule and of the with block. Other options are as for `record`.
    Ops of Accelerate itself, the division of the loss and the clipping of gradients, are in no module.
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
            expected = "the first argument of FlopsRecording must be an accelerate.Accelerator"
            raise TypeError(f"{expected}; got {shown(accelerator)}")
        save = save_when_ready(path, accelerator.process_index, on_trace_ready)
        super().__init__(_unwrap(accelerator, model), table=table, schedule=schedule, on_trace_ready=save)
        self._accelerator = accelerator

    def step(self) -> None:
        """Mark the end of a batch, which ends a step unless its gradients are accumulated further."""
        if self._accelerator.sync_gradients:
            super().step()


def _unwrap(accelerator: Any, model: Any) -> Any:
    """Return the model inside the wrapper that `prepare` returned, unless `record` unwraps it itself."""
    # Accelerate's own unwrapping imports DeepSpeed if that is installed, even if it is not used.
    unwrapped_by_record = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    if unwrapped_by_record or not isinstance(getattr(model, "module", None), nn.Module):
        return model
    return accelerator.unwrap_model(model, keep_torch_compile=False)
