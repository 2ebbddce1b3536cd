"""Sum torch.profiler's events by name, and optionally by module, shapes and stack; the rows and their table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from statistics import median

from fvflops.formulas import FormulaTable
from fvflops.measure.kernels.matching import KernelMatch
from fvflops.measure.kernels.recorded_calls import Work, add_works
from fvflops.reports.display_width import text_table
from fvflops.reports.escaping import printable
from fvflops.text import short_repr
from fvflops.trace import Event, Trace, TraceError
from fvflops.trace.kernel_events import KernelEvent, KernelLedger, KernelRow, KernelRun
from fvflops.units import flops_to_string, format_percent, format_quantity, format_seconds, format_size

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
        kind = event.kind == "device", event.kind in ("range", "step", "optimizer")
        split = match.modules[index] if by_module else None, event.shapes if by_shape else ""
        groups[event_name(event), kind, split, event.stack[:stack_frames]].append(index)
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
            key=event_name(first),
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
        value = getattr(work, metric, 0)  # 0 where the work is unknown
        if event.stack and value:
            frames = [frame.translate(_SEPARATORS) for frame in reversed(event.stack)]
            yield f"{';'.join(frames)} {value}\n"


def event_name(event: KernelEvent) -> str:
    return MODULE_CALL if event.kind == "module" else event.name


def _outermost(run: KernelRun, indexes: list[int]) -> list[int]:
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
        done, time = Work(), 0
        for event_index in launched:  # cumulative, so that the rounded parts add up
            time += events[event_index].duration_ns
            share = Work(*(value * time // total if total else 0 for value in work))
            works[event_index] = share - done
            done = share
    return works


_COLUMNS = {"time": ("start_ns", "duration_ns"), "memory": ("memory_before", "memory_after", "memory_peak")}
_ALL_COLUMNS = tuple(column for columns in _COLUMNS.values() for column in columns)


def overlay_times(match: KernelMatch) -> Trace:
    """Return the Trace with the times and memory of the events matched with its ops and module calls.

    Memory is read from the CPU's allocator, and needs profile_memory=True. Values are medians over the steps. On a
    device the time of an op is the time of its kernels. An op without an event keeps the Trace's values, and the
    Trace's `about` has the number of these ops. A match whose Trace has no events raises TraceError.
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
        step, event = match.steps[event_index], match.run.events[event_index]
        if step in complete_steps:
            times = event.start_ns - step_starts[step], event.device_ns or event.duration_ns
            rows[index].append((*times, event.before, event.after, event.peak))
    events = list(trace.events)
    for index, measured_rows in rows.items():
        events[index] = _with_medians(events[index], measured_rows)
    filled = {column for event in events for column in _ALL_COLUMNS if getattr(event, column) is not None}
    measured = [name for name, columns in _COLUMNS.items() if filled.issuperset(columns)]
    about = {"measured": ", ".join(measured), "measured_by": "torch.profiler", "runs": str(len(complete_steps))}
    ops = [index for index, event in enumerate(trace.events) if event.kind == "op"]
    missing = sum(index not in rows for index in ops)
    if missing:
        about["unmeasured"] = f"{missing} of {len(ops)} ops have no event of their own"
    return replace(trace, events=tuple(events), about={**trace.about, **about})


def _with_medians(event: Event, rows: Sequence[tuple[int | None, ...]]) -> Event:
    """Return an event of the Trace with the medians of the columns; a column without values is unchanged."""
    medians = {}
    for column, values in zip(_ALL_COLUMNS, zip(*rows, strict=True), strict=True):
        if numbers := [value for value in values if value is not None]:
            medians[column] = round(median(numbers))
    return event._replace(**medians)


