"""Profile a model: measured time and memory of a run, with its counts."""

from __future__ import annotations

import copy as copying
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import replace
from statistics import fmean
from typing import Annotated, Any, TypedDict

import torch
from torch import nn

from fvflops.analysis.model_analysis import analysed_run
from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.analysis.model_run import InputSize, check_repeatable
from fvflops.analysis.steps import ACTIVE, Schedule, action_at
from fvflops.capture.instrument.module_clock import time_modules
from fvflops.capture.model.read_module_tree import check_initialised, unwrap_compiled
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.restore.torch_state import restore_versions
from fvflops.capture.run import Loss, Model, record_call
from fvflops.capture.training_step import autocast_to
from fvflops.counting import build_timeline
from fvflops.counting.listed_calls import select_calls
from fvflops.counting.nested_timeline import Times, read_times
from fvflops.devices.devices import Device, resolve_device, short_dtype
from fvflops.formulas import FormulaTable
from fvflops.measure.op_roofline import roofline
from fvflops.measure.profile_report import RowOptions, describe_subject, profile_report
from fvflops.measure.profile_rows import Profile, fit_ops, measure_rows
from fvflops.reports.call_tables import op_call_notes, op_call_table
from fvflops.reports.display import WIDTH
from fvflops.reports.document import Document, Items
from fvflops.reports.formats import write_document
from fvflops.text import Unpack, explaining_arguments, require_int
from fvflops.trace import Event, StopsAt, Trace, TraceError
from fvflops.units import format_quantity
from fvflops.views.analysed_run import describe_run
from fvflops.views.breakdown import Breakdown, Peaks, read_breakdown

_MEASURED = ("start_ns", "duration_ns", "memory_before", "memory_after", "memory_peak")
_COMPILED = "the model is compiled, but was run eagerly: these are not the times of compiled code"


class MeasureOptions(TypedDict, total=False):
    """Options of measured runs, as ProfileAnalysis describes them."""

    loss: Annotated[Loss | None, None]
    autocast: Annotated[torch.dtype | None, None]
    warmup: Annotated[int, 1]
    repeat: Annotated[int, 5]
    schedule: Annotated[Schedule | None, None]
    steps: Annotated[int | None, None]
    measure: Annotated[Collection[str], ("time", "memory")]
    on_run: Annotated[Callable[[int, int], Any] | None, None]


