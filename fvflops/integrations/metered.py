"""Base of the callbacks that meter another library's training loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fvflops.measure.step_meter.meter import StepMeter
from fvflops.trace import TraceError

# The figures that are logged: means over the steps since the last log.
LOGGED = (
    "mfu",
    "hfu",
    "tflops_per_device",
    "tokens_per_second",
    "samples_per_second",
    "model_flops",
    "hardware_flops",
    "macs",
    "memory_peak",
)


class MeteredLoop:
    """Base class of the callbacks: the options of `fvflops.StepMeter`, and `meter`.

    The figures in `LOGGED` go where the loss goes, means over the steps since the last log; one that is not known is
    left out.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._options = options
        self._meter: StepMeter | None = None
        self._logged_steps = 0

    @property
    def meter(self) -> StepMeter:
        """The meter of the current or the last training."""
        if self._meter is None:
            raise TraceError("there are no figures: no training has started with this callback")
        return self._meter

    def _start(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._stop()
        self._logged_steps = 0
        self._meter = StepMeter(*models, optimizer=optimizers, **self._options)

    def _stop(self, error: BaseException | None = None) -> None:
        """Remove the meter's hooks; without an exception, count what is not counted yet."""
        if self._meter is not None:
            self._meter.__exit__(type(error) if error is not None else None, error, None)

    def _figures(self) -> dict[str, float]:
        """Return the known figures of the steps since the last call."""
        last = self.meter.last
        new = 0 if last is None else last.step - self._logged_steps
        mean = self.meter.mean(new) if new else None
        if last is None or mean is None:
            return {}
        self._logged_steps = last.step
        known = mean.as_dict()
        return {name: known[name] for name in LOGGED if name in known}
