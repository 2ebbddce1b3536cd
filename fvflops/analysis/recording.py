"""The recording of a program: a context manager around any code, with the queries of an analysis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.analysis.schedules import Schedule, action_at
from fvflops.capture.session import Session
from fvflops.formulas import FormulaTable
from fvflops.trace import Counts, ModuleTree, Trace, TraceError

OnTraceReady = Callable[["record"], Any]


class record(FlopCountAnalysis):
    """A context manager that counts what a program does inside it: forward and backward passes, optimizers' steps.

    `model` is the module to whose submodules ops are ascribed (through DistributedDataParallel), or None. Backward ops
    belong to the module whose forward made them. What is asked afterwards is what an analysis is asked: `total()`,
    `by_module()`, `by_operator()`, `by_phase()`, `by_module_and_phase()`, `by_parameter_group()`, `by_dtype()`,
    `trace()`; asked inside, it tells what there is so far.

    `execution` is "real", in which the program does what it would do without, or "shapes": nothing is computed, a model
    on the meta device will do, what needs a number raises, and in the end the model and the optimizers are as they were
    (`device` and `assume` are those of `record_call`). Recordings can be nested, go on in several threads at once,
    and see what autograd does in threads of its own; other threads that the program starts are not seen.

    With a `schedule`, or where `step()` is called at the end of each training step, steps are told apart: `steps` holds
    the Trace of each that was recorded, and what is asked is asked of all these together. `on_trace_ready` is called
    with the recording at the end of each cycle of the schedule. Between active steps nothing is watched.

    An exception passes through; what was recorded until then can be asked for, and its Trace is not `complete`. The
    backward pass of a graph that was made before belongs to "<before recording>", an optimizer's work for parameters
    that are not the model's to "<outside the model>".

    >>> model = nn.Linear(3, 2)
    >>> optimizer = torch.optim.SGD(model.parameters())
    >>> with record(model) as run:
    ...     model(torch.ones(4, 3)).sum().backward()
    ...     optimizer.step()
    >>> {phase: run.macs(phase=phase) for phase in ("forward", "backward")}
    {'forward': 24, 'backward': 24}
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        table: str | FormulaTable = "default",
        execution: str = "real",
        device: str | torch.device | None = None,
        assume: Mapping[str, Any] | None = None,
        schedule: Schedule | None = None,
        on_trace_ready: OnTraceReady | None = None,
    ) -> None:
        super().__init__(_recorded, None, table=table, execution="auto")
        self._target = model
        self._options = {"execution": execution, "device": device, "assume": assume}
        self._schedule = schedule
        self._on_trace_ready = on_trace_ready
        self._loaded = True
        self._session: Session | None = None
        self._step = 0
        self._entered = False
        self._paused = False
        self._length = -1
        self._done: list[Trace] = []
        self._cycle: list[Trace] = []
        self._modules = self._make_session().modules

    def __enter__(self) -> record:
        if self._entered:
            raise RuntimeError("a recording is entered once: make another")
        self._entered = True
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(complete=error is None)
        if error is None and self._cycle:
            self._hand_over()

    @property
    def steps(self) -> tuple[Trace, ...]:
        """The Traces of the steps that were recorded, those of the cycle that goes on included."""
        return (*self._done, *self._cycle)

    def step(self) -> None:
        """Say that a training step has come to its end; called outside of the context it raises RuntimeError."""
        if not self._entered or (self._session is None and self._schedule is None):
            raise RuntimeError("step() says that a step inside of the with block is done: call it there")
        action = self._action()
        self._end(complete=True)
        if action == "record_and_save":
            self._hand_over()
        self._step += 1
        self._begin()

    def pause(self) -> None:
        """Take nothing down until `resume`, in this step and in later ones."""
        if not self._paused and self._session is not None:
            self._session.pause()
        self._paused = True

    def resume(self) -> None:
        """Take down what happens from now on."""
        if self._paused and self._session is not None:
            self._session.resume()
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take nothing down as long as this context lasts."""
        before = self._paused
        self.pause()
        try:
            yield
        finally:
            if not before:
                self.resume()

    def in_shapes(self, values: Any) -> Any:
        """Return nested values, in a run by shapes, with tensors of the run's device in the place of those on meta."""
        return values if self._session is None else self._session.in_shapes(values)

    def trace(self) -> Trace:
        """Return what was recorded, of all steps together; before anything was, it raises TraceError."""
        self._forget_what_is_old()
        if self._trace is None:
            parts = list(self.steps)
            if self._session is not None:
                parts.append(self._session.trace())
            if not parts:
                raise TraceError("nothing was recorded: no step was active, or the with block was not entered")
            self._trace = parts[0] if len(parts) == 1 else Trace.merge(parts)
        missing = self._missing_stops()
        if missing:
            raise TraceError(
                f"this was recorded inside {', '.join(missing)}: set handles before the with block to count that as one"
            )
        return self._trace

    def module_tree(self) -> ModuleTree:
        """Return the model's module tree, with owners such as "<before recording>" where there is work of theirs."""
        return self.trace().modules if self._session is not None or self.steps else super().module_tree()

    def counts(self) -> Counts:
        """Return the counts of what was recorded: every entry, with its op, scope, phase and status."""
        self._forget_what_is_old()
        return super().counts()

    def _table_of_counts(self) -> dict[str, Counter[str]]:
        self._forget_what_is_old()
        return super()._table_of_counts()

    def _warn(self, counts: Counts) -> None:
        if self._session is None:  # else there is more to come
            super()._warn(counts)

    def _forget_what_is_old(self) -> None:
        """Forget what was told of a recording that has gone on since."""
        length = -1 if self._session is None else self._session.length
        if length != self._length:
            self._length = length
            self._trace = self._counts = self._by_both = None

    def _action(self) -> str:
        return "record" if self._schedule is None else action_at(self._schedule, self._step)

    def _make_session(self) -> Session:
        return Session(self._target, stops_at=self._pricer().stops_at, weigh=self._weigh, **self._options)  # type: ignore[arg-type]

    def _begin(self) -> None:
        if self._action() in ("record", "record_and_save"):
            session = self._make_session()
            session.start()
            if self._paused:
                session.pause()
            self._session = session

    def _end(self, *, complete: bool) -> None:
        session = self._session
        if session is None:
            return
        session.check_thread()
        self._session = None
        try:
            session.stop(complete=complete)
        finally:
            self._cycle.append(session.trace())
            self._trace = self._counts = self._by_both = None

    def _hand_over(self) -> None:
        self._done += self._cycle
        self._cycle = []
        if self._on_trace_ready is not None:
            self._on_trace_ready(self)


def _recorded() -> None:
    """Stand for the program that was recorded, which cannot be run again."""
