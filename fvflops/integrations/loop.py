"""Base of the callbacks: record another library's training loop step by step."""

from __future__ import annotations

import logging

from torch import nn

from fvflops.analysis import steps
from fvflops.analysis.recording import OnTraceReady, record
from fvflops.analysis.steps import Schedule
from fvflops.formulas import FormulaTable
from fvflops.integrations.saving import Folder, save_when_ready
from fvflops.reports.escaping import printable_short
from fvflops.trace import TraceError
from fvflops.units import format_quantity

# Names under which the cost per step is logged: FLOPs, 2 for a multiply-add whatever the table, and multiply-adds.
LOGGED = ("flops_per_step", "macs_per_step")
# Steps are usually equal: the first few are representative, and the others run without overhead.
FIRST_STEPS = steps.schedule(active=3, repeat=1)

_LOGGER = logging.getLogger("fvflops")


class RecordedLoop:
    """Base class of the callbacks: options, `recording`, start and end of steps.

    `schedule` selects the optimizer steps to record: by default the first three, all with None. `on_trace_ready` is
    called with the recording at the end of each of its cycles, and `path` is a folder in which the Trace is then
    written as `rank0.json`, with the process's rank. `table` is the convention. Only active steps are instrumented,
    each from its first micro-batch to the optimizer step; work between steps (validation, saving, logging) is in none.
    """

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
        self._mean: tuple[int, dict[str, int | float]] = 0, {}  # number of steps, and their mean cost
        self._warned = False

    @property
    def recording(self) -> record:
        """The recording of the current or the last training, with the methods of an analysis."""
        if self._recording is None:
            raise TraceError("nothing was recorded: no training has started with this callback")
        return self._recording

    def _begin(self, model: nn.Module, rank: int) -> None:
        """Start the recording of a training, after ending one that was left open."""
        self._end()
        self._recording = record(
            model,
            table=self._table,
            schedule=self._schedule,
            on_trace_ready=save_when_ready(self._path, rank, self._on_trace_ready),
        )
        self._mean = 0, {}
        self._recording.pause()
        self._recording.__enter__()
        self._open = True

    def _begin_step(self) -> None:
        if self._open:
            self._in_step = True
            self.recording.resume()

    def _end_step(self) -> None:
        if self._open and self._in_step:
            self._in_step = False
            self.recording.pause()
            self.recording.step()

    def _pause_step(self) -> None:
        """Stop recording until `_begin_step` continues the step."""
        if self._open and self._in_step:
            self.recording.pause()

    def _end(self, error: BaseException | None = None) -> None:
        """End the recording, with the exception that ended the training if there is one."""
        if self._open:
            self._open = self._in_step = False
            self.recording.__exit__(type(error) if error is not None else None, error, None)

    def _cost_per_step(self) -> dict[str, int | float]:
        """Return the means over the steps recorded so far by their names in `LOGGED`; nothing before the first."""
        steps = len(self._recording.steps) if self._recording is not None else 0
        if steps != self._mean[0]:
            per_step = self.recording.per_step()
            self._mean = steps, dict(zip(LOGGED, (per_step.flops.mean, per_step.macs.mean), strict=True))
            if per_step.unsupported and not self._warned:
                self._warned = True
                ops = [
                    f"{printable_short(op)} ({format_quantity(calls, 'call')})"
                    for op, calls in per_step.unsupported.items()
                ]
                _LOGGER.warning("%s does not include unsupported ops: %s", LOGGED[0], ", ".join(ops))
        return self._mean[1]
