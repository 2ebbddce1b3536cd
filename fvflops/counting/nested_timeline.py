"""Times of ops and modules of a timed Trace, and the timeline of its nested calls."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from operator import add
from typing import Any, NamedTuple

from fvflops.counting.count_trace import CostModel, RegionCost, find_covered, find_dtype, region_costs
from fvflops.formulas import OpCost
from fvflops.text import short_repr
from fvflops.trace import Event, Status, Trace, TraceError, Value, tensors_in
from fvflops.trace.module_tree import innermost, modules_above
from fvflops.trace.notebook_table import write_text_table
from fvflops.trace.timeline import WEIGHTS, Callee, Frame, Span, Timeline
from fvflops.trace.trace import RegionCall, walk_events
from fvflops.units import format_seconds

# Limit of tensors listed for one op, such as a fused optimizer step on all parameters.
_MAX_TENSORS = 16


def build_timeline(trace: Trace, cost_model: CostModel, *, traffic_model: CostModel | None = None) -> Timeline:
    """Return the timeline of a trace, with FLOPs and multiply-adds by a cost model, and bytes by `traffic_model`.

    Memory is measured, else derived from the lifetimes of the storages: on all devices together, including memory
    allocated before the run. A region without an exit, because the recording ended or was paused, spans the calls
    inside it.
    """
    modules = trace.modules.by_name
    frames = tuple(
        Frame(kind, name, modules[name].class_name if kind == "module" and name in modules else "")
        for kind, name in trace.regions
    )
    costs = region_costs(trace, cost_model)
    covered = frozenset(find_covered(trace, costs))
    items = _Callees(trace, cost_model, traffic_model, costs)
    calls = {(items.index("op", index), stack, phase): count for (index, stack, phase), count in trace.calls.items()}
    for (index, stack, phase), count in trace.region_calls.items():
        if index in costs:
            calls[items.index("exit", index), stack, phase] = count
    spans = None if trace.events is None else tuple(_SpanBuilder(trace, items, covered).spans())
    known = {
        "flops": True,
        "macs": True,
        "bytes": traffic_model is not None,
        "time": any(event.duration_ns is not None for event in trace.events or ()),
        "memory": trace.events is not None and (bool(trace.storages) or _has_memory(trace)),
    }
    return Timeline(
        frames=frames,
        stacks=trace.stacks,
        callees=tuple(items.all),
        calls=calls,
        spans=spans,
        covered=covered,
        weights=tuple(name for name in WEIGHTS if known[name]),
        about={**trace.about, **_describe_unsupported(items.all, calls, covered)},
        complete=trace.complete,
    )


def _has_memory(trace: Trace) -> bool:
    return any(event.memory_after is not None for event in trace.events or ())


def _describe_unsupported(
    items: list[Callee], calls: Mapping[tuple[int, int, str], int], covered: frozenset[tuple[int, str]]
) -> dict[str, str]:
    unsupported: Counter[str] = Counter()
    for (item, stack, phase), count in calls.items():
        if items[item].flops is None and (stack, phase) not in covered:
            unsupported[items[item].name] += count
    return {"unsupported": ", ".join(f"{op} × {count}" for op, count in unsupported.items())} if unsupported else {}


class _Callees:
    """Callees of a trace, indexed in order of first use."""

    def __init__(
        self, trace: Trace, cost_model: CostModel, traffic_model: CostModel | None, costs: Mapping[int, RegionCost]
    ) -> None:
        self.all: list[Callee] = []
        self._trace = trace
        self._cost_model = cost_model
        self._traffic_model = traffic_model
        self._region_costs = costs
        self._numbers: dict[tuple[str, int], int] = {}

    def index(self, kind: str, item: int) -> int:
        """Return the index of the callee of an event's item, by the event's kind.

        "enter" is for a region whose signature is unknown, since it did not return.
        """
        number = self._numbers.get((kind, item))
        if number is None:
            number = self._numbers[kind, item] = len(self.all)
            self.all.append(self._make(kind, item))
        return number

    def _make(self, kind: str, item: int) -> Callee:
        if kind == "enter":
            return Callee(*self._trace.regions[item], frame=item)
        if kind == "op":
            op = self._trace.signatures[item]
            dtype = find_dtype(op.op, op.names, op.inputs, op.outputs)
            callee = Callee("op", op.op, None, _name(op.inputs), _name(op.outputs), dtype)
            nbytes = None if self._traffic_model is None else _sum(self._traffic_model.op_cost(op), "value")
            return callee._replace(nbytes=nbytes, **_columns(self._cost_model.op_cost(op)))
        call = self._trace.region_signatures[item]
        dtype = find_dtype("", (), call.inputs, call.outputs)
        region = self._trace.regions[call.region]
        callee = Callee(*region, call.region, _name(call.inputs), _name(call.outputs), dtype)
        return callee._replace(**_columns(self._region_costs[item].costs)) if item in self._region_costs else callee


def _name(values: tuple[Value, ...]) -> tuple[str, ...]:
    specs = list(tensors_in(values))
    hidden = len(specs) - _MAX_TENSORS
    return (*map(str, specs[:_MAX_TENSORS]), *([f"and {hidden} more"] if hidden > 0 else []))


def _columns(costs: tuple[OpCost, ...]) -> dict[str, Any]:
    return {"flops": _sum(costs, "value"), "macs": _sum(costs, "macs"), "status": costs[0].status.value}


def _sum(costs: tuple[OpCost, ...], part: str) -> int | None:
    """Return the sum over the supported costs, None where there are none."""
    known = [getattr(cost, part) for cost in costs if cost.status is not Status.UNSUPPORTED]
    # A user's handle may have returned a NumPy integer.
    return sum(int(value) if isinstance(value, Integral) else value for value in known) if known else None


class _SpanCost(NamedTuple):
    """Cost of a call including its children."""

    flops: int = 0
    macs: int = 0
    nbytes: int = 0
    memory: int = 0
    unsupported: int = 0


@dataclass(slots=True)
class _OpenCall:
    """An open region call: the index of its span, its cost and times so far."""

    index: int
    span_cost: _SpanCost = field(default_factory=_SpanCost)
    start: int | None = None
    end: int | None = None

    def include(self, span_cost: _SpanCost, start: int | None = None, end: int | None = None) -> None:
        """Add the cost and the time of a call inside."""
        self.span_cost = _SpanCost(*map(add, self.span_cost, span_cost))
        if start is not None and (self.start is None or start < self.start):
            self.start = start
        if end is not None and (self.end is None or end > self.end):
            self.end = end


class _SpanBuilder:
    """Build spans from the events of a trace; a region's span is completed at its exit."""

    def __init__(self, trace: Trace, items: _Callees, covered: frozenset[tuple[int, str]]) -> None:
        self._trace = trace
        self._items = items
        self._covered = covered
        self._spans: list[Span] = []
        self._opened: dict[RegionCall, _OpenCall] = {}
        self._live = None if _has_memory(trace) else list(_live_bytes(trace))

    def spans(self) -> list[Span]:
        for kind, event, call, position in walk_events(self._trace):
            if kind == "op":
                self._call(event, call, position)
            elif call is not None:
                if kind == "enter":
                    self._opened[call] = _OpenCall(len(self._spans), start=event.start_ns)
                    self._spans.append(Span(0, event, call.depth))
                elif kind == "exit":
                    self._close(call, self._items.index("exit", event.item), event)
                else:
                    self._close(call, self._items.index("enter", call.region))
        return self._spans

    def _call(self, event: Event, parent: RegionCall | None, position: int) -> None:
        item = self._items.index("op", event.item)
        if self._live is not None:
            before, after = self._live[position : position + 2]
            event = event._replace(memory_before=before, memory_after=after)
        span_cost = self._self_cost(item, event)
        depth = 0 if parent is None else parent.depth + 1
        self._spans.append(Span(item, event, depth, *span_cost))
        if parent is not None:
            self._opened[parent].include(span_cost, event.start_ns, _end(event))

    def _close(self, call: RegionCall, item: int, event: Event | None = None) -> None:
        """Complete the span of a region's call; `event` is its exit, None where none was recorded."""
        opened = self._opened.pop(call)
        first = call.begin
        if event is not None:
            if not event.raised:
                opened.include(self._self_cost(item, event))
            start = opened.start if event.start_ns is None else event.start_ns
            first = event._replace(start_ns=start, memory_before=None, memory_after=None)
        elif opened.start is not None and opened.end is not None:
            first = first._replace(start_ns=opened.start, duration_ns=opened.end - opened.start)
        self._spans[opened.index] = Span(item, first, call.depth, *opened.span_cost)
        if call.parent is not None:
            self._opened[call.parent].include(opened.span_cost, first.start_ns, _end(first))

    def _self_cost(self, item: int, event: Event) -> _SpanCost:
        memory, before, after = 0, event.memory_before, event.memory_after
        if event.kind == "op" and before is not None and after is not None:
            memory = max(0, after - before)
        entry = self._items.all[item]
        flops, macs, unsupported = entry.flops or 0, entry.macs or 0, int(entry.flops is None)
        if (event.stack, event.phase) in self._covered:
            flops = macs = unsupported = 0
        return _SpanCost(flops, macs, entry.nbytes or 0, memory, unsupported)


