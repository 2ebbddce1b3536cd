"""Match torch.profiler's events with the ops of a Trace: by module call and, within one, by order."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from fvflops.counting.count import CostModel, find_covered, region_costs
from fvflops.formulas import OpCost
from fvflops.trace import Event, Status, Trace, TraceError
from fvflops.trace.event_walk import RegionCall, walk_events
from fvflops.trace.kernel_events import KernelEvent, KernelLedger, KernelRun
from fvflops.trace.module_tree import innermost

# Where the order of ops differs, a longest common subsequence is found for up to this many pairs of event and op;
# beyond that, each op takes the next event of its name within a window.
_PAIRS, _WINDOW = 6_000_000, 400
_COLUMNS = {"time": ("start_ns", "duration_ns"), "memory": ("memory_before", "memory_after", "memory_peak")}
# What autograd calls instead of an op where no dispatch mode is on.
_OTHERWISE = {"aten::_index_put_impl_": "aten::index_put_"}
_ALL = tuple(column for columns in _COLUMNS.values() for column in columns)


@dataclass(frozen=True, slots=True)
class KernelMatch:
    """A torch.profiler run with the module, the phase and the FLOPs of each event.

    `modules` and `phases` are those of each event, and `steps` the number of its step, -1 outside all steps.
    `self_flops` are those of an event itself, `flops` include nested events; None is unknown. `call_of_event` maps an
    event's index to that of an event of the Trace: an op, or the end of a module call. `total` is the FLOPs of one
    step, None without a Trace.
    """

    run: KernelRun
    modules: tuple[str, ...]
    phases: tuple[str, ...]
    steps: tuple[int, ...]
    self_flops: tuple[int | None, ...]
    flops: tuple[int | None, ...]
    call_of_event: Mapping[int, int]
    ledger: KernelLedger
    trace: Trace | None = None
    total: int | None = None

    def whole_steps(self) -> list[int]:
        """Return the numbers of the completed steps; in a run that raised, the last one is not."""
        numbers = sorted({step for step in self.steps if step >= 0})
        return numbers if self.run.complete else numbers[:-1]


def match_kernels(run: KernelRun, trace: Trace | None, cost_model: CostModel) -> KernelMatch:
    """Return a run with the modules, phases and FLOPs of its events.

    The Trace has the work of one step; each step of the run is matched with it. Within a module call, the outermost
    event with the name of the next expected op gets that op's FLOPs, and events nested in it belong to it. FLOPs of ops
    without an event, as in fused kernels, are attributed to the call of their module.

    >>> import torch
    >>> from fvflops import record_call
    >>> from fvflops.formulas import load_table
    >>> from fvflops.counting import TableCostModel
    >>> cost_model = TableCostModel(load_table("default"), "flops")
    >>> trace = record_call(torch.nn.Linear(3, 2), (torch.ones(4, 3),), stops_at=cost_model.stops_at)
    >>> run = KernelRun((KernelEvent("Linear", "module"), KernelEvent("aten::linear", "op", parent=0)))
    >>> match_kernels(run, trace, cost_model).flops
    (24, 24)
    """
    children = _children(run)
    steps = _number_steps(run)
    calls = None if trace is None else _build_calls(trace, cost_model)
    walk = _Walk(run, children, calls)
    for number in sorted({step for step in steps if step >= 0}) if calls is not None else ():
        walk.match_step(_list_roots(run, children, steps, number))
    modules, phases = _find_owners(run, walk.call_of_event, trace)
    self_flops = tuple([walk.flops.get(event_index) for event_index in range(len(run.events))])
    return KernelMatch(
        run=run,
        modules=modules,
        phases=phases,
        steps=steps,
        self_flops=self_flops,
        flops=_sum_up(run, self_flops),
        call_of_event=walk.call_of_event,
        ledger=walk.ledger(),
        trace=trace,
        total=None if calls is None else calls.total(),
    )


def overlay_times(match: KernelMatch, *, measure: Collection[str] = ("time", "memory")) -> Trace:
    """Return the Trace with the times and memory of the events matched with its ops and module calls.

    `measure` chooses "time", "memory" or both; memory is that of the CPU's allocator, and needs profile_memory=True.
    Values are the median over steps. On a device the time of an op is that of its kernels. An op without an event keeps
    the Trace's own values, and `about` has the number of these. A match whose Trace has no events raises TraceError.
    """
    trace = match.trace
    if trace is None or trace.events is None:
        raise TraceError("no Trace with events to add torch.profiler's times to: record one step of the work")
    begins: dict[int, int] = {}
    for event_index, event in enumerate(match.run.events):
        begins.setdefault(match.steps[event_index], event.start_ns)
    whole = set(match.whole_steps())
    rows: dict[int, list[tuple[int | None, ...]]] = defaultdict(list)
    for event_index, index in match.call_of_event.items():
        step = match.steps[event_index]
        if step in whole:
            rows[index].append(_measure(match.run.events[event_index], begins[step]))
    chosen = [column for name in ("time", "memory") if name in measure for column in _COLUMNS[name]]
    events = [_fill(event, rows[index], chosen) if index in rows else event for index, event in enumerate(trace.events)]
    known = {column for event in events for column in _ALL if getattr(event, column) is not None}
    measured = [name for name, columns in _COLUMNS.items() if known.issuperset(columns)]
    about = {"measured": ", ".join(measured), "measured_by": "torch.profiler", "runs": str(len(whole))}
    ops = [index for index, event in enumerate(trace.events) if event.kind == "op"]
    missing = sum(index not in rows for index in ops)
    if missing:
        about["unmeasured"] = f"{missing} of {len(ops)} ops have no event of their own"
    return replace(trace, events=tuple(events), about={**trace.about, **about})


def _measure(event: KernelEvent, begin: int) -> tuple[int | None, ...]:
    duration = event.device_ns or event.duration_ns
    return event.start_ns - begin, duration, event.before, event.after, event.peak


def _fill(event: Event, rows: Sequence[tuple[int | None, ...]], chosen: Sequence[str]) -> Event:
    columns = zip(_ALL, zip(*rows, strict=True), strict=True)
    known = {name: [value for value in column if value is not None] for name, column in columns if name in chosen}
    return event._replace(**{name: round(median(values)) for name, values in known.items() if values})


def _children(run: KernelRun) -> dict[int, list[int]]:
    """Return event → the events nested in it, -1 for the outermost; device events are left out."""
    children: dict[int, list[int]] = defaultdict(list)
    for event_index, event in enumerate(run.events):
        if event.kind != "device":
            children[event.parent].append(event_index)
    return children


def _number_steps(run: KernelRun) -> tuple[int, ...]:
    """Return the number of each event's step: the step around it, or on another thread the step at its start."""
    spans = [event for event in run.events if event.kind == "step"]
    if not spans:
        return (0,) * len(run.events)
    starts = [event.start_ns for event in spans]
    numbers: list[int] = []
    seen = 0
    for event in run.events:
        if event.kind == "step":
            number, seen = seen, seen + 1
        elif 0 <= event.parent < len(numbers):
            number = numbers[event.parent]
        else:
            number = bisect_right(starts, event.start_ns) - 1
            if number < 0 or event.start_ns >= spans[number].end_ns:
                number = -1
        numbers.append(number)
    return tuple(numbers)


