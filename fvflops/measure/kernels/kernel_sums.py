"""Sum torch.profiler's events by name, and optionally by module, shapes and stack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from statistics import median

from fvflops.measure.kernels.matching import KernelMatch
from fvflops.measure.kernels.recorded_calls import Work, add_works
from fvflops.trace import Event, Trace, TraceError
from fvflops.trace.kernel_events import KernelEvent, KernelRow, KernelRun

# The name of all module calls in the rows; the column "module" distinguishes them.
MODULE_CALL = "nn.Module call"
_UNKNOWN = None, None  # MACs and FLOPs
# Characters that separate frames and weights in collapsed stacks, as torch.profiler replaces them.
_SEPARATORS = str.maketrans(" ;\t\n", "____")


def sum_kernels(
    match: KernelMatch, *, by_module: bool = False, by_shape: bool = False, stack_frames: int = 0
) -> list[KernelRow]:
    """Return a row for all events of one name, as torch.profiler's `key_averages` does, in order of first occurrence.

    Rows are also split by module with `by_module`, by input shapes with `by_shape`, and by the innermost `stack_frames`
    frames of the Python stack. Device events have rows of their own. In the row of module calls, nested calls count
    once; nested ops count twice, as in torch.profiler: only `self` columns add up. Rows of kernels have their part of
    the work of the ops that launched them, and none of their own.
    """
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for index, event in enumerate(match.run.events):
        key: tuple[object, ...] = (_name(event), event.kind == "device", event.kind in ("range", "step", "optimizer"))
        key += (match.modules[index] if by_module else None, event.shapes if by_shape else "")
        key += (event.stack[:stack_frames],)
        groups[key].append(index)
    kernels = divide_work(match)
    rows = []
    for indexes in groups.values():
        events = [match.run.events[index] for index in indexes]
        first = events[0]
        outermost = _outermost(match.run, indexes) if first.kind == "module" else indexes
        outermost_events = [match.run.events[index] for index in outermost]
        work = add_works(kernels.get(index, match.work[index]) for index in outermost) or _UNKNOWN
        self_work = add_works(match.self_work[index] for index in indexes) or _UNKNOWN
        row = KernelRow(
            key=_name(first),
            module=match.modules[indexes[0]] if by_module else None,
            count=len(events),
            cpu_time_total=sum(event.duration_ns for event in outermost_events if event.kind != "device") / 1000,
            self_cpu_time_total=sum(event.self_ns for event in events if event.kind != "device") / 1000,
            device_time_total=sum(event.device_ns for event in outermost_events) / 1000,
            self_device_time_total=sum(event.self_device_ns for event in events) / 1000,
            cpu_memory_usage=sum(event.memory for event in outermost_events),
            self_cpu_memory_usage=sum(event.self_memory for event in events),
            device_memory_usage=sum(event.device_memory for event in outermost_events),
            self_device_memory_usage=sum(event.self_device_memory for event in events),
            macs=work[0],
            self_macs=self_work[0],
            flops=work[1],
            self_flops=self_work[1],
            input_shapes=first.shapes if by_shape else "",
            stack=first.stack[:stack_frames],
        )
        rows.append(row)
    return rows


def list_stacks(match: KernelMatch, metric: str) -> Iterator[str]:
    """Yield the Python stack of each event with its own "macs" or "flops", as lines of collapsed stacks."""
    for event, work in zip(match.run.events, match.self_work, strict=True):
        value = 0 if work is None else work.macs if metric == "macs" else work.flops
        if event.stack and value:
            frames = [frame.translate(_SEPARATORS) for frame in reversed(event.stack)]
            yield f"{';'.join(frames)} {value}\n"


def _name(event: KernelEvent) -> str:
    return MODULE_CALL if event.kind == "module" else event.name


def _outermost(run: KernelRun, indexes: list[int]) -> list[int]:
    """Return the outermost events."""
    group = set(indexes)
    outermost = []
    for index in indexes:
        parent = run.events[index].parent
        while parent >= 0 and parent not in group:
            parent = run.events[parent].parent
        if parent < 0:
            outermost.append(index)
    return outermost


def divide_work(match: KernelMatch) -> dict[int, Work]:
    """Return kernel → its part, by time, of the work of the op that launched it; copies have none.

    The op is the innermost around the launch that has work of its own. The parts add up to it.
    """
    events = match.run.events
    kernels: dict[int, list[int]] = defaultdict(list)
    for event_index, event in enumerate(events):
        if event.kind == "device" and not event.name.startswith(("Memcpy", "Memset")):
            owner = event.parent
            while owner >= 0 and not (events[owner].kind == "op" and match.self_work[owner] is not None):
                owner = events[owner].parent
            if owner >= 0:
                kernels[owner].append(event_index)
    works: dict[int, Work] = {}
    for owner, launched in kernels.items():
        work, total = match.self_work[owner], sum(events[index].duration_ns for index in launched)
        assert work is not None
        done = Work()
        time = 0
        for event_index in launched:  # cumulative, so that the rounded parts add up
            time += events[event_index].duration_ns
            share = Work(*(value * time // total if total else 0 for value in work))
            works[event_index] = share - done
            done = share
    return works


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