def _end(event: Event) -> int | None:
    return None if event.start_ns is None or event.duration_ns is None else event.start_ns + event.duration_ns


def _live_bytes(trace: Trace) -> Iterator[int]:
    """Yield the bytes of the live storages before each event, and after the last one.

    Storages that no op created are live from the start, others from the first op that writes to them until freed.
    """
    sizes = [storage.nbytes for storage in trace.storages]
    unborn = {index for index, storage in enumerate(trace.storages) if storage.origin == "op"}
    alive = {*range(len(sizes))} - unborn
    nbytes = sum(sizes[index] for index in alive)
    for event in trace.events or ():
        yield nbytes
        if event.kind == "free":
            nbytes -= sizes[event.item] if event.item in alive else 0
            alive.discard(event.item)
            unborn.discard(event.item)
        elif event.kind == "op":
            born = unborn.intersection(event.writes)
            nbytes += sum(sizes[index] for index in born)
            alive |= born
            unborn -= born
    yield nbytes


_MAX_ROWS = 40  # of a table
# Phases whose ops run outside of all calls of the module that owns them.
BY_OWNER = ("backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Timing:
    """Number of calls, total time and self time (`own`, without children) of an op or a module, in ns."""

    calls: int = 0
    total: int = 0
    own: int = 0

    def __add__(self, other: Timing) -> Timing:
        return Timing(self.calls + other.calls, self.total + other.total, self.own + other.own)


@dataclass(frozen=True, slots=True, repr=False)
class Times:
    """The times of a Trace.

    `modules` maps a phase and a module's name to the time of its calls: in the forward phase and under recompute the
    measured time of each call without profiling overhead; in the backward pass and in optimizers' steps, in which no
    module is called, the sum over the ops of the module (own) and of the module and its children (total).
    `operators` maps a phase and an op to the sum over its calls, including the ops that it calls.
    """

    modules: Mapping[str, Mapping[str, Timing]]
    operators: Mapping[str, Mapping[str, Timing]]

    def __repr__(self) -> str:
        totals = {phase: timings[""].total for phase, timings in self.modules.items() if "" in timings}
        phases = [f"{phase} {format_seconds(total / 1e9)}" for phase, total in totals.items()]

        return short_repr(self, "", *phases)

    def __str__(self) -> str:
        sums: defaultdict[str, Timing] = defaultdict(Timing)
        for timings in self.operators.values():
            for op, timing in timings.items():
                sums[op] += timing
        longest = sorted(sums.items(), key=lambda item: -item[1].own)
        rows = [
            [op, f"{item.calls:,}", format_seconds(item.total / 1e9), format_seconds(item.own / 1e9)]
            for op, item in longest[:_MAX_ROWS]
        ]
        shown = f"{len(rows)} of {len(longest):,} ops" if len(rows) < len(longest) else ""
        return write_text_table("", ["op", "calls", "time", "self"], rows, shown)

    def of_module(self, name: str = "") -> Timing:
        """Return the time of a module in all phases."""
        return sum((timings[name] for timings in self.modules.values() if name in timings), Timing())


def read_times(trace: Trace) -> Times:
    """Return the times of a Trace recorded with measure={"time"}; any other raises TraceError."""
    if trace.events is None or "time" not in trace.info.measured:
        raise TraceError('this trace has no times: record it with measure={"time"}')
    return sum_times(trace)


def sum_times(trace: Trace) -> Times:
    """Return the times and numbers of calls of a Trace; unmeasured times are 0."""
    scopes = trace.scopes()
    modules: dict[str, dict[str, Timing]] = defaultdict(lambda: defaultdict(Timing))
    operators: dict[str, dict[str, Timing]] = defaultdict(lambda: defaultdict(Timing))
    inside: Counter[RegionCall | None] = Counter()  # time of the modules called in an open region
    for kind, event, call, _ in walk_events(trace):
        duration = event.duration_ns or 0
        if call is not None and kind in ("exit", "unfinished"):
            children = inside.pop(call, 0)
            region = trace.regions[call.region]
            is_timed = region.kind == "module" and kind == "exit"
            inside[call.parent] += duration if is_timed else children
            if is_timed and event.phase not in BY_OWNER:
                modules[event.phase][region.name] += Timing(1, duration, duration - children)
        elif kind == "op":
            operators[event.phase][trace.signatures[event.item].packet] += Timing(1, duration, duration)
            if event.phase in BY_OWNER:
                timings, owner = modules[event.phase], innermost(scopes[event.stack])
                for name in modules_above(owner):
                    timings[name] += Timing(0, duration, 0)
                timings[owner] += Timing(1, duration, duration)
    return Times(*({phase: dict(table) for phase, table in tables.items()} for tables in (modules, operators)))