def _list_roots(run: KernelRun, children: Mapping[int, list[int]], steps: Sequence[int], number: int) -> list[int]:
    """Return the outermost events of a step: its own event first, then those on other threads."""
    inside = [
        event_index
        for event_index, event in enumerate(run.events)
        if event.kind == "step" and steps[event_index] == number
    ]
    return inside + [
        event_index
        for event_index in children[-1]
        if steps[event_index] == number and run.events[event_index].kind != "step"
    ]


@dataclass(slots=True)
class _Call:
    """An op, or a module with the calls inside it; `index` is its event in the Trace, for a module the end of the call.

    `flops` are its own, None if unknown.
    """

    kind: str
    name: str
    index: int | None = None
    flops: int | None = 0
    inner: list[_Call] = field(default_factory=list)

    def total(self) -> int:
        return (self.flops or 0) + sum(call.total() for call in self.inner)

    def ops(self) -> Iterator[_Call]:
        """Yield all ops in it, itself included."""
        if self.kind == "op":
            yield self
        for call in self.inner:
            yield from call.ops()


def _build_calls(trace: Trace, cost_model: CostModel) -> _Call:
    """Return the nested calls of a Trace; all threads are in one order, since they wait for each other.

    The FLOPs of a region that is no module are attributed to the module around it.
    """
    root = _Call("root", "")
    costs = region_costs(trace, cost_model)
    covered = find_covered(trace, costs)
    modules: dict[RegionCall | None, _Call] = {None: root}  # open region → the innermost module's call
    for kind, event, region_call, index in walk_events(trace):
        known = (event.stack, event.phase) not in covered
        if kind == "op":
            signature = trace.signatures[event.item]
            flops = _sum(cost_model.op_cost(signature)) if known else 0
            modules[region_call].inner.append(_Call("op", signature.packet, index, flops))
        elif region_call is None:
            continue
        elif kind == "enter":
            region = trace.regions[region_call.region]
            modules[region_call] = outer = modules[region_call.parent]
            if region.kind == "module" and event.kind == "enter":
                modules[region_call] = _Call("module", region.name)
                outer.inner.append(modules[region_call])
        else:
            ended = modules.pop(region_call)
            if (
                kind == "exit"
                and trace.regions[region_call.region].kind == "module"
                and region_call.begin.kind == "enter"
            ):
                ended.index = index
            if kind == "exit" and event.item in costs and known and not event.raised:
                ended.flops = (ended.flops or 0) + (_sum(costs[event.item].costs) or 0)
    return root


