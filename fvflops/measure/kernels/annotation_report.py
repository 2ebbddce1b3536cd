"""Report of annotated traces: each one's FLOPs and FLOP/s, what could not be matched, and the events by name."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from fvflops.measure.kernels.annotation import AnnotatedTrace
from fvflops.reports.document import Document, Items, Part, Table, Value, number_column, text_column
from fvflops.trace.kernel_events import KernelRow
from fvflops.units import format_percent, format_seconds

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

    `matched` is the share of the model's FLOPs whose ops have an event in the trace. Rows of events are those of the
    ops that have FLOPs of their own, so that they add up; their times are those of their kernels if they have any, else
    those on the CPU.
    """
    notes = _NOTES if any(trace.share() is not None for _, trace in traces) else ()
    table = Table("traces", _TRACE_COLUMNS, [_row(path, trace) for path, trace in traces], noun="trace", notes=notes)
    parts: list[Part] = [table]
    for path, trace in traces:
        lines = trace.about()[1:]
        if lines:
            parts.append(Items(path, lines))
    rows = [row for _, trace in traces for row in trace.key_averages() if row.self_flops]
    parts.append(Table("events", _EVENT_COLUMNS, _sum_rows(rows), noun="event"))
    return Document("annotation", subject, parts, main="events")


def describe_annotation(trace: AnnotatedTrace) -> Document:
    """Return the report of one trace that is not saved yet, with its largest events."""
    return annotation_report([(trace.path, trace)]).ranked(top=_MAX_ROWS)


def _row(path: str, trace: AnnotatedTrace) -> list[Value]:
    steps, nanoseconds = trace.match.clock()
    seconds, work = nanoseconds / 1e9, trace.work()
    return [
        path,
        trace.rank,
        steps,
        seconds / steps if steps else None,
        work.macs,
        work.flops,
        work.flops / seconds,
        trace.share(),
    ]


def _sum_rows(rows: Sequence[KernelRow]) -> list[list[Value]]:
    """Return a row for all events of one name, of all ranks, the most FLOPs first."""
    groups: dict[str, list[KernelRow]] = defaultdict(list)
    for row in rows:
        groups[row.key].append(row)
    summed: list[list[Value]] = []
    for name, group in groups.items():
        flops = sum(row.self_flops or 0 for row in group)
        seconds = sum(row.device_time_total or row.cpu_time_total for row in group) / 1e6
        macs = sum(row.self_macs or 0 for row in group)
        calls = sum(row.count for row in group)
        summed.append([name, calls, seconds, macs, flops, flops / seconds if seconds else None])
    return sorted(summed, key=lambda row: -float(row[4] or 0))
