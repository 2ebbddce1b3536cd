"""The profile of a model: what a real run takes, beside what is counted."""

from __future__ import annotations

import copy as copying
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import nn

from fvflops.analysis.inputs import bind_inputs, check_repeatable
from fvflops.analysis.model_analysis import analysed_run
from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.analysis.schedules import ACTIVE, Schedule, action_at
from fvflops.capture.instrument.module_clock import clock_modules
from fvflops.capture.model.model import unwrap_compiled
from fvflops.capture.recorder.signature import tensors_of
from fvflops.capture.run import Loss, Model, record_call
from fvflops.counting.timing import Times, read_times
from fvflops.features.profiling.compute import measure_rows
from fvflops.features.profiling.model import Profile
from fvflops.features.profiling.report import profile_report
from fvflops.features.roofline.compute import roofline
from fvflops.features.utilisation.devices import Device
from fvflops.formulas import FormulaTable
from fvflops.reports.document import Document
from fvflops.reports.formats import write_document
from fvflops.text import require_int
from fvflops.trace import Event, StopsAt, Trace, TraceError
from fvflops.units import format_quantity
from fvflops.views.analysed_run import describe_run

_MEASURED = ("start_ns", "duration_ns", "memory_before", "memory_after", "memory_peak")
_COMPILED = "the model is compiled, and was run eagerly: these are not the times of compiled code"