def _sum(costs: Sequence[OpCost]) -> int | None:
    known = [int(cost.value) for cost in costs if cost.status is not Status.UNSUPPORTED]
    return sum(known) if known else None


class _Walk:
    """Match the steps of a run with the calls of a Trace."""

    def __init__(self, run: KernelRun, children: Mapping[int, list[int]], calls: _Call | None) -> None:
        self._events = run.events
        self._children = children
        self._calls = calls
        self.call_of_event: dict[int, int] = {}
        self.flops: dict[int, int | None] = {}
        self._no_event: Counter[str] = Counter()
        self._counted_by_module: Counter[str] = Counter()
        self._compiled = 0
        self._ops: set[int] = set()

    def match_step(self, roots: Sequence[int]) -> None:
        """Match the events of one step; `roots` are the outermost."""
        assert self._calls is not None
        step = next((event_index for event_index in roots if self._events[event_index].kind == "step"), None)
        self._match(self._calls, roots, step)

    def ledger(self) -> KernelLedger:
        """Return how many ops were matched, and which ops and events were not."""
        lone: Counter[str] = Counter()
        if self._calls is not None:
            self._list_lone(self._children[-1], lone)
        return KernelLedger(
            matched=len(self._ops),
            no_event=tuple(self._no_event.most_common()),
            attributed_to_modules=tuple(self._counted_by_module.most_common()),
            no_op=tuple(lone.most_common()),
            compiled=self._compiled,
        )

    def _match(self, call: _Call, inside: Sequence[int], frame: int | None) -> None:
        """Match the calls inside a call with events; unmatched FLOPs are attributed to its own event, `frame`."""
        listed: list[int] = []
        ends: list[int] = []
        self._list(inside, listed, ends)
        names = [self._name(event_index) for event_index in listed]
        wanted = list(_flatten(call.inner, {name for name in names if name[0] == "module"}))
        found = dict(_align(names, ends, [(one.kind, one.name) for one in wanted]))
        by_call = {token: listed[position] for position, token in found.items()}
        rest = call.flops or 0
        for token, one in enumerate(wanted):
            event_index = by_call.get(token)
            if event_index is None:
                rest += one.total()
                self._no_event.update([op.name for op in one.ops()])
                self._counted_by_module.update([op.name for op in one.ops() if op.flops != 0])
                continue
            if one.index is not None:
                self.call_of_event[event_index] = one.index
            if one.kind == "op":
                self.flops[event_index] = one.flops
                self._ops.add(event_index)
            else:
                self._match(one, self._children.get(event_index, ()), event_index)
        if frame is not None:
            self.flops[frame] = rest

    def _list(self, event_indexes: Sequence[int], listed: list[int], ends: list[int]) -> None:
        """List the events that can be ops or modules, each before its nested ones, and where those end."""
        for event_index in event_indexes:
            event = self._events[event_index]
            if event.kind == "compiled":
                self._compiled += self._count_ops(event_index)
                continue
            is_call = event.kind in ("op", "module")
            if is_call:
                position = len(listed)
                listed.append(event_index)
                ends.append(0)
            if event.kind != "module":
                self._list(self._children.get(event_index, ()), listed, ends)
            if is_call:
                ends[position] = len(listed)

    def _count_ops(self, event_index: int) -> int:
        inner = self._children.get(event_index, ())
        return (self._events[event_index].kind == "op") + sum(map(self._count_ops, inner))

    def _name(self, event_index: int) -> tuple[str, str]:
        event = self._events[event_index]
        return event.kind, event.module if event.kind == "module" else event.name

    def _list_lone(self, event_indexes: Sequence[int], lone: Counter[str]) -> bool:
        """Count the outermost op events with no matched op in or under them; return whether any op was matched."""
        any_matched = False
        for event_index in event_indexes:
            event = self._events[event_index]
            if event_index in self._ops:
                any_matched = True
            elif event.kind != "compiled":
                inner: Counter[str] = Counter()
                matched = self._list_lone(self._children.get(event_index, ()), inner)
                if event.kind == "op" and not matched:
                    lone[event.name] += 1
                else:
                    lone.update(inner)
                any_matched |= matched
        return any_matched


