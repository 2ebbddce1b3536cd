"""Build the timeline of a trace: its nested calls, with times and costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple

from fvflops.counting.compute_dtype import find_dtype
from fvflops.counting.count_trace import CostModel, RegionCost, find_covered, region_costs
from fvflops.formulas import OpCost
from fvflops.trace import Event, Region, Status, Trace, Value, tensors_in
from fvflops.trace.event_walk import RegionCall, walk_events
from fvflops.trace.timeline import WEIGHTS, Callee, Frame, Span, Timeline

# Limit of tensors listed for one op, such as a fused optimizer step on all parameters.
_MAX_TENSORS = 16


def build_timeline(trace: Trace, cost_model: CostModel, *, traffic_model: CostModel | None = None) -> Timeline:
    """Return the timeline of a trace, with FLOPs and multiply-adds by a cost model, and bytes by `traffic_model`.

    Memory is measured, else derived from the lifetimes of the storages: on all devices together, including memory
    allocated before the run. A region without an exit, because the recording ended or was paused, spans the calls
    inside it.
    """
    frames = tuple(_frame(trace, region) for region in trace.regions)
    costs = region_costs(trace, cost_model)
    covered = frozenset(find_covered(trace, costs))
    items = _Callees(trace, cost_model, traffic_model, costs)
    calls = {(items.of_op(index), stack, phase): count for (index, stack, phase), count in trace.calls.items()}
    for (index, stack, phase), count in trace.region_calls.items():
        if index in costs:
            calls[items.of_region_call(index), stack, phase] = count
    spans = None if trace.events is None else tuple(_SpanBuilder(trace, items, covered).spans())
    known = {"flops", "macs", *(["bytes"] if traffic_model is not None else []), *_measured(trace)}
    return Timeline(
        frames=frames,
        stacks=trace.stacks,
        callees=tuple(items.all),
        calls=calls,
        spans=spans,
        covered=covered,
        weights=tuple(name for name in WEIGHTS if name in known),
        about={**trace.about, **_describe_unsupported(items.all, calls, covered)},
        complete=trace.complete,
    )


def _frame(trace: Trace, region: Region) -> Frame:
    module = trace.modules.by_name.get(region.name) if region.kind == "module" else None
    return Frame(region.kind, region.name, "" if module is None else module.class_name)


def _measured(trace: Trace) -> Iterator[str]:
    if trace.events is None:
        return
    if any(event.duration_ns is not None for event in trace.events):
        yield "time"
    if trace.storages or _has_memory(trace):
        yield "memory"


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

    def of_op(self, index: int) -> int:
        """Return the index of the callee of an op's signature."""
        number = self._numbers.get(("op", index))
        if number is None:
            signature = self._trace.signatures[index]
            costs = self._cost_model.op_cost(signature)
            nbytes = None if self._traffic_model is None else _sum(self._traffic_model.op_cost(signature), "value")
            item = Callee(
                "op", signature.op, None, *_describe(signature.op, signature.names, signature.inputs, signature.outputs)
            )
            number = self._add(("op", index), item._replace(nbytes=nbytes, **_columns(costs)))
        return number

    def of_region_call(self, index: int) -> int:
        """Return the index of the callee of a region's signature."""
        number = self._numbers.get(("exit", index))
        if number is None:
            region, inputs, outputs = self._parts(index)
            kind, name = self._trace.regions[region]
            item = Callee(kind, name, region, *_describe("", (), inputs, outputs))
            if index in self._region_costs:
                item = item._replace(**_columns(self._region_costs[index].costs))
            number = self._add(("exit", index), item)
        return number

    def of_region(self, region: int) -> int:
        """Return the index of the callee of a region whose signature is unknown, since it did not return."""
        number = self._numbers.get(("enter", region))
        if number is None:
            number = self._add(("enter", region), Callee(*self._trace.regions[region], frame=region))
        return number

    def _parts(self, index: int) -> tuple[int, tuple[Value, ...], tuple[Value, ...]]:
        signature = self._trace.region_signatures[index]
        return signature.region, signature.inputs, signature.outputs

    def _add(self, key: tuple[str, int], item: Callee) -> int:
        number = self._numbers[key] = len(self.all)
        self.all.append(item)
        return number


def _describe(
    op: str, names: tuple[str, ...], inputs: tuple[Value, ...], outputs: tuple[Value, ...]
) -> tuple[tuple[str, ...], tuple[str, ...], str]:
    return _name(inputs), _name(outputs), find_dtype(op, names, inputs, outputs)


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

    def plus(self, other: _SpanCost) -> _SpanCost:
        return _SpanCost(*[left + right for left, right in zip(self, other, strict=True)])


