"""Callbacks for transformers.Trainer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any

from fvflops.integrations.loop import Loop, MeteredLoop, RecordedLoop, import_library

_LIBRARY = import_library("transformers", "transformers accelerate")
_TrainerCallback: Any = _LIBRARY.TrainerCallback

# The Trainer does not report exceptions to its callbacks. The first of these methods contains whole steps, the second,
# for releases without the first, a step without its optimizer part.
_GUARDED = ("_run_epoch", "training_step")


class _TrainerLoop(Loop):
    """A loop of a Trainer, whose exceptions end it, and the figures that are logged beside the loss."""

    _beside: tuple[str, ...] = ("loss",)  # the figures are logged with one of these

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._guards: list[tuple[Any, str, Callable[..., Any]]] = []

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **others: Any
    ) -> None:
        trainer = _find_trainer(sys._getframe())
        # A compiled model is called through its wrapper, whose hooks are not compiled.
        called = [getattr(trainer, "model_wrapped", model)]
        optimizers = [] if optimizer is None else [optimizer]
        self._begin(model, rank=args.process_index, called=called, optimizers=optimizers)
        if trainer is not None:
            self._guard(trainer)
            callbacks = trainer.callback_handler.callbacks
            # The handler is iterating over the list; the positions of later callbacks do not change.
            callbacks.insert(0, callbacks.pop(callbacks.index(self)))

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._end_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self._end()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
        if logs and any(name in logs for name in self._beside):
            figures = self._figures()
            logs.update(figures)
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1].update(figures)  # the Trainer has copied the logs there already

    def _end(self, error: BaseException | None = None) -> None:
        guards, self._guards = self._guards, []
        for trainer, name, guard in guards:
            if vars(trainer).get(name) is guard:
                delattr(trainer, name)
        super()._end(error)

    def _guard(self, trainer: Any) -> None:
        """Patch a Trainer so that an exception in its steps ends the loop before it is passed on."""

        def ending(call: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(call)
            def guard(*args: Any, **kwargs: Any) -> Any:
                try:
                    return call(*args, **kwargs)
                except BaseException as error:
                    self._end(error)
                    raise

            return guard

        for name in _GUARDED:
            if hasattr(trainer, name) and name not in vars(trainer):
                guard = ending(getattr(trainer, name))
                setattr(trainer, name, guard)
                self._guards.append((trainer, name, guard))


class FlopsCallback(_TrainerLoop, RecordedLoop, _TrainerCallback):
    """A callback that counts the steps of a `transformers.Trainer`.

        callback = FlopsCallback(schedule=fvflops.schedule(wait=1, active=2), path="flops")
        Trainer(model, args, train_dataset=data, callbacks=[callback]).train()
        print(callback.recording.per_step())

    The options are as for `RecordedLoop`; `recording` is the `fvflops.record` of the training, available during it and
    after. A step is an optimizer step with all its micro-batches, and includes the ops of the Trainer itself, in no
    module: the division of the loss, and the norm of the gradients with their clipping.

    `flops_per_step` (2 FLOPs for a multiply-add, whatever the table) and `macs_per_step`, the means over the steps
    recorded so far, are logged wherever the loss is: in `trainer.state.log_history`, on the screen and by the
    integrations in `report_to`. For that the callback moves before the Trainer's others, so that their work at the end
    of a step is not counted.
    """

    _beside = ("loss", "train_loss")


class MeterCallback(_TrainerLoop, MeteredLoop, _TrainerCallback):
    """A callback that logs the throughput and utilisation of a `transformers.Trainer`, at no cost per step.

        Trainer(model, args, train_dataset=data, callbacks=[MeterCallback(device="H100")]).train()

    The options are as for `fvflops.StepMeter`, and `meter` is the training's. A step is an optimizer step with all its
    micro-batches. Logged beside the loss are `mfu`, `hfu`, `tflops_per_device`, `tokens_per_second`,
    `samples_per_second`, `model_flops` and `hardware_flops` (2 FLOPs for a multiply-add) and `macs`, means over the
    steps since the last log, each of one device. The Trainer's own `total_flos` is an estimate, 6 * parameters *
    tokens, without attention.
    """


def _find_trainer(frame: FrameType | None) -> Any:
    """Find the calling Trainer in the stack, since callbacks do not receive it."""
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, _LIBRARY.Trainer):
            return caller
        frame = frame.f_back
    return None
