"""Bases of the callbacks: record or meter another library's training loop step by step."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fvflops import paths
from fvflops.analysis import steps
from fvflops.analysis.recording import OnTraceReady, record
from fvflops.analysis.steps import Schedule
from fvflops.formulas import FormulaTable
from fvflops.measure.step_meter.meter import StepMeter
from fvflops.measure.step_meter.step_figures import MeterOptions
from fvflops.reports.escaping import list_ops
from fvflops.text import Unpack, explaining_arguments
from fvflops.trace import TraceError

# Names under which the cost per step is logged: FLOPs, 2 for a multiply-add whatever the table, and multiply-adds.
LOGGED = ("flops_per_step", "macs_per_step")
# Steps are usually equal: the first few are representative, and the others run without overhead.
FIRST_STEPS = steps.schedule(active=3, repeat=1)

# Figures of a metered loop that are logged: means over the steps since the last log.
LOGGED_FIGURES = (
    *("mfu", "hfu", "tflops_per_device", "tokens_per_second", "samples_per_second"),
    *("model_flops", "hardware_flops", "macs", "memory_peak", "unexplained"),
)
Folder = str | os.PathLike[str]

_LOGGER = logging.getLogger("fvflops")


class Loop:
    """Interface for the callbacks of a library, whether the loop is recorded or metered."""

    _begin: Callable[..., None]
    _begin_step: Callable[..., None]
    _end_step: Callable[[], None]
    _end: Callable[..., None]
    _figures: Callable[[], Mapping[str, float]]


class RecordedLoop(Loop):
    """Base class of the callbacks: options, `recording`, start and end of steps.

    `schedule` selects the optimizer steps to record: by default the first three, all with None. `on_trace_ready` is
    called with the recording at the end of each of its cycles, and `path` is a folder in which the Trace is then
    written as `rank0.json`, with the process's rank. `table` is the convention. Only active steps are instrumented,
    each from its first micro-batch to the optimizer step; work between steps (validation, saving, logging) is in none.
    """

    @explaining_arguments
    def __init__(
        self,
        *,
        schedule: Schedule | None = FIRST_STEPS,
        on_trace_ready: OnTraceReady | None = None,
        path: Folder | None = None,
        table: str | FormulaTable = "default",
    ) -> None:
        self._schedule = schedule
        self._on_trace_ready = on_trace_ready
        self._path = path
        self._table = table
        self._recording: record | None = None
        self._open = False
        self._in_step = False
        self._mean: tuple[int, dict[str, float]] = 0, {}  # number of steps, and their mean cost
        self._warned = False

    @property
    def recording(self) -> record:
        """The recording of the current or the last training, with the methods of an analysis."""
        if self._recording is None:
            raise TraceError("nothing was recorded: no training has started with this callback")
        return self._recording

    def _begin(self, model: nn.Module, *, rank: int, **others: Any) -> None:
        self._end()
        save = save_when_ready(self._path, rank, self._on_trace_ready)
        self._recording = record(model, table=self._table, schedule=self._schedule, on_trace_ready=save)
        self._mean = 0, {}
        self._recording.pause()
        self._recording.__enter__()
        self._open = True

    def _begin_step(self, batch: Any = None) -> None:
        if self._open:
            self._in_step = True
            self.recording.resume()

    def _end_step(self) -> None:
        if self._in_step:
            self._in_step = False
            self.recording.pause()
            self.recording.step()

    def _pause_step(self) -> None:
        if self._in_step:
            self.recording.pause()

    def _end(self, error: BaseException | None = None) -> None:
        """End the recording, with the exception that ended the training if there is one."""
        if self._open:
            self._open = self._in_step = False
            self.recording.__exit__(type(error) if error is not None else None, error, None)

    def _figures(self) -> dict[str, float]:
        """Return the means over the steps recorded so far by their names in `LOGGED`; nothing before the first."""
        steps = len(self._recording.steps) if self._recording is not None else 0
        if steps != self._mean[0]:
            per_step = self.recording.per_step()
            self._mean = steps, dict(zip(LOGGED, (per_step.flops.mean, per_step.macs.mean), strict=True))
            if per_step.unsupported and not self._warned:
                self._warned = True
                ops = list_ops(per_step.unsupported)
                _LOGGER.warning("%s does not include unsupported ops: %s", LOGGED[0], ops)
        return self._mean[1]


class MeteredLoop(Loop):
    """Base class of the callbacks: the options of `fvflops.StepMeter`, and `meter`.

    The known ones of `LOGGED_FIGURES` go where the loss goes, means over the steps since the last log.
    """

    @explaining_arguments
    def __init__(self, **options: Unpack[MeterOptions]) -> None:
        self._options = options
        self._meter: StepMeter | None = None
        self._logged_steps = 0

    @property
    def meter(self) -> StepMeter:
        """The meter of the current or the last training."""
        if self._meter is None:
            raise TraceError("there are no figures: no training has started with this callback")
        return self._meter

    def _begin(
        self, model: nn.Module, *, called: Sequence[nn.Module], optimizers: Sequence[Optimizer], rank: int
    ) -> None:
        """Start a meter of the modules that the loop calls."""
        self._end()
        self._logged_steps = 0
        self._meter = StepMeter(*called, optimizer=optimizers, **self._options)

    def _begin_step(self, batch: Any = None) -> None:
        self.meter.begin(batch)

    def _end_step(self) -> None:
        self.meter.end()

    def _end(self, error: BaseException | None = None) -> None:
        """Remove the meter's hooks; without an exception, count the pending steps."""
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
        return {name: known[name] for name in LOGGED_FIGURES if name in known}


def save_when_ready(folder: Folder | None, rank: int, on_trace_ready: OnTraceReady | None) -> OnTraceReady:
    """Return a callback that writes the Trace so far as `rank{rank}.json` to a folder, and calls `on_trace_ready`.

    `folder` is a local path or a URI, created if needed, None for no file.
    """

    def save_and_call(recording: record) -> Any:
        if folder is not None:
            name = os.fspath(folder)
            paths.make_folder(name)
            paths.write_text(f"{name.rstrip('/')}/rank{rank}.json", recording.trace().to_json())
        return None if on_trace_ready is None else on_trace_ready(recording)

    return save_and_call


def import_library(module: str, install: str) -> Any:
    """Import a module of another library; if that is not installed, the ImportError names the packages to `install`."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is installed, and a dependency of it is missing
        raise ImportError(f"{module} is not installed, which this integration needs: pip install {install}") from None
