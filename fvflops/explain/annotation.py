"""Annotate a chrome trace that torch.profiler wrote earlier, possibly in another process, with a model's counts."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.capture.errors.model_check import trace_of
from fvflops.counting import TableCostModel
from fvflops.explain.time_by_op import GRAPH_LAUNCHES, IDLE, NO_OP, OTHER_OPS, OpTime, TimeByOp, divide_time
from fvflops.explain.trace_events import TraceEvents, read_events
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.garbage_collector import gc_paused
from fvflops.measure.kernels.kernel_sums import KernelAverages, describe_ledger, list_calls, sum_kernels
from fvflops.measure.kernels.matching import KernelMatch, match_kernels
from fvflops.measure.kernels.profiler_trace import ChromeTrace, TraceStream, annotate, read_document, write_document
from fvflops.measure.kernels.recorded_calls import NO_WORK, ShapeCosts, Work, add_works
from fvflops.reports.display import Displayed
from fvflops.reports.document import Document, Items, Part, Table, Value, number_column, text_column
from fvflops.text import explaining_arguments, short_repr
from fvflops.trace import StopsAt, Trace, TraceError
from fvflops.trace.calls import packet_of
from fvflops.units import flops_to_string, format_percent, format_quantity, format_seconds, format_size


@dataclass(frozen=True, slots=True, repr=False)
class AnnotatedTrace(Displayed):
    """A chrome trace with the modules, MACs, FLOPs and bytes of its events.

    `match` has them for each event, `rank` is its process's, None if not distributed. FLOPs are 2 per
    multiply-add and all other operations; `table` says which ops count.
    """

    _report = "fvflops.explain.annotation:describe_annotation"

    path: str
    match: KernelMatch
    table: FormulaTable
    events: TraceEvents
    document: ChromeTrace

    def __repr__(self) -> str:
        return short_repr(self, os.path.basename(self.path), self.about()[0])

    @property
    def rank(self) -> int | None:
        """Rank of the process, None if it was not distributed."""
        return self.events.rank

    def share(self) -> float | None:
        """Return the share of the recorded FLOPs, 0 to 1, whose ops have an event; None without a model."""
        ledger = self.match.ledger
        return ledger.landed_flops / ledger.recorded_flops if ledger.recorded_flops else None

    def work(self) -> Work:
        """Return the MACs and FLOPs of all events: the sums of the rows' `self_macs` and `self_flops`."""
        return add_works(self.match.self_work) or NO_WORK

    def key_averages(self, group_by_input_shape: bool = False, *, group_by_module: bool = False) -> KernelAverages:
        """Return a row for all events of one name, as torch.profiler does; shapes need record_shapes=True."""
        rows = sum_kernels(self.match, by_module=group_by_module, by_shape=group_by_input_shape)
        return KernelAverages(rows, "\n".join(self.about()))

    def time_by_op(self) -> TimeByOp:
        """Return the time of the kernels, or of the ops of a trace without kernels, by op with FLOPs."""
        return divide_time(self.match, self.events.graph_kernels)

    def about(self) -> list[str]:
        """Return a summary in lines: the steps, their FLOPs and FLOP/s, and unmatched ops."""
        steps, nanoseconds = self.match.clock()
        ledger = self.match.ledger
        flops = self.work().flops
        each = f"{format_seconds(nanoseconds / max(steps, 1) / 1e9)} each" if steps else "none complete"
        counted = f"{format_size(flops)} FLOPs on events (2 per MAC, table {self.table.name})"
        rate = flops_to_string(flops * 1e9 / nanoseconds)
        lines = [f"{format_quantity(steps, 'step')}, {each}; {counted}, {rate}"]
        if ledger.recorded_flops:
            share = format_percent(ledger.landed_flops, ledger.recorded_flops)
            missing = format_size(ledger.recorded_flops - ledger.landed_flops)
            lines.append(f"{share} of the model's FLOPs have an event; {missing} FLOPs have none")
        if ledger.other_shapes:
            why = "events whose input shapes differ from the model's, counted by their own shapes"
            lines.append(f"{why}: {list_calls(ledger.other_shapes)}")
        if unreadable := self.events.unreadable:
            lines.append(f"{format_quantity(unreadable, 'event')} with invalid values ignored")
        return lines + describe_ledger(ledger, self.table)

    @gc_paused()
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the chrome trace with its annotations, compressed if the path ends with .gz."""
        metadata: dict[str, Any] = {"about": self.about(), "table": self.table.name, "FLOPs per MAC": 2}
        document = annotate(self.document, self.match, self.events.positions, metadata)
        write_document(document, os.fspath(path))


@gc_paused()
@explaining_arguments
def annotate_trace(
    path: str | os.PathLike[str],
    counted: FlopCountAnalysis | Trace | None = None,
    *,
    table: str | FormulaTable = "exact",
) -> AnnotatedTrace:
    """Return a chrome trace of torch.profiler, .json or .json.gz, with the modules and FLOPs of its events.

    `counted` is an analysis or a Trace of one step of the same work, such as `TrainingStepAnalysis` with the trace's
    inputs and optimizer; its ops are matched with the events of each step by order and name, and by shapes if the trace
    has them (record_shapes=True). Without it, or where shapes differ, an event is counted by its own shapes, without a
    module. A file that is no such trace raises TraceError; so does a trace without shapes if `counted` is None.

    >>> import tempfile, torch
    >>> model, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    >>> with torch.profiler.profile() as profile:
    ...     y = model(x)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     profile.export_chrome_trace(f"{folder}/trace.json")
    ...     annotated = annotate_trace(f"{folder}/trace.json", FlopCountAnalysis(model, x))
    >>> annotated.share(), [(row.key, row.macs, row.flops) for row in annotated.key_averages() if row.flops]
    (1.0, [('aten::linear', 24, 56)])
    """
    table = resolve_table(table)
    cost_model = TableCostModel(table, "flops")
    name = os.fspath(path)
    document = read_document(name)
    events = read_events(document, name)
    trace = _read_trace(counted, cost_model.stops_at)
    if trace is None and not events.has_shapes:
        raise TraceError(f"{name} has no input shapes: pass the model, or record the trace with record_shapes=True")
    by_shapes = ShapeCosts(events.inputs, table, cost_model) if events.has_shapes else None
    match = match_kernels(events.run, trace, cost_model, by_shapes=by_shapes)
    return AnnotatedTrace(name, match, table, events, document)


def find_device(paths: Sequence[str]) -> str | None:
    """Return "cuda" if one of several chrome traces has kernels of a GPU, else None."""
    return "cuda" if any(event.get("cat") == "kernel" for path in paths for event in TraceStream(path)) else None


def _read_trace(counted: FlopCountAnalysis | Trace | None, stops: StopsAt) -> Trace | None:
    """Return the Trace of one step; one that has decomposed an op of the table raises TraceError."""
    if counted is None:
        return None
    trace = trace_of(counted)
    if trace.events is None:
        raise TraceError("the Trace has no events, since it is aggregated: pass the Trace of a single step")
    # An op that the Trace has as a whole, though the table counts ops inside it, is counted by the ops in its event.
    if missing := sorted({packet_of(name) for name in trace.decomposed if name in stops}):
        remedy = "to count that op as a whole, record the model again"
        raise TraceError(f"this trace has decomposed {', '.join(missing)}: {remedy}")
    return trace


_MAX_ROWS = 40  # events of a trace that is printed
_TRACE_COLUMNS = (
    text_column("trace", "annotated trace", form=os.path.basename),
    number_column("rank", form=str),
    number_column("steps", form=str),
    number_column("seconds", "time/step", form=format_seconds),
    replace(number_column("macs", "MACs"), hide_order=1),
    number_column("flops", "FLOPs (2 per MAC)"),
    number_column("flops_per_second", "FLOP/s"),
    number_column("share", "matched", form=lambda share: format_percent(round(share * 10**6), 10**6)),
)
_NOTES = ("matched: share of the model's FLOPs whose ops have an event in the trace.",)
_MAX_OTHERS = 4
_MEANINGS = {
    OTHER_OPS: "kernels of ops without FLOPs, such as copies, and of fused ops; or the CPU time of these",
    GRAPH_LAUNCHES: "kernels that CUDA or HIP graphs launched; the trace does not name their ops",
    NO_OP: "kernels that the trace links to no op",
    IDLE: "time without a kernel, or on the CPU without an op",
}
_EVENT_COLUMNS = (
    text_column("event"),
    number_column("calls", form=str),
    number_column("seconds", "time", form=format_seconds),
    number_column("macs", "MACs"),
    number_column("flops", "FLOPs"),
    number_column("flops_per_second", "FLOP/s"),
)


def annotation_report(traces: Sequence[tuple[str, AnnotatedTrace]], *, subject: str = "") -> Document:
    """Return the report of traces, each with the path of its annotated file; `subject` is the model.

    `matched` is the share of the model's FLOPs whose ops have an event in the trace. Rows of events are ops with FLOPs
    of their own and the time without FLOPs; they add up to the time of all kernels, or of all ops on a CPU, and of the
    time without one.
    """
    divided = [(path, trace.time_by_op()) for path, trace in traces]
    parts: list[Part] = [Items(path, lines) for path, times in divided if (lines := _warn_of_missing(times))]
    notes = _NOTES if any(trace.share() is not None for _, trace in traces) else ()
    summary = [_row(path, trace) for path, trace in traces]
    parts.append(Table("traces", _TRACE_COLUMNS, summary, noun="trace", notes=notes))
    for (path, trace), (_, times) in zip(traces, divided, strict=True):
        largest = times.others.most_common(_MAX_OTHERS)
        others = ", ".join(f"{name} {format_seconds(time / 1e9)}" for name, time in largest)
        if lines := trace.about()[1:] + [f"{OTHER_OPS}, without FLOPs: {others}"] * bool(others):
            parts.append(Items(path, lines))
    rows = _sum_rows([row for _, times in divided for row in times.rows])
    names = {row[0] for row in rows}
    meanings = [f"{name}: {meaning}." for name, meaning in _MEANINGS.items() if name in names]
    parts.append(Table("events", _EVENT_COLUMNS, rows, noun="event", notes=meanings))
    return Document("annotation", subject, parts, main="events")


def describe_annotation(trace: AnnotatedTrace) -> Document:
    """Return the report of one trace that is not saved yet, with its largest events."""
    return annotation_report([(trace.path, trace)]).ranked(top=_MAX_ROWS)


def _row(path: str, trace: AnnotatedTrace) -> list[Value]:
    steps, nanoseconds = trace.match.clock()
    seconds, work = nanoseconds / 1e9, trace.work()
    each = seconds / steps if steps else None
    return [path, trace.rank, steps, each, work.macs, work.flops, work.flops / seconds, trace.share()]


def _warn_of_missing(times: TimeByOp) -> list[str]:
    """Return a line if most of the time is without FLOPs."""
    if times.counted_ns * 2 >= times.busy_ns:
        return []
    counted = format_percent(times.counted_ns, times.busy_ns) if times.counted_ns else "none"
    return [f"most of the time is without FLOPs: {counted} of {format_seconds(times.busy_ns / 1e9)} has FLOPs"]


def _sum_rows(rows: Sequence[OpTime]) -> list[list[Value]]:
    """Return a row for all events of one name, of all ranks, the most FLOPs first and idle time last."""
    groups: dict[str, list[OpTime]] = defaultdict(list)
    for row in rows:
        groups[row.name].append(row)
    summed: list[list[Value]] = []
    for name, group in groups.items():
        work = add_works(row.work for row in group) or NO_WORK
        seconds = sum(row.nanoseconds for row in group) / 1e9
        calls = None if name == IDLE else sum(row.calls or 0 for row in group)
        counted = [work.macs, work.flops, work.flops / seconds if seconds else None] if work.flops else [None] * 3
        summed.append([name, calls, seconds, *counted])
    return sorted(summed, key=lambda row: (-float(row[4] or 0), row[0] == IDLE, -float(row[2] or 0)))
