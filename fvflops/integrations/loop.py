"""The common part of callbacks: a recording of another library's training loop, step by step."""

from __future__ import annotations

import logging

from torch import nn

from fvflops.analysis import schedules
from fvflops.analysis.recording import OnTraceReady, record
from fvflops.analysis.schedules import Schedule
from fvflops.formulas import FormulaTable
from fvflops.integrations.saving import Folder, save_when_ready
from fvflops.reports.names import printable_short
from fvflops.trace import TraceError
from fvflops.units import format_quantity

# The name under which a loop logs what a step comes to.
LOGGED = "flops_per_step"
# Steps mostly are alike: the first few say what one comes to, and all others run as fast as ever.
FIRST_STEPS = schedules.schedule(active=3, repeat=1)

_LOGGER = logging.getLogger("fvflops")


class RecordedLoop:
    """What the callbacks of all loops have: options, `recording`, and steps that begin and end.

    `schedule` says which optimizer steps are recorded: the first three by default, all with None. `on_trace_ready` is
    called with the recording at the end of each cycle of it, and `path` is a folder, in which the Trace is then written
    as `rank0.json`, or the process' own rank. `table` is the convention. Nothing is watched but the active steps, each
    from its first micro-batch to the optimizer's step; what a loop does between steps (validation, saving, logging)
    belongs to none.
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
        self._counted: tuple[int, int | float | None] = 0, None
        self._warned = False

    @property
    def recording(self) -> record:
        """The recording of the training that goes on, or of the last one, with the queries of an analysis."""
        if self._recording is None:
            raise TraceError("nothing was recorded: no training has begun with this callback")
        return self._recording

    def _begin(self, model: nn.Module, rank: int) -> None:
        """Begin the recording of a training; one that was left open ends."""
        self._end()
        self._recording = record(
            model,
            table=self._table,
            schedule=self._schedule,
            on_trace_ready=save_when_ready(self._path, rank, self._on_trace_ready),
        )
        self._counted = 0, None
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
        """Take nothing down until `_begin_step` says that the step goes on."""
        if self._open and self._in_step:
            self.recording.pause()

    def _end(self, error: BaseException | None = None) -> None:
        """End the recording, with the error that ended the training if there is one."""
        if self._open:
            self._open = self._in_step = False
            self.recording.__exit__(type(error) if error is not None else None, error, None)

    def _flops_per_step(self) -> int | float | None:
        """Return the mean of the steps recorded so far, or None before there is one."""
        steps = len(self._recording.steps) if self._recording is not None else 0
        if steps != self._counted[0]:
            per_step = self.recording.per_step()
            self._counted = steps, per_step.mean
            if per_step.unknown and not self._warned:
                self._warned = True
                named = [
                    f"{printable_short(op)} ({format_quantity(calls, 'call')})"
                    for op, calls in per_step.unknown.items()
                ]
                _LOGGER.warning("%s lacks what the table does not know: %s", LOGGED, ", ".join(named))
        return self._counted[1]
