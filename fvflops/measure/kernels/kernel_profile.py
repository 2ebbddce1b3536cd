"""Profile kernels: torch.profiler's events of a run, with their modules, FLOPs and FLOP/s."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Annotated, Any, TypedDict

import torch
from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity

from fvflops import paths
from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.analysis.recording import record
from fvflops.analysis.steps import ACTIVE, Schedule, action_at
from fvflops.capture.instrument.torch_profiler import module_ranges, read_run
from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.model.read_module_tree import is_compiled, unwrap_data_parallel
from fvflops.capture.restore.interrupts import deferred
from fvflops.capture.run import Model
from fvflops.capture.session import Session
from fvflops.counting import TableCostModel
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.measure.kernels.kernel_sums import KernelAverages, describe_ledger, list_stacks, overlay_times, sum_kernels
from fvflops.measure.kernels.matching import KernelMatch, match_kernels
from fvflops.measure.kernels.profiler_trace import annotate, find_by_id, read_document, write_document
from fvflops.measure.kernels.recorded_calls import Work
from fvflops.text import Unpack, explaining_arguments, short_repr
from fvflops.torch_internals import ExperimentalConfig, is_profiler_enabled
from fvflops.trace import Trace, TraceError
from fvflops.trace.kernel_events import KernelLedger, KernelRun
from fvflops.units import flops_to_string, format_quantity, format_seconds, format_size

# Weights of stacks: times that torch.profiler writes, and the work of events.
_TORCH_METRICS = ("self_cpu_time_total", "self_cuda_time_total", "self_xpu_time_total")
_WORK_METRICS = ("self_macs", "self_flops")
_LOGGER = logging.getLogger("fvflops")


class KernelOptions(TypedDict, total=False):
    """Options of a profile of kernels, as KernelProfile describes them."""

    activities: Annotated[Iterable[Any] | None, None]
    record_shapes: Annotated[bool, False]
    profile_memory: Annotated[bool, False]
    with_stack: Annotated[bool, False]
    table: Annotated[str | FormulaTable, "default"]
    chrome_trace: Annotated[str | os.PathLike[str] | None, None]


class KernelProfile:
    """A context manager that runs torch.profiler and adds modules, FLOPs and FLOP/s to its events.

    The arguments are as for `torch.profiler.profile`; `schedule` may be fvflops' own, and `on_trace_ready` is called
    with this profile. Calls of `model`'s modules are marked as ranges; nothing else is instrumented, so the times are
    torch.profiler's. A wrapper for data parallelism has no row. An event of the backward pass belongs to the module
    whose forward pass created it.

    MACs and FLOPs (2 per multiply-add and all other operations), of the ops that `table` counts, come from a recording
    of one step. With a schedule that has a step before its first active one, that step is recorded (for compiled code
    the first step, which then runs eagerly); otherwise pass `count` a function that runs one step. `chrome_trace` is a
    file to which the last cycle is exported at the end; an unwritable path raises OSError first. As with
    torch.profiler, results are for the last cycle; a run that raises keeps its completed steps.

    >>> from fvflops import schedule
    >>> model = nn.Linear(3, 2)
    >>> with KernelProfile(model, schedule=schedule(warmup=1, active=2, repeat=1)) as profile:
    ...     for _ in range(3):
    ...         model(torch.ones(4, 3)).sum().backward()
    ...         profile.step()
    >>> profile.total(), {row.key: (row.count, row.flops) for row in profile.key_averages()}["aten::addmm"]
    (96, (2, 96))
    """

    @explaining_arguments
    def __init__(
        self,
        model: Model | None = None,
        *,
        schedule: Schedule | None = None,
        on_trace_ready: Callable[[KernelProfile], Any] | None = None,
        **options: Unpack[KernelOptions],
    ) -> None:
        chrome_trace, with_stack = options["chrome_trace"], options["with_stack"]
        if not (model is None or callable(model)):
            raise TypeError(f"the model must be a torch.nn.Module, a function or None; got {type(model).__name__}")
        self._chrome_trace = None if chrome_trace is None else _check_path(chrome_trace)
        self._table = resolve_table(options["table"])
        self._cost_model = TableCostModel(self._table, "flops")
        self._model = model if model is not None else _no_model
        self._model_index = ModelIndex(unwrap_data_parallel(model) if isinstance(model, nn.Module) else self._model)
        self._module = model if isinstance(model, nn.Module) else self._model_index.owner
        self._schedule = schedule
        self._on_trace_ready = on_trace_ready
        self._counted_trace: Trace | None = None
        self._session: Session | None = None
        self._needs_count = schedule is not None
        self._run: KernelRun | None = None
        self._match: KernelMatch | None = None
        self._exported: tuple[KernelRun | None, tempfile.TemporaryDirectory[str] | None] = (None, None)
        self._complete = True
        self._failure: BaseException | None = None
        self._stage = "new"  # then "open" in the with block, "closed" after it
        self._step = 0
        self._stack = ExitStack()
        self._profiler = torch.profiler.profile(
            activities=_check_activities(options["activities"]),
            record_shapes=options["record_shapes"],
            profile_memory=options["profile_memory"],
            with_stack=with_stack,
            # Without it torch.profiler's events have no stacks to group by.
            experimental_config=ExperimentalConfig(verbose=True) if with_stack else None,
            schedule=None if schedule is None else lambda step: ProfilerAction[action_at(schedule, step).upper()],
            on_trace_ready=self._end_cycle,
        )

    def __enter__(self) -> KernelProfile:
        if self._stage != "new":
            raise RuntimeError("a profile can be entered only once: create another")
        if is_profiler_enabled():
            # torch would silently discard the events of the first.
            raise RuntimeError("torch.profiler is already running, and only one can run at a time: end that one first")
        try:
            with deferred():
                self._stage = "open"
                with ExitStack() as stack:
                    stack.enter_context(module_ranges(self._model_index))
                    self._profiler.__enter__()
                    stack.push(self._profiler)
                    self._stack = stack.pop_all()
                self._begin_count()
        except BaseException:
            self._leave(complete=False)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._leave(complete=error is None)
        if error is None:
            self._raise_failure()
        if self._chrome_trace is not None and self._run is not None:
            self.export_chrome_trace(self._chrome_trace)

    def _leave(self, *, complete: bool) -> None:
        with deferred():
            self._stage = "closed"
            self._complete = complete
            try:
                self._end_count(complete=complete and self._step > 0)
            finally:
                self._stack.close()

    def __repr__(self) -> str:
        name = "" if self._model is _no_model else type(self._model).__name__
        if self._run is None:
            return short_repr(self, name, {"new": "not entered yet", "open": "recording"}.get(self._stage, "no events"))
        return short_repr(self, name, f"{len(self._run.events):,} events", f"convention {self._table.name}")

    def __str__(self) -> str:
        return repr(self) if self._run is None else str(self.key_averages())

    @property
    def profiler(self) -> torch.profiler.profile:
        """The torch.profiler.profile that this one uses."""
        return self._profiler

    @property
    def step_num(self) -> int:
        """The number of the current step, from 0."""
        return self._step

    def step(self) -> None:
        """Mark the end of a step; outside the with block it raises RuntimeError."""
        if self._stage != "open":
            raise RuntimeError("step() marks the end of a step: call it inside the with block")
        with deferred():
            self._end_count()
            self._step += 1
            self._profiler.step()
        self._raise_failure()
        with deferred():
            self._begin_count()

    def count(self, run: Callable[[], Any]) -> KernelProfile:
        """Record the FLOPs of a function that runs one step; return this profile."""
        if self._stage == "open":
            raise RuntimeError("count() runs work that must not be timed: call it before or after the with block")
        with record(self._module, table=self._table, warn=False) as recording:
            run()
        return self.count_with(recording.trace())

    def count_with(self, trace: Trace) -> KernelProfile:
        """Use the FLOPs of a Trace of one step, such as `record(...).trace()`; return this profile."""
        self._counted_trace = trace
        self._needs_count = False
        self._match = None
        return self

    def match(self) -> KernelMatch:
        """Return torch.profiler's events with their modules, phases and FLOPs; without events it raises TraceError."""
        if self._run is None:
            raise TraceError(self._why_no_events())
        if self._match is None:
            self._match = match_kernels(self._run, self._counted_trace, self._cost_model)
        return self._match

    def key_averages(
        self, group_by_input_shape: bool = False, group_by_stack_n: int = 0, *, group_by_module: bool = False
    ) -> KernelAverages:
        """Return a row for all events of one name, as torch.profiler does, and with `group_by_module` of one module.

        Shapes need record_shapes=True, stacks with_stack=True.
        """
        by = {"by_module": group_by_module, "by_shape": group_by_input_shape}
        rows = sum_kernels(self.match(), **by, stack_frames=group_by_stack_n)
        return KernelAverages(rows, "\n".join(self.about()))

    def total(self) -> int:
        """Return the FLOPs of one step, 2 per multiply-add and all others; without a count it raises TraceError.

        It is the sum of the rows' `self_flops`, divided by the steps.
        """
        return self._total().flops

    def macs(self) -> int:
        """Return the multiply-adds of one step; without a count it raises TraceError."""
        return self._total().macs

    def _total(self) -> Work:
        if (total := self.match().total) is None:
            remedy = "pass a schedule with a step before the active ones, or use count()"
            raise TraceError(f"no FLOPs were counted: {remedy}")
        return total

    def flops_per_second(self) -> float:
        """Return the FLOP/s of all completed steps, by their wall-clock time; without one it raises TraceError."""
        steps, nanoseconds = self.match().clock()
        if not steps:
            raise TraceError("no step was completed: there is no time to divide its FLOPs by")
        return self.total() * steps * 1e9 / nanoseconds

    def ledger(self) -> KernelLedger:
        """Return which counted ops have no event, and which events have no counted op."""
        return self.match().ledger

    def trace(self) -> Trace:
        """Return the Trace of a step with torch.profiler's times, and with profile_memory=True its ops' memory.

        Times and memory are medians over the steps. All reports and exports accept it. Without a count it raises
        TraceError.
        """
        self.total()
        return overlay_times(self.match())

    def analysis(self) -> FlopCountAnalysis:
        """Return the analysis of `trace()`."""
        return FlopCountAnalysis.from_trace(self.trace(), table=self._table)

    def about(self) -> list[str]:
        """Return a summary in lines: the steps, their FLOPs, and the unmatched ops and events."""
        match = self.match()
        steps, nanoseconds = match.clock()
        if not steps:
            return ["torch.profiler's times of an incomplete step"]
        each = f"{format_seconds(nanoseconds / steps / 1e9)} each"
        timed = f"torch.profiler's times of {format_quantity(steps, 'step')}, {each}"
        if match.total is None:
            return [timed, "no FLOPs: pass a schedule with a step before the active ones, or use count()"]
        flops, rate = format_size(match.total.flops), flops_to_string(self.flops_per_second())
        timed += f"; {flops} FLOPs a step (2 per MAC, table {self._table.name}), {rate}"
        return [timed, *describe_ledger(match.ledger, self._table)]

    def export_chrome_trace(self, path: str | os.PathLike[str], use_python_export: bool = False) -> None:
        """Write torch.profiler's chrome trace of the last cycle with the module, FLOPs and FLOP/s in each event's args.

        A path that cannot be written raises OSError first. `use_python_export`, which torch.profiler's handlers pass,
        has no effect.
        """
        name = _check_path(path)
        match = self.match()
        document = read_document(self._export())
        write_document(annotate(document, match, find_by_id(document, match), {"about": self.about()}), name)

    def export_stacks(self, path: str | os.PathLike[str], metric: str = "self_cpu_time_total") -> None:
        """Write the Python stacks of events with a weight, for flamegraph.pl; it needs with_stack=True.

        `metric` is one of torch.profiler's, "self_cpu_time_total" or "self_cuda_time_total" (µs), whose file is its
        own, or "self_macs" or "self_flops" of all steps.
        """
        metrics = (*_TORCH_METRICS, *_WORK_METRICS)
        if metric not in metrics:
            raise ValueError(f"metric must be one of {', '.join(metrics)}; got {metric!r}")
        self._require_options("export_stacks", "with_stack")
        name = _check_path(path)
        match = self.match()
        if metric in _TORCH_METRICS:
            self._profiler.export_stacks(name, metric)
            return
        self._total()
        paths.write_text(name, list_stacks(match, metric.removeprefix("self_")))

    def export_memory_timeline(self, path: str | os.PathLike[str], device: str | None = None) -> None:
        """Write torch.profiler's timeline of memory by category: .html, .json, .json.gz or .raw.json.gz.

        It needs record_shapes, profile_memory and with_stack=True, and a page matplotlib; a torch that no longer has it
        raises RuntimeError.
        """
        self._require_options("export_memory_timeline", "record_shapes", "profile_memory", "with_stack")
        name = _check_path(path)
        self.match()
        export = getattr(self._profiler, "export_memory_timeline", None)
        if export is None:
            remedy = "use torch.cuda.memory._record_memory_history"
            raise RuntimeError(f"torch {torch.__version__} has no export_memory_timeline: {remedy}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch recommends CUDA's own history
            export(name, device)

    def _require_options(self, method: str, *options: str) -> None:
        missing = [f"{option}=True" for option in options if not getattr(self._profiler, option)]
        if missing:
            raise ValueError(f"{method} needs {' and '.join(missing)}: pass {'it' if len(missing) == 1 else 'them'}")

    def _export(self) -> str:
        """Return the path of torch.profiler's own chrome trace, which it can write only once."""
        run, folder = self._exported
        if run is not self._run or folder is None:
            folder = tempfile.TemporaryDirectory()
            self._profiler.export_chrome_trace(os.path.join(folder.name, "trace.json"))
            self._exported = self._run, folder
        return os.path.join(folder.name, "trace.json")

    def _is_active(self, step: int) -> bool:
        return self._schedule is None or action_at(self._schedule, step) in ACTIVE

    def _begin_count(self) -> None:
        """Start recording the current step if it is the one to be counted."""
        if not self._needs_count or self._is_active(self._step):
            return
        if self._is_active(self._step + 1) or (self._module is not None and is_compiled(self._module)):
            self._needs_count = False
            self._session = Session(self._module, stops_at=self._cost_model.stops_at)
            self._session.start()

    def _end_count(self, *, complete: bool = True) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.stop(complete=complete)
            if complete:
                self._counted_trace = session.trace()

    def _end_cycle(self, profiler: torch.profiler.profile) -> None:
        # torch.profiler must not see an error: it would stop twice, which aborts the process. It is raised afterwards.
        try:
            run = read_run(profiler, self._model_index, complete=self._complete)
            steps = sum(event.kind == "step" for event in run.events)
            if run.events and (self._run is None or self._complete or steps > 1):
                self._run, self._match = run, None
            if self._on_trace_ready is not None and self._complete:
                self._on_trace_ready(self)
        except BaseException as error:
            self._failure = error

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _why_no_events(self) -> str:
        if self._stage == "open":
            return "nothing was profiled yet: the first cycle is not complete"
        reason = "nothing ran in the with block"
        if self._stage == "new":
            reason = "the with block was not entered"
        elif self._schedule is not None:
            reason = f"the schedule made none of {format_quantity(self._step, 'step')} active"
        return f"nothing was profiled: {reason}"


def _check_path(path: str | os.PathLike[str]) -> str:
    name = os.fspath(path)
    paths.check_writable(name)
    return name


def _check_activities(activities: Iterable[Any] | None) -> list[Any] | None:
    """Return the activities that this machine has, and warn if CUDA was requested but is missing."""
    if activities is None:
        return None
    requested = list(activities)
    if torch.cuda.is_available():
        return requested
    available = [item for item in requested if not _is_cuda(item)]
    if len(available) < len(requested):
        _LOGGER.warning("this machine has no CUDA: the profile has CPU times only")
    return available or [ProfilerActivity.CPU]


def _is_cuda(activity: Any) -> bool:
    return activity == ProfilerActivity.CUDA or (isinstance(activity, dict) and [*activity] == [ProfilerActivity.CUDA])


def _no_model() -> None:
    """Placeholder for the model where none was passed."""