class ProfileAnalysis(FlopCountAnalysis):
    """The FLOPs of a model with measured time and memory, per op call and per module.

    The model runs `warmup` times, and then `repeat` measured times; times (ns) and memory (bytes) of each op and module
    are the mean over the middle third of the measured runs, ranked by their time. With a `schedule` it runs `steps`
    times instead, and its active steps are measured. With `loss`, a function of the result that returns a scalar, a run
    includes the backward pass; with `autocast`, a dtype, forward pass and loss run in torch.autocast. The model, its
    gradients and the inputs are left unchanged. `measure` is {"time"}, {"memory"} or both; `table` and `warn` are as
    for FlopCountAnalysis. `on_run` is called after each run with the number of completed runs and of all runs.

    Forward times of modules are from as many further runs without per-op instrumentation, and ops that took longer than
    their module's own time there are scaled to it, in tables and pages alike. The times in `trace()`, which lists of op
    calls and exports show, are from the instrumented runs, with the profiling overhead subtracted.

    On CUDA times are device times. The device is kept busy for half a millisecond before each op and module call, so
    that launch latency is not measured: such a run is slower, and its times are shorter than for a model too small to
    keep the device busy. Memory is read from the CUDA allocator; on a CPU it is the bytes of storages, and
    `profile_kernels(profile_memory=True)` measures the allocator. A compiled model is run eagerly; for the times of
    compiled code use `profile_kernels`.

    A run that raises ends the recording; `salvage()` then returns the profile of the runs before it.

    >>> import torch
    >>> profile = ProfileAnalysis(torch.nn.Linear(64, 64), torch.ones(8, 64), repeat=3)
    >>> profile.total(), profile.times().modules["forward"][""].calls
    (32768, 1)
    >>> [(call.name, call.flops, call.memory_delta) for call in profile.op_calls()]
    [('linear', 32768, 2048)]
    """

    @explaining_arguments
    def __init__(
        self,
        model: Model,
        inputs: Any = None,
        *,
        kwargs: Mapping[str, Any] | None = None,
        input_size: InputSize | None = None,
        table: str | FormulaTable = "default",
        warn: bool = True,
        **options: Unpack[MeasureOptions],
    ) -> None:
        super().__init__(model, inputs, kwargs=kwargs, input_size=input_size, table=table, execution="real", warn=warn)
        self._options = options
        schedule, steps, runs = options["schedule"], options["steps"], (options["warmup"], options["repeat"])
        self._actions = _plan_runs(*runs, steps) if schedule is None else _plan_steps(schedule, steps)
        self._compiled = isinstance(model, nn.Module) and unwrap_compiled(model) is not model
        self._measured: list[Trace] = []
        self._clocked: list[Trace] = []
        self._failure = ""

    def __str__(self) -> str:
        return write_document(self.report(), width=WIDTH)

    @property
    def measured_runs(self) -> int:
        """The number of completed measured runs."""
        return len(self._measured)

    def times(self) -> Times:
        """Return the times of modules and operators."""
        return read_times(self._clock(self.trace()))

    def measured(self, *, device: str | Device | None = None) -> Profile:
        """Return time and memory of modules and operators with their FLOPs and bytes, as plain data.

        With a `device`, a name as `roofline` takes it or a Device, each row has its least time on it too.
        """
        trace = self._clock(self.trace())
        bound = None if device is None else roofline(trace, device=device, table=self._table or "exact")
        measured = measure_rows(trace, self.counts(), self._cost_model(), bound)
        return replace(measured, about={**describe_run(analysed_run(self)), "clocked": trace.about.get("clocked", "")})

    @explaining_arguments
    def table(
        self, *, device: str | Device | None = None, width: int | None = None, **options: Unpack[RowOptions]
    ) -> str:
        """Return time and memory of modules or operators with their FLOPs and bytes, as text.

        `by` is "module" or "operator", `phase` one phase (all if None). Modules come in the order of the model, down to
        `depth` levels below the root (2 if None), and deeper where their time does not match their FLOPs. With `sort`
        ("time", "self", "calls", "flops", "rate", "bytes", "intensity", "roofline", "memory", "peak", "mismatch", a
        phase, or "name") or `top`, they are ranked, and `top` rows are shown. `device`, a name as `roofline`
        takes it or a Device, adds the share of its roofline. Lines have at most `width` columns, if that is given. An
        unknown view, phase or order raises ValueError, a phase that was not run TraceError.
        """
        return write_document(self.report(device=device, **options), width=width)

    @explaining_arguments
    def report(self, *, device: str | Device | None = None, **options: Unpack[RowOptions]) -> Document:
        """Return the report of `table` as a document, which every format of a report can write."""
        return profile_report(self.measured(device=device), **options)

    def call_report(
        self, *, phase: str | None = None, ignore: Collection[str] = (), sort: str | None = None, top: int | None = None
    ) -> Document:
        """Return the report of `op_table` as a document, which every format of a report can write."""
        calls, ignored = select_calls(self._list_op_calls(), phase, ignore, self._table)
        convention = "" if self._table is None else self._table.name
        notes = op_call_notes(calls, ignored=ignored, convention=convention)
        title = describe_subject(describe_run(analysed_run(self)))
        return Document("profile", title, [op_call_table(calls, sort=sort, top=top), Items("", notes)])

    def salvage(self) -> ProfileAnalysis:
        """Return the profile of the runs completed before one raised; without one it raises TraceError."""
        if not self._measured:
            raise TraceError("no measured run was completed")
        salvaged = copying.copy(self)
        salvaged._load(self._finish(self._measured))
        return salvaged

    def to_html(
        self, path: str | os.PathLike[str] | None = None, *, name: str = "", device: str | Device | None = None
    ) -> str:
        """Return the page of `FlopCountAnalysis.to_html` with the calls over time, and memory where measured.

        With a `device`, a name as `roofline` takes it or a Device, its roofline has the roofs of the device.
        """
        return self._write_page(path, name=name, peaks=None if device is None else read_peaks(device))

    def _breakdown_of_page(self) -> Breakdown:
        """Return the counts with the times that the tables show, and the calls of the instrumented runs."""
        run = analysed_run(self)
        timeline = build_timeline(run.trace, self._cost_model())
        return replace(read_breakdown(replace(run, trace=self._clock(run.trace))), timeline=timeline)

    def _record(self, stops_at: StopsAt) -> Trace:
        model = self._run.require_model()
        args, kwargs = self._run.arguments()
        if len(self._actions) > 1 or "time" in self._options["measure"]:
            check_repeatable(args, kwargs)
        if any(tensor.device.type == "meta" for tensor in _tensors(model, args, kwargs)):
            problem = "a profile needs real execution, and the meta device has no values"
            raise ValueError(f"{problem}: build the model on cpu or cuda")
        self._measured, self._clocked, self._failure = [], [], ""
        for index, action in enumerate(self._actions):
            versions = _versions(model, args, kwargs)
            try:
                trace = record_call(
                    model,
                    args,
                    kwargs,
                    stops_at=stops_at,
                    execution="real",
                    loss=self._options["loss"],
                    autocast=self._autocast(),
                    quiet=self._tracer_warnings == "none",
                    measure=() if action == "none" else self._options["measure"],
                )
                clocked = self._clock_modules(args, kwargs, trace, versions) if action in ACTIVE else []
            except BaseException as error:
                message = f"{type(error).__name__}: {error}".rstrip(": ")
                self._failure = f"run {index + 1} of {len(self._actions)} raised {' '.join(message.split())}"
                raise
            finally:
                restore_versions(versions)
            if action in ACTIVE:
                self._measured.append(trace)
                self._clocked += clocked
            if self._options["on_run"] is not None:
                self._options["on_run"](index + 1, len(self._actions))
        return self._finish(self._measured)

    def _clock_modules(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], trace: Trace, versions: list[tuple[torch.Tensor, int]]
    ) -> list[Trace]:
        """Return the module times of a forward pass without per-op instrumentation, [] where there are none."""
        model = self._run.require_model()
        if "time" not in self._options["measure"] or self._compiled or not isinstance(model, nn.Module):
            return []
        # Without a loss a forward pass is recorded below autograd, unless it uses autograd itself.
        uses_autograd = trace.info.op_set == "core" and torch.is_grad_enabled()
        gradients = self._options["loss"] is not None or uses_autograd
        changed = (tensor for tensor, version in versions if tensor._version != version)
        written = [tensor for tensor in changed if isinstance(tensor, nn.Parameter)]
        with self._autocast() or nullcontext():
            return [time_modules(model, args, kwargs, grad_enabled=gradients, written_parameters=written)]

    def _autocast(self) -> torch.autocast | None:
        dtype = self._options["autocast"]
        return None if dtype is None else autocast_to(dtype, self._device().type)

    def _finish(self, traces: list[Trace]) -> Trace:
        trace = trimmed_mean(traces)
        passes = "forward pass" if self._options["loss"] is None else "forward and backward passes"
        about = {**trace.about, "device": self._describe_device(), "passes": passes}
        if self._options["schedule"] is not None:
            about["steps"] = str(len(self._actions))
        else:
            about["warmup"] = str(self._actions.count("warmup"))
        if (dtype := self._options["autocast"]) is not None:
            about["device"] += f", in autocast to {short_dtype(dtype)}"
        if self._compiled:
            about["compiled"] = _COMPILED
        if self._failure:
            about["broken off"] = f"{self._failure}; the profile covers the runs before"
        return replace(trace, about=about)

    def _clock(self, trace: Trace) -> Trace:
        """Return the Trace with the forward times of module calls measured without per-op instrumentation."""
        ends = _ends_of_modules(trace)
        names = list(ends.values())
        if not self._clocked or any(list(_ends_of_modules(run).values()) != names for run in self._clocked):
            return trace  # the runs called different modules
        clocked = trimmed_mean(self._clocked).events or ()
        times = [event.duration_ns for event in clocked if event.kind == "exit"]
        events = list(trace.events or ())
        for index, duration in zip(ends, times, strict=True):
            events[index] = events[index]._replace(duration_ns=duration)
        about = {**trace.about, "clocked": format_quantity(len(self._clocked), "run")}
        return fit_ops(replace(trace, events=tuple(events), about=about))

    def _device(self) -> torch.device:
        tensors = _tensors(self._run.require_model(), *self._run.arguments())
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def _describe_device(self) -> str:
        device = self._device()
        if device.type == "cuda":
            return f"{device} ({torch.cuda.get_device_name(device)})"
        return f"cpu ({format_quantity(torch.get_num_threads(), 'thread')})" if device.type == "cpu" else str(device)