@dataclass(slots=True)
class _OpenCall:
    """An open region call: the index of its span, its cost and times so far."""

    index: int
    span_cost: _SpanCost = field(default_factory=_SpanCost)
    start: int | None = None
    end: int | None = None

    def include(self, start: int | None, end: int | None) -> None:
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
        self._live: _LiveStorages | None = None if _has_memory(trace) else _LiveStorages(trace)

    def spans(self) -> list[Span]:
        """Return all spans."""
        for kind, event, call, _ in walk_events(self._trace):
            if kind == "op":
                self._call(event, call)
            elif kind == "free":
                if self._live is not None:
                    self._live.free(event.item)
            elif call is not None:
                if kind == "enter":
                    self._enter(event, call)
                elif kind == "exit":
                    self._close(call, self._items.of_region_call(event.item), event)
                else:
                    self._close(call, self._items.of_region(call.region))
        return self._spans

    def _call(self, event: Event, parent: RegionCall | None) -> None:
        item = self._items.of_op(event.item)
        before, after = event.memory_before, event.memory_after
        if self._live is not None:
            before, after = self._live.bytes, self._live.write(event.writes)
        memory = max(0, after - before) if before is not None and after is not None else 0
        span_cost = self._self_cost(item, event, memory)
        depth = 0 if parent is None else parent.depth + 1
        self._spans.append(_span(event, item, depth, span_cost)._replace(memory_before=before, memory_after=after))
        self._add_to_parent(parent, span_cost, event.start_ns, _end(event))

    def _enter(self, event: Event, call: RegionCall) -> None:
        self._opened[call] = _OpenCall(len(self._spans), start=event.start_ns)
        self._spans.append(_span(event, 0, call.depth, _SpanCost()))

    def _close(self, call: RegionCall, item: int, event: Event | None = None) -> None:
        """Complete the span of a region's call; `event` is its exit, None where none was recorded."""
        open_call = self._opened.pop(call)
        span_cost = open_call.span_cost
        first = call.begin
        if event is not None:
            if not event.raised:
                span_cost = span_cost.plus(self._self_cost(item, event, 0))
            first = event._replace(start_ns=open_call.start if event.start_ns is None else event.start_ns)
        elif open_call.start is not None and open_call.end is not None:
            first = first._replace(start_ns=open_call.start, duration_ns=open_call.end - open_call.start)
        self._spans[open_call.index] = _span(first, item, call.depth, span_cost)
        self._add_to_parent(call.parent, span_cost, first.start_ns, _end(first))

    def _self_cost(self, item: int, event: Event, memory: int) -> _SpanCost:
        entry = self._items.all[item]
        flops, macs, unsupported = entry.flops or 0, entry.macs or 0, int(entry.flops is None)
        if (event.stack, event.phase) in self._covered:
            flops = macs = unsupported = 0
        return _SpanCost(flops, macs, entry.nbytes or 0, memory, unsupported)

    def _add_to_parent(
        self, parent: RegionCall | None, span_cost: _SpanCost, start: int | None, end: int | None
    ) -> None:
        if parent is not None:
            opened = self._opened[parent]
            opened.span_cost = opened.span_cost.plus(span_cost)
            opened.include(start, end)


def _span(event: Event, item: int, depth: int, span_cost: _SpanCost) -> Span:
    return Span(
        item,
        event.stack,
        event.phase,
        event.thread,
        event.rank,
        depth,
        event.start_ns,
        event.duration_ns,
        *span_cost,
        raised=event.raised,
        memory_peak=event.memory_peak,
    )


def _end(event: Event) -> int | None:
    return None if event.start_ns is None or event.duration_ns is None else event.start_ns + event.duration_ns


class _LiveStorages:
    """Bytes of the live storages of a trace; storages that no op created are live from the start."""

    def __init__(self, trace: Trace) -> None:
        self._sizes = [storage.nbytes for storage in trace.storages]
        self._alive = {index for index, storage in enumerate(trace.storages) if storage.origin != "op"}
        self._freed: set[int] = set()
        self.bytes = sum(self._sizes[index] for index in self._alive)

    def write(self, storages: tuple[int, ...]) -> int:
        """Mark the storages that an op wrote to as live, and return the live bytes."""
        for index in storages:
            if index not in self._alive and index not in self._freed:
                self._alive.add(index)
                self.bytes += self._sizes[index]
        return self.bytes

    def free(self, index: int) -> None:
        """Mark a storage as freed."""
        self._freed.add(index)
        if index in self._alive:
            self._alive.remove(index)
            self.bytes -= self._sizes[index]
