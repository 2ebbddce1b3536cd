"""Explain where the time of steps went, from the chrome traces of one or several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from fvflops import paths as files
from fvflops.devices.devices import Device, find_device, resolve_device
from fvflops.explain.op_costs import OpCosts
from fvflops.explain.rank_timeline import RankTimeline, RankWait, build_timeline, find_waits
from fvflops.explain.step_records import CAUSES, IdleRow, StepTimeline, WorkRow, sum_rows
from fvflops.explain.trace_columns import TraceColumns, read_columns
from fvflops.reports.display import Displayed
from fvflops.reports.formats import write_document
from fvflops.text import explaining_arguments, short_repr
from fvflops.trace import TraceError
from fvflops.units import format_percent, format_quantity, format_seconds

_FORMATS = {".json": "json", ".html": "html", ".md": "markdown", ".csv": "csv", ".txt": "text"}


@dataclass(frozen=True, slots=True, repr=False)
class ExplainedTrace(Displayed):
    """Where the time of steps went, by rank: see StepTimeline for the times of a step.

    `timelines` are the ranks, in the order of the files. `device` is the one whose kernel models give expected times,
    None if unknown.
    """

    _report = "fvflops.explain.explain_report:explain_report"

    timelines: tuple[RankTimeline, ...]
    device: Device | None

    def __repr__(self) -> str:
        steps = format_quantity(len(self.steps()), "step")
        return short_repr(self, os.path.basename(self.timelines[0].path), steps, format_seconds(self.total_ns() / 1e9))

    def steps(self) -> list[tuple[RankTimeline, StepTimeline]]:
        """Return the complete steps of all ranks, ProfilerStep#N; of a trace without any, its whole time."""
        named = [(one, [step for step in one.steps if step.host_ns is not None]) for one in self.timelines]
        return [(timeline, step) for timeline, steps in named for step in steps or timeline.steps]

    def work(self, key: Callable[[WorkRow], Hashable] = lambda row: row.kind) -> list[WorkRow]:
        """Return the work of all `steps()`, summed by a key of the rows, by default the class; the longest first."""
        return sum_rows((row for _, step in self.steps() for row in step.work), key)

    def idle(self, key: Callable[[IdleRow], Hashable] = lambda row: row.cause) -> list[IdleRow]:
        """Return the idle time of all `steps()`, summed by a key of the rows, by default the cause; longest first."""
        return sum_rows((row for _, step in self.steps() for row in step.idle), key)

    def waits(self) -> tuple[RankWait, ...]:
        """Return how long each rank's collectives waited for other ranks; empty without several ranks."""
        return find_waits(self.timelines)

    def total_ns(self) -> int:
        """Return the time of all `steps()`: the sum of their rows of work and of idle time."""
        return sum(step.total_ns for _, step in self.steps())

    def about(self) -> list[str]:
        """Return a summary in lines: the steps, how their time divides, and unknown parts."""
        return list(_describe(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a .json file, with all rows and exact numbers, .html, .md, .csv or .txt file."""
        path = os.fspath(path)
        format = _FORMATS.get(os.path.splitext(path)[1].lower())
        if format is None:
            raise ValueError(f"{path}: name a file with {', '.join(_FORMATS)}")
        files.write_text(path, write_document(self._document(), format))


@explaining_arguments
def explain_trace(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, device: str | Device | None = None
) -> ExplainedTrace:
    """Return where the time of steps went, from chrome traces of torch.profiler, .json or .json.gz, one for each rank.

    Each moment of a step belongs to one row: to the kernel that ran, by class of work, or to a cause of idle time, so
    that rows add up to the step to the nanosecond. FLOPs and bytes are known for ops with recorded shapes
    (record_shapes=True), by the convention exact. Expected times are from the kernel models of `plan` for `device`,
    a name or a Device, by default the GPU that the trace names. A trace without kernels is explained by the times of
    its ops. A file that is not a trace, or is truncated, raises TraceError.

    >>> import tempfile, torch
    >>> with torch.profiler.profile(record_shapes=True) as profile:
    ...     y = torch.ones(64, 64) @ torch.ones(64, 64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     profile.export_chrome_trace(f"{folder}/trace.json")
    ...     explained = explain_trace(f"{folder}/trace.json")
    >>> [(row.calls, row.macs) for row in explained.work() if row.kind == "matmul"]
    [(1, 262144)]
    >>> sum(row.ns for row in (*explained.work(), *explained.idle())) == explained.total_ns()
    True
    """
    names = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    if not names:
        raise ValueError("explain_trace needs the path of a trace")
    chosen = None if device is None else resolve_device(device)
    traces = list(map(read_columns, names))
    ranks = [columns.rank for columns in traces if columns.rank is not None]
    if len(set(ranks)) < len(ranks):
        raise TraceError("two traces have the same rank: pass one file for each rank")
    costs = OpCosts(chosen or _find_device(traces[0]))
    return ExplainedTrace(tuple(build_timeline(columns, costs) for columns in traces), costs.device)


def _find_device(columns: TraceColumns) -> Device | None:
    try:
        return find_device(columns.device_name) if columns.device_name else None
    except ValueError:  # a GPU that is not listed has no kernel models
        return None


def _describe(trace: ExplainedTrace) -> Iterator[str]:
    steps, total = trace.steps(), trace.total_ns()
    on_gpu = any(timeline.on_gpu for timeline in trace.timelines)
    each = format_seconds(total / max(len(steps), 1) / 1e9)
    ranks = f" of {len(trace.timelines)} ranks" if len(trace.timelines) > 1 else ""
    parts = [
        ("compute", sum(step.compute_ns for _, step in steps)),
        ("communication that nothing hides", sum(step.exposed_communication_ns for _, step in steps)),
        ("copies that nothing hides", sum(step.exposed_memcpy_ns for _, step in steps)),
        ("idle", sum(step.idle_ns for _, step in steps)),
    ]
    shares = ", ".join(f"{name} {format_percent(ns, total)}" for name, ns in parts if ns and total)
    yield f"{format_quantity(len(steps), 'step')}{ranks}, {each} each: {shares or 'no time'}"
    if not on_gpu:
        yield "no kernels: times of ops on the host, without nested ops"
    for row in trace.idle()[:1]:
        if row.ns * 20 > total:
            yield f"most idle time: {CAUSES[row.cause]}, {format_percent(row.ns, total)} of the time"
    if waits := trace.waits():
        last = min(waits, key=lambda wait: wait.waiting_ns)
        waiting = format_seconds(max(wait.waiting_ns for wait in waits) / 1e9)
        yield f"ranks wait for others in collectives up to {waiting} of the trace; least rank {last.rank}, the slowest"
    work = [row for _, step in steps for row in step.work]
    kernel_ns = sum(row.kernel_ns for row in work)
    graphs = sum(row.kernel_ns for row in work if row.is_graph)
    unlinked = sum(row.kernel_ns for row in work if not row.op and not row.is_graph)
    if graphs:
        yield f"{format_percent(graphs, kernel_ns)} of the kernel time is in captured graphs: kernel names, no ops"
    if on_gpu and unlinked * 100 > kernel_ns:
        yield f"{format_percent(unlinked, kernel_ns)} of the kernel time has no op in the trace: kernel names only"
    for columns in (timeline.columns for timeline in trace.timelines):
        negative, unreadable = (format_quantity(n, "event") for n in (columns.negative, columns.unreadable))
        if columns.negative or columns.unreadable:
            taken = f"{negative} of negative duration taken as 0"
            yield f"{columns.path}: {taken}, {unreadable} with invalid values ignored"