class ProfileAnalysis(FlopCountAnalysis):
    """The flops of a model beside the time and memory that a real run of it takes, per op call and per module.

    The model runs `warmup` times, and then `repeat` times under the clock; what is told of each op and module is the
    mean over the middle third of these by their time, in ns and bytes. With a `schedule` it runs `steps` times instead,
    of which those are measured that the schedule makes active. With `loss`, a function of the result that returns a
    scalar, a run goes on through the backward pass. The model, its gradients and the inputs are left as they were.
    `measure` is {"time"}, {"memory"} or both; `table` and `warn` are those of FlopCountAnalysis. `on_run` is called
    after each run with how many are done and how many there will be. What modules take in the forward pass is clocked
    in as many runs more, in which no op is watched; the times in `trace()` itself, which exports show, are those of the
    runs in which ops are, less what watching took. On CUDA times are the device's: it is held for half a millisecond
    before each op and module call, so that it waits for no launch while the clock runs, which makes such a run slower,
    and its times shorter than those of a model too small to keep the device busy. Memory there is that of the
    allocator; on a CPU memory is that of the storages, and `profile_kernels(profile_memory=True)` knows the
    allocator's. A compiled model is run eagerly, so that its times are not those of compiled code: for these too there
    is `profile_kernels`.

    A run that raises ends the recording; `salvage()` then has what was measured before.

    >>> import torch
    >>> profile = ProfileAnalysis(torch.nn.Linear(64, 64), torch.ones(8, 64), repeat=3)
    >>> profile.total(), profile.times().modules["forward"][""].calls
    (32768, 1)
    >>> [(call.name, call.flops, call.memory_delta) for call in profile.op_calls()]
    [('linear', 32768, 2048)]
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
        schedule: Schedule | None = None,
        steps: int | None = None,
        measure: Collection[str] = ("time", "memory"),
        table: str | FormulaTable = "default",
        on_run: Callable[[int, int], Any] | None = None,
        warn: bool = True,
    ) -> None:
        super().__init__(model, inputs, kwargs=kwargs, table=table, execution="real", warn=warn)
        self._plan = _plan_runs(warmup, repeat) if schedule is None else _plan_steps(schedule, steps)
        if schedule is None and steps is not None:
            raise ValueError("steps are the runs of a schedule: give one, or warmup and repeat")
        self._loss = loss
        self._scheduled = schedule is not None
        self._measure = measure
        self._on_run = on_run
        self._compiled = isinstance(model, nn.Module) and unwrap_compiled(model) is not model
        self._measured: list[Trace] = []
        self._clocked: list[Trace] = []
        self._broken = ""

    @property
    def measured_runs(self) -> int:
        """How many runs were measured to their ends so far."""
        return len(self._measured)

    def times(self) -> Times:
        """Return the times of modules and operators."""
        return read_times(self._clock(self.trace()))

    def measured(self, *, device: str | Device | None = None) -> Profile:
        """Return what modules and operators took beside what they come to, as plain data.

        With a `device`, a name as `roofline` takes it or a Device, there is the least time that it needs too.
        """
        return self._measure_lines(self._clock(self.trace()), device)

    def table(
        self,
        *,
        by: str = "module",
        phase: str | None = None,
        depth: int | None = None,
        sort: str | None = None,
        top: int | None = None,
        device: str | Device | None = None,
    ) -> str:
        """Return what modules or operators took, beside what they come to, as text.

        `by` is "module" or "operator", `phase` one phase (all if None). Modules stand in the order of the model, down
        to `depth` levels below the root (2 if None), and deeper where their time does not match their FLOPs. With
        `sort` ("time", "self", "calls", "flops", "rate", "bytes", "intensity", "roofline", "memory", "peak",
        "mismatch" or "name") or `top`, they stand in one list, those with most first, of which `top` are shown.
        `device`, a name as `roofline` takes it or a Device, adds the share of its roofline. A view, phase or order that
        does not exist raises ValueError, a phase that was not run TraceError.
        """
        return write_document(self.report(by=by, phase=phase, depth=depth, sort=sort, top=top, device=device))

    def report(
        self,
        *,
        by: str = "module",
        phase: str | None = None,
        depth: int | None = None,
        sort: str | None = None,
        top: int | None = None,
        device: str | Device | None = None,
    ) -> Document:
        """Return what `table` shows as a document, which every format of a report can write."""
        # The times of operators add up with those of the runs in which they were watched.
        found = self._measure_lines(self._clock(self.trace()) if by == "module" else self.trace(), device)
        return profile_report(found, by=by, phase=phase, depth=depth, sort=sort, top=top)

    def salvage(self) -> ProfileAnalysis:
        """Return the profile of the runs that were measured to their ends before one raised.

        If there are none it raises TraceError.
        """
        if not self._measured:
            raise TraceError("no run was measured to its end")
        found = copying.copy(self)
        found._trace = self._finish(self._measured)
        found._loaded = True
        found._modules = found._trace.modules
        found._counts = found._by_both = None
        return found

    def _measure_lines(self, trace: Trace, device: str | Device | None) -> Profile:
        bound = None if device is None else roofline(trace, device=device, table=self._table or "exact")
        found = measure_rows(trace, self.counts(), self._cost_model(), bound)
        return replace(found, about={**describe_run(analysed_run(self)), "clocked": trace.about.get("clocked", "")})

    def _record(self, stops_at: StopsAt) -> Trace:
        args, kwargs = bind_inputs(self._model, self._inputs, self._kwargs)
        if len(self._plan) > 1 or "time" in self._measure:
            check_repeatable(args, kwargs)
        if any(tensor.device.type == "meta" for tensor in _tensors(self._model, args, kwargs)):
            raise ValueError(
                "a profile needs numbers, and there are none on the meta device: build the model on one that computes"
            )
        self._measured, self._clocked, self._broken = [], [], ""
        for index, action in enumerate(self._plan):
            versions = _versions(self._model)
            try:
                trace = record_call(
                    self._model,
                    args,
                    kwargs,
                    stops_at=stops_at,
                    execution="real",
                    loss=self._loss,
                    quiet=self._tracer_warnings == "none",
                    measure=() if action == "none" else self._measure,
                )
                clocked = self._clock_modules(args, kwargs, trace, versions) if action in ACTIVE else []
            except BaseException as error:
                what = f"{type(error).__name__}: {error}".rstrip(": ")
                self._broken = f"run {index + 1} of {len(self._plan)} was broken off by {' '.join(what.split())}"
                raise
            if action in ACTIVE:
                self._measured.append(trace)
                self._clocked += clocked
            if self._on_run is not None:
                self._on_run(index + 1, len(self._plan))
        return self._finish(self._measured)

    def _clock_modules(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], trace: Trace, versions: list[tuple[torch.Tensor, int]]
    ) -> list[Trace]:
        """Return the times of one forward pass in which no op is watched, run as that of a Trace was, if there are.

        `versions` are those that the model's parameters had before that.
        """
        if "time" not in self._measure or self._compiled or not isinstance(self._model, nn.Module):
            return []
        # Without a loss a forward pass is recorded below autograd, unless it uses autograd itself.
        uses_autograd = trace.about["vocabulary"] == "core" and torch.is_grad_enabled()
        gradients = self._loss is not None or uses_autograd
        written = [tensor for tensor, version in versions if tensor._version != version]
        return [clock_modules(self._model, args, kwargs, gradients=gradients, written=written)]

    def _finish(self, traces: list[Trace]) -> Trace:
        trace = trimmed_mean(traces)
        about = {**trace.about, "device": self._describe_device()}
        if self._scheduled:
            about["steps"] = str(len(self._plan))
        else:
            about["warmup"] = str(self._plan.count("warmup"))
        if self._compiled:
            about["compiled"] = _COMPILED
        if self._broken:
            about["broken off"] = f"{self._broken}: this is what was measured before"
        return replace(trace, about=about)

    def _clock(self, trace: Trace) -> Trace:
        """Return the Trace with the times that modules' calls take in the forward pass when no op is watched."""
        places = _ends_of_modules(trace)
        names = list(places.values())
        if not self._clocked or any(list(_ends_of_modules(run).values()) != names for run in self._clocked):
            return trace  # the model did not do the same each time
        clocked = trimmed_mean(self._clocked).events or ()
        times = [event.duration_ns for event in clocked if event.kind == "exit"]
        events = list(trace.events or ())
        for place, duration in zip(places, times, strict=True):
            events[place] = events[place]._replace(duration_ns=duration)
        about = {**trace.about, "clocked": format_quantity(len(self._clocked), "run")}
        return replace(trace, events=tuple(events), about=about)

    def _describe_device(self) -> str:
        args, kwargs = bind_inputs(self._model, self._inputs, self._kwargs)
        device = next((tensor.device for tensor in _tensors(self._model, args, kwargs)), torch.device("cpu"))
        if device.type == "cuda":
            return f"{device} ({torch.cuda.get_device_name(device)})"
        return f"cpu ({format_quantity(torch.get_num_threads(), 'thread')})" if device.type == "cpu" else str(device)