# Sort keys of rows; torch.profiler's older names with "cuda" for the device are accepted too.
_SUMMED = ("total", "usage", "count", "macs", "flops")  # ends of the names of fields
SORTS = (
    *(field.name for field in fields(KernelRow) if field.name.rpartition("_")[2] in _SUMMED),
    *("cpu_time", "device_time", "flops_per_second"),
)
_MAX_ROWS = 40  # rows that are printed by default
_MAX_NAME = 55  # characters
_MAX_OPS = 6  # in one sentence


class KernelAverages(list[KernelRow]):
    """The rows of a profile's events, and their table.

    >>> row = KernelRow("aten::mm", count=2, cpu_time_total=100, self_cpu_time_total=100, macs=1000, flops=2000)
    >>> print(KernelAverages([row]))
    Name      Self CPU %  Self CPU  CPU total %  CPU total  CPU time avg  # of Calls  MACs  FLOPs     FLOP/s
    --------  ----------  --------  -----------  ---------  ------------  ----------  ----  -----  ---------
    aten::mm      100.0%    100 µs       100.0%     100 µs         50 µs           2    1K     2K  20 MFLOPS
    --------  ----------  --------  -----------  ---------  ------------  ----------  ----  -----  ---------
    Self CPU time total: 100 µs
    """

    def __init__(self, rows: Iterable[KernelRow], header: str = "") -> None:
        super().__init__(rows)
        self._header = header

    def __repr__(self) -> str:
        return short_repr(self, format_quantity(len(self), "row"), self._header.partition("\n")[0])

    def __str__(self) -> str:
        return self.table(row_limit=_MAX_ROWS)

    def table(self, sort_by: str | None = None, row_limit: int = 100, header: str | None = None) -> str:
        """Return the first `row_limit` rows as text, with `sort_by` the largest first; -1 shows all.

        `sort_by` is one of torch.profiler's columns, "macs", "flops", "self_macs", "self_flops" or "flops_per_second";
        another raises ValueError. `header` replaces the profile's own summary above the table. Percentages are shares
        of the time of all rows; "--" is an unknown value.
        """
        header = self._header if header is None else header
        ranked = list(self) if sort_by is None else sorted(self, key=_sort_key(sort_by), reverse=True)
        visible_rows = ranked if row_limit < 0 else ranked[:row_limit]
        columns = _list_columns(self)
        headings = [name for name, _ in columns]
        left = [index for index, name in enumerate(headings) if name in ("Name", "Module", "Source Location")]
        table = text_table(headings, [[write(row) for _, write in columns] for row in visible_rows], left=left)
        rule = table.split("\n", 2)[1]
        total = sum(row.self_cpu_time_total for row in self)
        device = sum(row.self_device_time_total for row in self if not row.cpu_time_total)
        footer = [f"Self CPU time total: {_time(total)}"] + [f"Self device time total: {_time(device)}"] * bool(device)
        return "\n".join([*([header] if header else []), table, rule, *footer])


def describe_ledger(ledger: KernelLedger, table: FormulaTable) -> list[str]:
    """Return the ops and events that were not matched with each other, in lines.

    >>> from fvflops import load_table
    >>> describe_ledger(KernelLedger(no_op=[("aten::mm", 2), ("aten::view", 1)]), load_table("exact"))
    ['events without FLOPs, since no counted op matches them: aten::mm ×2']
    """
    lines = []
    where = "attributed to their module or step"
    if ledger.lost_flops:
        where = f"on no event ({format_size(ledger.lost_flops)})"
    if ledger.compiled:
        events = format_quantity(ledger.compiled, "op event")
        lines.append(f"{events} in compiled code, where the FLOPs of fused ops are {where}")
    elif ledger.attributed_to_modules:
        ops = list_calls(ledger.attributed_to_modules)
        lines.append(f"ops without an event, whose FLOPs are {where}: {ops}")
    rows = ((table.row(name), name, count) for name, count in ledger.no_op)
    unmatched = [(name, count) for row, name, count in rows if row is None or row.kind != "zero_flop"]
    if unmatched:
        lines.append(f"events without FLOPs, since no counted op matches them: {list_calls(unmatched)}")
    return lines