def read_peaks(device: str | Device) -> Peaks | None:
    """Return the peaks of a device, None without a bandwidth.

    >>> read_peaks("H100").bandwidth
    3350000000000
    """
    found = resolve_device(device)
    if found.bandwidth is None:
        return None
    return Peaks(found.name, int(found.bandwidth), {dtype: found.peak(dtype) for dtype in found.dtypes()})


def _ends_of_modules(trace: Trace) -> dict[int, str]:
    """Return index → module name of the events that end a module call in the forward pass."""
    regions = {
        index: trace.regions[trace.region_signatures[event.item].region]
        for index, event in enumerate(trace.events or ())
        if event.kind == "exit" and event.phase == "forward"
    }
    return {index: region.name for index, region in regions.items() if region.kind == "module"}


def _tensors(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
    return [*parameters, *tensors_of((args, dict(kwargs)))]


def _versions(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[torch.Tensor, int]]:
    """Return a model's and its inputs' tensors with their version counters; without inference tensors, which have none.

    A parameter of a lazy module without a shape raises ValueError.
    """
    if not isinstance(model, nn.Module):
        return []
    check_initialised(model)
    tensors = (*_tensors(model, args, kwargs), *model.buffers())
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


def _plan_runs(warmup: int, repeat: int, steps: int | None) -> list[str]:
    if steps is not None:
        raise ValueError("steps is the number of runs of a schedule: pass schedule, or warmup and repeat")
    return ["warmup"] * require_int("warmup", warmup, least=0) + ["record"] * require_int("repeat", repeat, least=1)


def _plan_steps(schedule: Schedule, steps: int | None) -> list[str]:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"with a schedule, steps must be the number of runs, at least 1; got {steps!r}")
    actions = [action_at(schedule, step) for step in range(steps)]
    if not set(ACTIVE).intersection(actions):
        raise ValueError(f"the schedule makes none of {format_quantity(steps, 'step')} active: pass more steps")
    return actions


