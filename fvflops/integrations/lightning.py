"""Callbacks for Lightning's Trainer, of the package `lightning` or `pytorch_lightning`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

from torch import nn

from fvflops.integrations.loop import Loop, MeteredLoop, RecordedLoop, import_library

_OLD, _NEW = "pytorch_lightning", "lightning.pytorch"


def _choose() -> str:
    """Return the package whose Callback to subclass: one that is imported already, or the newest installed one."""
    for name in (_NEW, _OLD):
        if name in sys.modules:
            return name
    return _OLD if find_spec("lightning") is None and find_spec(_OLD) is not None else _NEW


_Callback: Any = import_library(_choose(), "lightning").Callback


class _LightningLoop(Loop):
    """A loop of a Trainer, which calls a LightningModule."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        rank, optimizers = trainer.global_rank, trainer.optimizers
        self._begin(pl_module, rank=rank, called=_called_modules(pl_module), optimizers=optimizers)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step; a recorded one may have begun with an earlier micro-batch."""
        self._begin_step(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._end_step()
        if figures := self._figures():
            pl_module.log_dict({name: float(value) for name, value in figures.items()})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the recording, whose current step is incomplete, or remove the meter's hooks."""
        self._end(exception)


class FlopsCallback(_LightningLoop, RecordedLoop, _Callback):
    """A callback that counts the steps of a `lightning.pytorch.Trainer`, or of one of `pytorch_lightning`.

        callback = FlopsCallback(schedule=fvflops.schedule(wait=1, active=2), path="flops")
        Trainer(callbacks=[callback]).fit(module, data)
        print(callback.recording.per_step())

    The options are as for `RecordedLoop`; `recording` is the `fvflops.record` of the training, available during it and
    after, with module names as in the LightningModule. A step ends with an optimizer step, contains all its
    micro-batches, and includes the ops of Lightning itself, in no module: the division of the loss, the clipping of
    gradients, and the reductions of `self.log`.

    `flops_per_step` (2 FLOPs for a multiply-add, whatever the table) and `macs_per_step`, the means of the steps
    recorded so far, are logged at the end of each step, as Lightning does in float32; `recording.per_step()` has them
    exactly.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._optimizer_steps = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start a recording."""
        super().on_train_start(trainer, pl_module)
        self._optimizer_steps = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop recording if an optimizer has made a step, and log the cost per step."""
        if trainer.global_step == self._optimizer_steps:
            self._pause_step()
            return
        self._optimizer_steps = trainer.global_step
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Pause recording between epochs, also if an epoch ends within a step."""
        self._pause_step()


class MeterCallback(_LightningLoop, MeteredLoop, _Callback):
    """A callback that logs the throughput and utilisation of a `lightning.pytorch.Trainer`.

        Trainer(callbacks=[MeterCallback(device="H100")]).fit(module, data)

    The options are as for `fvflops.StepMeter`, and `meter` is the training's. A step is a batch. The first is recorded,
    since a LightningModule's `training_step` may call anything. If calls of the LightningModule or of its children have
    all its multiply-adds, other steps are counted by such calls, at no cost; else the first of each distinct batch, by
    its shapes, is recorded. Logged are `mfu`, `hfu`, `tflops_per_device`, `tokens_per_second`, `samples_per_second`,
    `model_flops` and `hardware_flops` (2 FLOPs for a multiply-add) and `macs`, each of one device.
    """


def _called_modules(pl_module: Any) -> list[nn.Module]:
    """Return the modules that a LightningModule's `training_step` may call: itself, or its children with parameters."""
    return [pl_module, *(child for child in pl_module.children() if any(True for _ in child.parameters()))]
