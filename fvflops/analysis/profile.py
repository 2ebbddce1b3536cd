"""The profile of a model: what a real run takes, beside what is counted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from fvflops.analysis.inputs import bind_inputs
from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.capture.record import Loss, Model, record_call
from fvflops.formulas import FormulaTable
from fvflops.metrics.timing import Times, read_times
from fvflops.trace import Event, StopsAt, Trace

_MEASURED = ("start_ns", "duration_ns", "memory_before", "memory_after", "memory_peak")


class ProfileAnalysis(FlopCountAnalysis):
    """The flops of a model beside the time and memory that a real run of it takes, per op call and per module.

    The model runs `warmup` times, and then `repeat` times under the clock; what is told of each op and module is the
    median over these, in ns and bytes. With `loss`, a function of the result that returns a scalar, a run goes on
    through the backward pass. The model, its gradients and the inputs are left as they were. `measure` is {"time"},
    {"memory"} or both. What watching took is subtracted from modules' times and told in `trace().about`. On CUDA an
    op's time is the device's; a compiled model is run eagerly, so that its times are not those of compiled code.

    >>> import torch
    >>> profile = ProfileAnalysis(torch.nn.Linear(64, 64), torch.ones(8, 64), repeat=3)
    >>> profile.total(), profile.times().modules["forward"][""].calls
    (32768, 1)
    """

    def __init__(
        self,
        model: Model,
        inputs: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        loss: Loss | None = None,
        warmup: int = 1,
        repeat: int = 5,
        measure: Collection[str] = ("time", "memory"),
        table: str | FormulaTable = "default",
    ) -> None:
        super().__init__(model, inputs, kwargs=kwargs, table=table, execution="real")
        for name, number, least in (("warmup", warmup, 0), ("repeat", repeat, 1)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(f"{name} is a whole number from {least} on, not {number!r}")
        self._loss = loss
        self._warmup = warmup
        self._repeat = repeat
        self._measure = measure

    def times(self) -> Times:
        """Return the times of modules and operators."""
        return read_times(self.trace())

    def _record(self, stops_at: StopsAt) -> Trace:
        args, kwargs = bind_inputs(self._model, self._inputs, self._kwargs)
        traces = []
        for index in range(self._warmup + self._repeat):
            trace = record_call(
                self._model,
                args,
                kwargs,
                stops_at=stops_at,
                execution="real",
                loss=self._loss,
                quiet=self._tracer_warnings == "none",
                measure=self._measure,
            )
            if index >= self._warmup:
                traces.append(trace)
        return take_median(traces)


def take_median(traces: list[Trace]) -> Trace:
    """Return the Trace of several runs of the same work, with the median of what was measured at each op and region.

    Runs that differ in what they did cannot be laid over each other: then the last is returned, and `about` says so.
    """
    last = traces[-1]
    alike = [trace for trace in traces if _work(trace) == _work(last)]
    about = {**last.about, "runs": str(len(alike))}
    if len(alike) < len(traces):
        about["differed"] = f"{len(traces) - len(alike)} of {len(traces)} runs did other work, and are left out"
    rows = zip(*(_marks(trace) for trace in alike), strict=True)
    return replace(last, events=tuple(_median(row) for row in rows), about=about)


def _marks(trace: Trace) -> list[Event]:
    """Return the events less the ends of storages, whose order depends on Python's collector."""
    return [event for event in trace.events or () if event.kind != "free"]


def _work(trace: Trace) -> list[tuple[Any, ...]]:
    return [(event.kind, event.item, event.stack, event.phase) for event in _marks(trace)]


def _median(events: tuple[Event, ...]) -> Event:
    changes = {}
    for name in _MEASURED:
        values = [value for event in events if (value := getattr(event, name)) is not None]
        if values:
            changes[name] = round(median(values))
    return events[-1]._replace(**changes)