def _flatten(calls: Sequence[_Call], marked: set[tuple[str, str]]) -> Iterator[_Call]:
    """Yield calls; a module whose calls have no event (is not in `marked`) is replaced by the calls inside it."""
    for call in calls:
        if call.kind == "module" and ("module", call.name) not in marked:
            if call.flops:
                yield _Call("region", call.name, None, call.flops)
            yield from _flatten(call.inner, marked)
        else:
            yield call


_Names = Sequence[tuple[str, str]]


def _align(names: _Names, ends: Sequence[int], wanted: _Names) -> list[tuple[int, int]]:
    """Return the alignment of two ordered lists of names as pairs of positions.

    Names nested in an aligned one, up to its end, are not aligned. An op equals its in-place variant, since autograd
    accumulates gradients in place where no dispatch mode is on.
    """
    names, wanted = list(map(_plain, names)), list(map(_plain, wanted))
    kept = set(wanted)
    chosen = [position for position, name in enumerate(names) if name in kept]
    few = [names[position] for position in chosen]
    few_ends = [bisect_left(chosen, ends[position]) for position in chosen]
    pairs = _take_next(few, few_ends, wanted)
    if len(pairs) < len(wanted):
        if len(few) * len(wanted) <= _PAIRS:
            pairs = _take_most(few, few_ends, wanted)
        else:
            pairs = _take_near(few, few_ends, wanted)
    return [(chosen[position], token) for position, token in pairs]


def _plain(name: tuple[str, str]) -> tuple[str, str]:
    kind, text = name
    return (kind, _OTHERWISE.get(text, text).removesuffix("_")) if kind == "op" else name


def _take_next(names: _Names, ends: Sequence[int], wanted: _Names) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    position = 0
    while position < len(names) and len(pairs) < len(wanted):
        if names[position] == wanted[len(pairs)]:
            pairs.append((position, len(pairs)))
            position = ends[position]
        else:
            position += 1
    return pairs


def _take_near(names: _Names, ends: Sequence[int], wanted: _Names) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    position = 0
    for token, name in enumerate(wanted):
        for event_index in range(position, min(position + _WINDOW, len(names))):
            if names[event_index] == name:
                pairs.append((event_index, token))
                position = ends[event_index]
                break
    return pairs


