"""`record`: a context manager that counts any code, with the methods of an analysis."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from html import escape
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from fvflops.analysis.model_analysis import estimate_by, list_facts
from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.analysis.steps import ACTIVE, PerStep, Schedule, StepCount, action_at, count_step, summarise_steps
from fvflops.capture.model.read_module_tree import is_compiled
from fvflops.capture.model_call import ShapeOptions
from fvflops.capture.restore.interrupts import deferred
from fvflops.capture.session import Session
from fvflops.formulas import FormulaTable
from fvflops.text import Unpack, explaining_arguments, short_repr, shown
from fvflops.trace import Counts, ModuleTree, Trace, TraceError
from fvflops.units import format_quantity

_LOGGER = logging.getLogger("fvflops")

OnTraceReady = Callable[["record"], Any]


class record(FlopCountAnalysis):
    """A context manager that counts the code inside it: forward and backward passes, optimizer steps.

    `model` is the module whose submodules ops are attributed to (through DistributedDataParallel), or None. Backward
    ops count for the module whose forward created them. It has the methods of an analysis: `total()`, `by_module()`,
    `by_operator()`, `by_phase()`, `by_module_and_phase()`, `by_parameter_group()`, `by_dtype()`, `trace()`; inside the
    with block they return the results so far.

    `execution` is "real", in which the program runs as without it, or "shapes": nothing is computed, the model may be
    on the meta device, data-dependent code raises, and the model and the optimizers are restored at the end (`device`
    and `assume` are as for `record_call`). Recordings can be nested and can run in several threads at once. The threads
    of autograd are recorded, other threads that the program starts are not.

    `measure` is {"time"}, {"memory"} or both: then the events of the Trace have the time or memory of a real run.
    `table` and `warn` are as for FlopCountAnalysis.

    With a `schedule`, or if `step()` is called at the end of each training step, steps are separated: `steps` has the
    Trace of each complete step, `per_step()` the cost of a step, and all other methods cover all recorded steps
    together. `on_trace_ready` is called with the recording at the end of each cycle of the schedule, and of a with
    block that ends within a cycle without an exception. Nothing is instrumented between active steps. Traces of steps
    of earlier cycles are aggregated.

    A recording can be pickled, with the results so far. An exception is passed on; the results before it stay
    available, with a Trace that is not `complete`. The backward pass of a graph created before the with block counts
    for "<before recording>", optimizer ops on parameters of other models for "<outside the model>".

    >>> model = nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters())
    >>> with record(model) as run:
    ...     model(torch.ones(4, 3)).sum().backward()
    ...     optimizer.step()
    >>> {phase: run.macs(phase=phase) for phase in ("forward", "backward")}
    {'forward': 24, 'backward': 24}
    >>> with record(model, schedule=lambda step: "record" if step else "none") as run:
    ...     for rows in (1, 2, 4):
    ...         model(torch.ones(rows, 3)).sum().backward()
    ...         run.step()
    >>> print(run.per_step())
    2 steps, 36 flops per step (24 to 48): forward 18 (12 to 24), backward 18 (12 to 24); 72 (48 to 96) at 2 per MAC
    """

    @explaining_arguments
    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        table: str | FormulaTable = "default",
        execution: str = "real",
        measure: Collection[str] = (),
        schedule: Schedule | None = None,
        on_trace_ready: OnTraceReady | None = None,
        warn: bool = True,
        **shapes: Unpack[ShapeOptions],
    ) -> None:
        no_model: Any = None  # a recorded program is not run again
        super().__init__(no_model, table=table, warn=warn)
        self._new_session = partial(Session, model, execution=execution, measure=measure, **shapes)
        if not (schedule is None or callable(schedule)):
            raise TypeError(f"schedule={shown(schedule)} is not a function: pass fvflops.schedule(wait=1, active=2)")
        self._schedule = schedule
        self._on_trace_ready = on_trace_ready
        self._is_loaded = True
        self._session: Session | None = None
        self._created: WeakSet[torch.UntypedStorage] | None = None  # by the steps so far
        self._step = 0
        self._stage = "new"  # in the with block "open", and then "closed"
        self._paused = False
        self._counted_length = -1  # of the recording when it was last counted
        self._recorded: list[Trace] = []
        self._partial: Trace | None = None  # ops after the last step, or of an interrupted step
        self._unreported = 0  # number of recorded steps that on_trace_ready has not been called for
        self._aggregated = 0
        self._step_counts: tuple[Any, list[StepCount]] = None, []  # cache key and counts
        self._make_session()  # raises for invalid arguments
        if warn and model is not None and execution == "real" and is_compiled(model):
            text = "The model is compiled but runs eagerly while it is recorded: counts are the same, times are not"
            _LOGGER.warning(text)

    def __enter__(self) -> record:
        if self._stage != "new":
            raise RuntimeError("a recording can be entered only once: create another")
        try:
            with deferred():
                self._stage = "open"
                self._begin()
        except BaseException:
            # `__exit__` is not called if `__enter__` raises. If a signal handler raises between here and the with
            # block, `__del__` ends the recording.
            self._finish(complete=False)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        was_recording = self._session is not None
        if error is not None and self._session is not None:
            self._session.explain(error)
        self._finish(complete=error is None)
        if error is None and (was_recording or self._unreported) and (self._recorded or self._partial is not None):
            self._call_on_trace_ready()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, or a pickle: the results so far, without the state of the recording."""
        state = dict(vars(self))
        if self._stage != "new":
            partial_trace = self._partial if self._session is None else self._session.trace()
            state |= {"_stage": "closed", "_session": None, "_created": None, "_partial": partial_trace}
            state |= {"_schedule": None, "_on_trace_ready": None}
        return state

    def __repr__(self) -> str:
        if self._session is not None:
            return short_repr(self, self._name_model(), "recording", format_quantity(self._step, "step"))
        recorded = format_quantity(len(self._recorded), "step") if len(self._recorded) > 1 else ""
        known = [] if self._counts is None else list_facts(self._trace, self._counts)
        state = {"new": "not entered yet", "closed": "" if self._has_results() else "nothing recorded"}
        return short_repr(self, self._name_model(), recorded, *known, state.get(self._stage, ""))

    def __str__(self) -> str:
        return super().__str__() if self._has_results() else repr(self)

    def _repr_html_(self) -> str:
        return super()._repr_html_() if self._has_results() else f"<pre>{escape(repr(self))}</pre>"

    @property
    def steps(self) -> tuple[Trace, ...]:
        """Traces of the complete steps; without any `step()`, everything is one step."""
        return tuple(self._recorded)

    @property
    def step_num(self) -> int:
        """Index of the current step: the number of finished steps, recorded or not."""
        return self._step

    def step(self) -> None:
        """Mark the end of a training step; outside of the with block it raises RuntimeError."""
        if self._stage != "open":
            raise RuntimeError("step() marks the end of a step: call it inside the with block")
        action = self._action()
        with deferred():
            self._end(complete=True, step_ended=True)
            self._step += 1
        if action == "record_and_save":
            self._call_on_trace_ready()
        elif self._action() not in ACTIVE:
            self._unreported = 0  # a user-defined schedule has aborted the cycle
        self._begin()

    def per_step(self) -> PerStep:
        """Return the cost per step, over the complete steps; without any it raises TraceError.

        >>> model = nn.Linear(3, 2)
        >>> with record(model, table="exact") as run:
        ...     for rows in (1, 2):
        ...         y = model(torch.ones(rows, 3))
        ...         run.step()
        >>> run.per_step().mean, run.per_step().maximum
        (21, 28)
        >>> [(step.macs, step.flops) for step in run.per_step().each]
        [(6, 14), (12, 28)]
        """
        if not self._recorded:
            raise TraceError(self._explain_missing("no complete step was recorded"))
        convention = self._table, dict(self._handles), dict(self._module_handles)
        previous_convention, counts = self._step_counts
        if previous_convention != convention:
            counts = []
            self._step_counts = convention, counts
        for trace in self._recorded[len(counts) :]:
            counts.append(count_step(self._check_decomposed(trace), self._cost_model(), self._metric or "handles"))
        return summarise_steps(counts, self._metric or "handles")

    def pause(self) -> None:
        """Stop recording until `resume`; a step that begins in between starts there.

        To exclude code between two steps, and leave it uninstrumented, call `run.pause()` before `run.step()`, and
        `run.resume()` at the start of the next one.
        """
        with deferred():
            if not self._paused and self._session is not None:
                self._session.recorder.pause()
            self._paused = True

    def resume(self) -> None:
        """Continue recording after `pause`."""
        with deferred():
            was_paused, self._paused = self._paused, False
            if self._session is None:
                if self._stage == "open":
                    self._begin()
            elif was_paused:
                self._session.recorder.resume()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause recording within this context."""
        was_paused = self._paused
        self.pause()
        try:
            yield
        finally:
            if not was_paused:
                self.resume()

    def in_shapes(self, values: Any) -> Any:
        """In shape execution, replace meta tensors in nested values by shape tensors on the run's device."""
        return values if self._session is None else self._session.in_shapes(values)

    def trace(self) -> Trace:
        """Return the Trace of all steps together; before anything was recorded it raises TraceError."""
        self._invalidate_results()
        if self._trace is None:
            parts = [*self._recorded, *([] if self._partial is None else [self._partial])]
            parts += [] if self._session is None else [self._session.trace()]
            if not parts:
                raise TraceError(self._explain_missing("nothing was recorded"))
            self._trace = parts[0] if len(parts) == 1 else Trace.merge(parts)
        return self._check_decomposed(self._trace)

    def module_tree(self) -> ModuleTree:
        """Return the model's module tree, with owners such as "<before recording>" if any ops count for them."""
        if self._has_results():
            return self.trace().modules
        if self._modules is None:
            self._modules = self._make_session().modules
        return self._modules

    def _name_model(self) -> str:
        model = self._new_session.args[0]
        return "" if model is None else type(model).__name__

    def _has_results(self) -> bool:
        return self._session is not None or bool(self._recorded) or self._partial is not None

    def counts(self) -> Counts:
        """Return the counts of the recording: every entry, with its op, scope, phase and status."""
        self._invalidate_results()
        return super().counts()

    def _warn(self, counts: Counts) -> None:
        if self._session is None:  # else the recording is not finished
            super()._warn(counts)

    def _invalidate_results(self) -> None:
        length = -1 if self._session is None else self._session.recorder.length
        if length != self._counted_length:
            self._counted_length = length
            self._trace = self._counts = None

    def _action(self) -> str:
        return "record" if self._schedule is None else action_at(self._schedule, self._step)

    def _make_session(self) -> Session:
        cost_model = self._cost_model()
        # Installed patches refer to the session; they must not refer to this object, whose `__del__` ends it.
        return self._new_session(stops_at=cost_model.stops_at, estimate_cost=partial(estimate_by, cost_model))

    def _finish(self, *, complete: bool) -> None:
        with deferred():
            self._stage = "closed"
            self._end(complete=complete)

    def __del__(self) -> None:
        # For a signal handler that raises before the first line of `__exit__`, or after the last of `__enter__`. If
        # another one raises here, the session's finalizer ends the recording.
        session = vars(self).get("_session")
        if session is not None and not sys.is_finalizing():
            session.abandon()

    def _begin(self) -> None:
        if self._session is None and not self._paused and self._action() in ACTIVE:
            with deferred():
                session = self._make_session()
                session.start(self._created)
                self._session = session

    def _end(self, *, complete: bool, step_ended: bool = False) -> None:
        session = self._session
        if session is None:
            return
        session.check_thread()
        try:
            session.stop(complete=complete)
        finally:
            self._session = None
            self._created = session.recorder.of_earlier_steps
            self._trace = self._counts = None
            trace = session.trace()
            if trace.complete and (step_ended or not self._step):
                self._add_step(trace)
            elif trace.calls or not self._step:
                self._partial = trace

    def _add_step(self, trace: Trace) -> None:
        """Add the Trace of a step; aggregate the Traces of earlier cycles, and share equal consecutive ones."""
        if not self._unreported:
            for index in range(self._aggregated, len(self._recorded)):
                aggregated = self._recorded[index].aggregate()
                previous = self._recorded[index - 1] if index else None
                self._recorded[index] = previous if previous is not None and previous == aggregated else aggregated
            self._aggregated = len(self._recorded)
        self._recorded.append(trace)
        self._unreported += 1

    def _call_on_trace_ready(self) -> None:
        self._unreported = 0
        if self._on_trace_ready is not None:
            self._on_trace_ready(self)

    def _check_decomposed(self, trace: Trace) -> Trace:
        """Return the Trace if it decomposed no op that is counted as a whole; else raise TraceError."""
        if missing := ", ".join(self._missing_stops(trace)):
            remedy = "to count that as a whole, set handles before the with block"
            raise TraceError(f"this recording has decomposed {missing}: {remedy}")
        return trace

    def _explain_missing(self, what: str) -> str:
        if self._stage == "new":
            return f"{what}: the with block was not entered"
        if self._partial is not None:
            return f"{what}: the only one was interrupted"
        if self._session is not None:
            return f"{what}: the first continues until step() or the end of the with block"
        return f"{what}: the schedule made none of {format_quantity(self._step, 'step')} active"
