"""Add torch.profiler's times and memory to the Trace of the step that it profiled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import median

from fvflops.measure.kernels.matching import KernelMatch
from fvflops.trace import Event, Trace, TraceError
from fvflops.trace.kernel_events import KernelEvent

_COLUMNS = {"time": ("start_ns", "duration_ns"), "memory": ("memory_before", "memory_after", "memory_peak")}
_ALL_COLUMNS = tuple(column for columns in _COLUMNS.values() for column in columns)


def overlay_times(match: KernelMatch, *, measure: Collection[str] = ("time", "memory")) -> Trace:
    """Return the Trace with the times and memory of the events matched with its ops and module calls.

    `measure` selects "time", "memory" or both; memory is that of the CPU's allocator, and needs profile_memory=True.
    Values are medians over the steps. On a device the time of an op is that of its kernels. An op without an event
    keeps the Trace's values, and the Trace's `about` has the number of these ops. A match whose Trace has no events
    raises TraceError.
    """
    trace = match.trace
    if trace is None or trace.events is None:
        raise TraceError("no Trace with events to add torch.profiler's times to: record one step of the work")
    step_starts: dict[int, int] = {}
    for event_index, event in enumerate(match.run.events):
        step_starts.setdefault(match.steps[event_index], event.start_ns)
    complete_steps = set(match.complete_steps())
    # Index of an event of the Trace → its values in each step, in the order of _ALL_COLUMNS.
    rows: dict[int, list[tuple[int | None, ...]]] = defaultdict(list)
    for event_index, index in match.call_of_event.items():
        step = match.steps[event_index]
        if step in complete_steps:
            rows[index].append(_measure(match.run.events[event_index], step_starts[step]))
    columns = [column for name in ("time", "memory") if name in measure for column in _COLUMNS[name]]
    events = [
        _with_medians(event, rows[index], columns) if index in rows else event
        for index, event in enumerate(trace.events)
    ]
    filled = {column for event in events for column in _ALL_COLUMNS if getattr(event, column) is not None}
    measured = [name for name, columns in _COLUMNS.items() if filled.issuperset(columns)]
    about = {"measured": ", ".join(measured), "measured_by": "torch.profiler", "runs": str(len(complete_steps))}
    ops = [index for index, event in enumerate(trace.events) if event.kind == "op"]
    missing = sum(index not in rows for index in ops)
    if missing:
        about["unmeasured"] = f"{missing} of {len(ops)} ops have no event of their own"
    return replace(trace, events=tuple(events), about={**trace.about, **about})


def _measure(event: KernelEvent, step_start: int) -> tuple[int | None, ...]:
    """Return the values of _ALL_COLUMNS for an event."""
    duration = event.device_ns or event.duration_ns
    return event.start_ns - step_start, duration, event.before, event.after, event.peak


def _with_medians(event: Event, rows: Sequence[tuple[int | None, ...]], columns: Sequence[str]) -> Event:
    """Return an event of the Trace with the medians of some columns; a column without values is unchanged."""
    medians = {}
    for column, values in zip(_ALL_COLUMNS, zip(*rows, strict=True), strict=True):
        numbers = [value for value in values if value is not None]
        if column in columns and numbers:
            medians[column] = round(median(numbers))
    return event._replace(**medians)