def _take_most(names: _Names, ends: Sequence[int], wanted: _Names) -> list[tuple[int, int]]:
    """Return a longest common subsequence as pairs of positions, preferring outer events."""
    count, most = len(wanted), [array("I", bytes(4 * (len(wanted) + 1))) for _ in range(len(names) + 1)]
    numbers: dict[tuple[str, str], int] = {}
    tokens = [numbers.setdefault(name, len(numbers)) for name in wanted]
    for position in range(len(names) - 1, -1, -1):
        number = numbers.get(names[position], -1)
        row, below, after = most[position], most[position + 1], most[ends[position]]
        best = 0
        for token in range(count - 1, -1, -1):
            if below[token] > best:
                best = below[token]
            if tokens[token] == number and after[token + 1] >= best:
                best = after[token + 1] + 1
            row[token] = best
    pairs: list[tuple[int, int]] = []
    position = token = 0
    while position < len(names) and token < count:
        here = most[position][token]
        if names[position] == wanted[token] and most[ends[position]][token + 1] + 1 == here:
            pairs.append((position, token))
            position, token = ends[position], token + 1
        elif most[position][token + 1] == here:
            token += 1
        else:
            position += 1
    return pairs


def _find_owners(
    run: KernelRun, call_of_event: Mapping[int, int], trace: Trace | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the module and the phase of each event.

    A matched op, and the autograd node that runs it, has the module and phase of the Trace. Otherwise an event in a
    module call belongs to that module, and an autograd node to the module of the last forward op with the node's
    sequence number; gradient accumulation has no sequence number and belongs to the node before it.
    """
    located = _locate_ops(run, call_of_event, trace)
    nodes = _locate_nodes(run, located)
    modules: list[str] = []
    phases: list[str] = []
    forward_modules: dict[tuple[int, int], str] = {}
    last: dict[int, str] = {}
    for event_index, event in enumerate(run.events):
        outer = event.parent
        module, phase = (modules[outer], phases[outer]) if 0 <= outer < event_index else ("", "forward")
        if event.kind == "module":
            module, phase = event.module, "recompute" if phase in ("backward", "recompute") else phase
        elif event.kind == "optimizer":
            module, phase = "", "optimizer"
        elif event.kind == "node" and (outer < 0 or run.events[outer].kind != "node"):
            phase = "backward"
            forward_module = (
                forward_modules.get((event.forward_thread, event.sequence)) if event.sequence >= 0 else None
            )
            module = nodes.get(event_index, last.get(event.thread, "") if forward_module is None else forward_module)
            last[event.thread] = module
        if event_index in located:
            module, phase = located[event_index]
        if event.kind == "op" and event.sequence >= 0:
            forward_modules[event.thread, event.sequence] = module
        modules.append(module)
        phases.append(phase)
    return tuple(modules), tuple(phases)


def _locate_ops(run: KernelRun, call_of_event: Mapping[int, int], trace: Trace | None) -> dict[int, tuple[str, str]]:
    """Return the module and the phase of the events matched with an op of the Trace."""
    if trace is None or trace.events is None:
        return {}
    scopes = trace.scopes()
    located = {}
    for event_index, index in call_of_event.items():
        if run.events[event_index].kind == "op":
            called = trace.events[index]
            scope = scopes[called.stack]
            located[event_index] = innermost(scope), called.phase
    return located


def _locate_nodes(run: KernelRun, located: Mapping[int, tuple[str, str]]) -> dict[int, str]:
    """Return the modules of the autograd nodes in which matched ops of the backward pass ran."""
    nodes: dict[int, str] = {}
    for event_index, (module, phase) in located.items():
        outer = run.events[event_index].parent
        while phase == "backward" and outer >= 0:
            if run.events[outer].kind == "node":
                nodes.setdefault(outer, module)
            outer = run.events[outer].parent
    return nodes


def _sum_up(run: KernelRun, own: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return the FLOPs of each event and all nested in it, None if unknown."""
    sums: list[Any] = list(own)
    for event_index in range(len(run.events) - 1, -1, -1):
        outer = run.events[event_index].parent
        if outer >= 0 and sums[event_index] is not None and run.events[event_index].kind != "device":
            sums[outer] = sums[event_index] + (sums[outer] or 0)
    return tuple(sums)