def trimmed_mean(traces: list[Trace]) -> Trace:
    """Return the Trace of several runs of the same work, with the mean time and memory of each op and region.

    The mean is over the middle third of the runs ranked by time: outliers have no effect, and the times of modules add
    up, unlike medians. Runs that did other work than the last one are ignored. `about` has the numbers of runs.
    """
    last = traces[-1]
    same_work = [trace for trace in traces if _list_work(trace) == _list_work(last)]
    trimmed = len(same_work) // 3  # at each end
    middle = sorted(same_work, key=_duration_of_run)[trimmed : len(same_work) - trimmed]
    about = {**last.about, "runs": str(len(same_work)), "averaged": _describe_mean(len(middle), len(same_work))}
    if len(same_work) < len(traces):
        about["differed"] = f"{len(traces) - len(same_work)} of {len(traces)} runs did other work, and are ignored"
    rows = zip(*(_ordered_events(trace) for trace in middle), strict=True)
    return replace(last, events=tuple(_mean(row) for row in rows), about=about)


def _describe_mean(middle: int, runs: int) -> str:
    if runs == 1:
        return "one run"
    if middle in (1, runs):
        return f"the {'middle' if middle == 1 else 'mean'} of {runs} runs"
    dropped = (runs - middle) // 2
    extremes = "the fastest and the slowest" if dropped == 1 else f"the {dropped} fastest and the {dropped} slowest"
    return f"the mean of {middle} of {runs} runs (without {extremes})"


def _duration_of_run(trace: Trace) -> int:
    times = [(event.start_ns or 0, event.duration_ns or 0) for event in trace.events or ()]
    return max(map(sum, times), default=0) - min((start for start, _ in times), default=0)


def _ordered_events(trace: Trace) -> list[Event]:
    """Return the events without frees of storages, whose order depends on Python's garbage collector."""
    return [event for event in trace.events or () if event.kind != "free"]


def _list_work(trace: Trace) -> list[tuple[Any, ...]]:
    return [(event.kind, event.item, event.stack, event.phase) for event in _ordered_events(trace)]


def _mean(events: tuple[Event, ...]) -> Event:
    columns = {name: [getattr(event, name) for event in events] for name in _MEASURED}
    known = {name: [value for value in values if value is not None] for name, values in columns.items()}
    changes: dict[str, Any] = {name: round(fmean(values)) for name, values in known.items() if values}
    return events[-1]._replace(**changes)