def _ends_of_modules(trace: Trace) -> dict[int, str]:
    """Return the places at which calls of modules end in the forward pass, and the modules' names."""
    ends = [(place, event) for place, event in enumerate(trace.events or ()) if event.kind == "exit"]
    regions = {
        place: trace.regions[trace.region_signatures[event.item].region]
        for place, event in ends
        if event.phase == "forward"
    }
    return {place: region.name for place, region in regions.items() if region.kind == "module"}


def _tensors(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return a model's parameters and its inputs."""
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    return [*parameters, *tensors_of((args, dict(kwargs)))]


def _versions(model: Any) -> list[tuple[torch.Tensor, int]]:
    """Return a model's parameters and their versions, which writing to one raises; inference tensors have none."""
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    return [(tensor, tensor._version) for tensor in parameters if not tensor.is_inference()]


def _plan_runs(warmup: int, repeat: int) -> list[str]:
    return ["warmup"] * require_int("warmup", warmup, least=0) + ["record"] * require_int("repeat", repeat, least=1)


def _plan_steps(schedule: Schedule, steps: int | None) -> list[str]:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"a schedule needs steps, how many runs there are, 1 or more, not {steps!r}")
    plan = [action_at(schedule, step) for step in range(steps)]
    if not any(action in ACTIVE for action in plan):
        raise ValueError(f"of {format_quantity(steps, 'step')} the schedule makes none active: give more steps")
    return plan


def trimmed_mean(traces: list[Trace]) -> Trace:
    """Return the Trace of several runs of the same work, with the mean of what was measured at each op and region.

    The mean is that of the middle third of the runs by their time: neither a slow run nor a fast one sways it, and what
    modules take adds up as it does in each run, which medians would not do. `about` says which these are. Runs that
    differ from the last in what they did are left out, and `about` says so.
    """
    last = traces[-1]
    alike = [trace for trace in traces if _work(trace) == _work(last)]
    apart = len(alike) // 3
    middle = sorted(alike, key=_time_whole)[apart : len(alike) - apart]
    about = {**last.about, "runs": str(len(alike)), "averaged": _describe_mean(len(middle), len(alike))}
    if len(alike) < len(traces):
        about["differed"] = f"{len(traces) - len(alike)} of {len(traces)} runs did other work, and are left out"
    rows = zip(*(_marks(trace) for trace in middle), strict=True)
    return replace(last, events=tuple(_mean(row) for row in rows), about=about)


def _describe_mean(middle: int, runs: int) -> str:
    if runs == 1:
        return "one run"
    if middle == 1:
        return f"the middle of {runs} runs"
    return f"the mean of {runs} runs" if middle == runs else f"the mean of the middle {middle} of {runs} runs"


def _time_whole(trace: Trace) -> int:
    """Return the time of a run from its first event to the end of its last."""
    ends = [(event.start_ns or 0) + (event.duration_ns or 0) for event in trace.events or ()]
    return max(ends, default=0) - min((event.start_ns or 0 for event in trace.events or ()), default=0)


def _marks(trace: Trace) -> list[Event]:
    """Return the events less the ends of storages, whose order depends on Python's collector."""
    return [event for event in trace.events or () if event.kind != "free"]


def _work(trace: Trace) -> list[tuple[Any, ...]]:
    return [(event.kind, event.item, event.stack, event.phase) for event in _marks(trace)]


def _mean(events: tuple[Event, ...]) -> Event:
    changes: dict[str, Any] = {}
    for name in _MEASURED:
        values = [value for event in events if (value := getattr(event, name)) is not None]
        if values:
            changes[name] = round(fmean(values))
    return events[-1]._replace(**changes)