def list_calls(calls: Iterable[tuple[str, int]]) -> str:
    ops = [f"{name} ×{count}" for name, count in calls]
    more = f" and {len(ops) - _MAX_OPS} more" if len(ops) > _MAX_OPS else ""
    return ", ".join(ops[:_MAX_OPS]) + more


def _sort_key(sort_by: str) -> Callable[[KernelRow], float]:
    name = sort_by.replace("cuda", "device").replace("xpu", "device")
    if name not in SORTS:
        raise ValueError(f"sort_by must be one of {', '.join(SORTS)}; got {sort_by!r}")
    value_of = attrgetter(name)
    return lambda row: -1 if value_of(row) is None else value_of(row)


def _list_columns(rows: Sequence[KernelRow]) -> list[tuple[str, Callable[[KernelRow], str]]]:
    cpu = round(sum(row.self_cpu_time_total for row in rows) * 1000)
    device = round(sum(row.self_device_time_total for row in rows if not row.cpu_time_total) * 1000)
    on_device = any(row.device_time_total for row in rows)
    cpu_memory = any(row.cpu_memory_usage or row.self_cpu_memory_usage for row in rows)
    device_memory = any(row.device_memory_usage or row.self_device_memory_usage for row in rows)
    columns: list[tuple[bool, str, Callable[[KernelRow], str]]] = [
        (True, "Name", lambda row: _truncate(row.key)),
        (any(row.module is not None for row in rows), "Module", lambda row: _truncate(row.module or "(model)")),
        (True, "Self CPU %", lambda row: format_percent(round(row.self_cpu_time_total * 1000), cpu)),
        (True, "Self CPU", lambda row: _time(row.self_cpu_time_total)),
        (True, "CPU total %", lambda row: format_percent(round(row.cpu_time_total * 1000), cpu)),
        (True, "CPU total", lambda row: _time(row.cpu_time_total)),
        (True, "CPU time avg", lambda row: _time(row.cpu_time)),
        (on_device, "Self device", lambda row: _time(row.self_device_time_total)),
        (on_device, "Self device %", lambda row: format_percent(round(row.self_device_time_total * 1000), device)),
        (on_device, "Device total", lambda row: _time(row.device_time_total)),
        (on_device, "Device time avg", lambda row: _time(row.device_time)),
        (cpu_memory, "CPU Mem", lambda row: _bytes(row.cpu_memory_usage)),
        (cpu_memory, "Self CPU Mem", lambda row: _bytes(row.self_cpu_memory_usage)),
        (device_memory, "Device Mem", lambda row: _bytes(row.device_memory_usage)),
        (device_memory, "Self device Mem", lambda row: _bytes(row.self_device_memory_usage)),
        (True, "# of Calls", lambda row: str(row.count)),
        (True, "MACs", lambda row: _known(row.macs, format_size)),
        (True, "FLOPs", lambda row: _known(row.flops, format_size)),
        (True, "FLOP/s", lambda row: _known(row.flops_per_second, flops_to_string)),
        (any(row.input_shapes for row in rows), "Input Shapes", lambda row: row.input_shapes[:80]),
        (any(row.stack for row in rows), "Source Location", lambda row: " < ".join(map(_truncate, row.stack))),
    ]
    return [(heading, write) for is_shown, heading, write in columns if is_shown]


def _known(value: float | None, write: Callable[[float], str]) -> str:
    return "--" if value is None else write(value)


def _truncate(name: str) -> str:
    name = printable(name)
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 3] + "..."


def _time(microseconds: float) -> str:
    if not microseconds:
        return "0"
    # torch.profiler's self time of a Python function that begins in one event and ends in another is negative.
    return ("-" if microseconds < 0 else "") + format_seconds(abs(microseconds) / 1e6)


def _bytes(count: int) -> str:
    return f"{format_size(count)}B"
