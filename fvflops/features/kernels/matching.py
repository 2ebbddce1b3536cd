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

# If events and ops differ in order, they are aligned by their longest common subsequence, up to this many pairs of
# event and op; beyond that, each op is matched with the next event of its name among this many events.
_MAX_PAIRS, _WINDOW = 6_000_000, 400
_COLUMNS = {"time": ("start_ns", "duration_ns"), "memory": ("memory_before", "memory_after", "memory_peak")}
# Op that autograd calls if no dispatch mode is active → the op that it calls under the recorder's mode.
_RECORDED_OPS = {"aten::_index_put_impl_": "aten::index_put_"}
_ALL_COLUMNS = tuple(column for columns in _COLUMNS.values() for column in columns)


@dataclass(frozen=True, slots=True)
class KernelMatch:
    """A torch.profiler run with the module, the phase and the FLOPs of each event.

    Its events are all of torch.profiler's, such as ops, module calls and autograd nodes. Kernels are those of kind
    "device": they have the module and phase of the op that launched them, but no FLOPs.

    `modules`, `phases` and `steps` have an item for each event; `steps` are numbers of steps, -1 outside all steps.
    `self_flops` are FLOPs without nested events, `flops` with them; None if unknown. `call_of_event` maps the index of
    an event to the index of the Trace's event matched with it: an op, or the end of a module call. `total` is the FLOPs
    of one step, None without a Trace.
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

    def complete_steps(self) -> list[int]:
        """Return the numbers of the completed steps; a run that raised did not complete its last step."""
        numbers = sorted({step for step in self.steps if step >= 0})
        return numbers if self.run.complete else numbers[:-1]


def match_kernels(run: KernelRun, trace: Trace | None, cost_model: CostModel) -> KernelMatch:
    """Return a run with the modules, phases and FLOPs of its events.

    The Trace is of one step; each step of the run is matched with it. In each module call, ops are matched in order
    with the outermost op events of their names, which get their FLOPs; kernels are not matched. FLOPs
    of ops without an event, as in fused kernels, are attributed to the call of their module.

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
    matcher = _StepMatcher(run, children, calls)
    for number in sorted({step for step in steps if step >= 0}) if calls is not None else ():
        matcher.match_step(_list_roots(run, children, steps, number))
    modules, phases = _find_owners(run, matcher.call_of_event, trace)
    self_flops = tuple([matcher.flops.get(event_index) for event_index in range(len(run.events))])
    return KernelMatch(
        run=run,
        modules=modules,
        phases=phases,
        steps=steps,
        self_flops=self_flops,
        flops=_add_nested(run, self_flops),
        call_of_event=matcher.call_of_event,
        ledger=matcher.ledger(),
        trace=trace,
        total=None if calls is None else calls.total(),
    )


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


def _children(run: KernelRun) -> dict[int, list[int]]:
    """Return event → the events nested in it, without device events; -1 → the outermost events."""
    children: dict[int, list[int]] = defaultdict(list)
    for event_index, event in enumerate(run.events):
        if event.kind != "device":
            children[event.parent].append(event_index)
    return children


def _number_steps(run: KernelRun) -> tuple[int, ...]:
    """Return the number of each event's step: the enclosing one, or on another thread the one running at its start."""
    steps = [event for event in run.events if event.kind == "step"]
    if not steps:
        return (0,) * len(run.events)
    starts = [event.start_ns for event in steps]
    numbers: list[int] = []
    next_number = 0
    for event in run.events:
        if event.kind == "step":
            number, next_number = next_number, next_number + 1
        elif 0 <= event.parent < len(numbers):
            number = numbers[event.parent]
        else:
            number = bisect_right(starts, event.start_ns) - 1
            if number < 0 or event.start_ns >= steps[number].end_ns:
                number = -1
        numbers.append(number)
    return tuple(numbers)


def _list_roots(run: KernelRun, children: Mapping[int, list[int]], steps: Sequence[int], number: int) -> list[int]:
    """Return the outermost events of a step: its own event first, then those on other threads."""
    step = [
        event_index
        for event_index, event in enumerate(run.events)
        if event.kind == "step" and steps[event_index] == number
    ]
    return step + [
        event_index
        for event_index in children[-1]
        if steps[event_index] == number and run.events[event_index].kind != "step"
    ]


@dataclass(slots=True)
class _Call:
    """A recorded op call, or a module call with the calls inside it.

    `trace_index` is the index of its event in the Trace, for a module call that of its end. `flops` exclude the calls
    inside; None if unsupported.
    """

    kind: str
    name: str
    trace_index: int | None = None
    flops: int | None = 0
    inner: list[_Call] = field(default_factory=list)

    def total(self) -> int:
        return (self.flops or 0) + sum(call.total() for call in self.inner)

    def ops(self) -> Iterator[_Call]:
        """Yield all op calls in this call, including itself."""
        if self.kind == "op":
            yield self
        for call in self.inner:
            yield from call.ops()


def _build_calls(trace: Trace, cost_model: CostModel) -> _Call:
    """Return the nested calls of a Trace, those of all threads merged in the order of the Trace.

    Threads of the backward pass run while the calling thread waits; those that a model starts may run concurrently.
    The FLOPs of a region that is not a module are attributed to the enclosing module.
    """
    root = _Call("root", "")
    costs = region_costs(trace, cost_model)
    covered = find_covered(trace, costs)
    modules: dict[RegionCall | None, _Call] = {None: root}  # open region → the call of the innermost module
    for kind, event, region_call, index in walk_events(trace):
        is_covered = (event.stack, event.phase) in covered  # by the formula of an enclosing region
        if kind == "op":
            signature = trace.signatures[event.item]
            flops = 0 if is_covered else _sum(cost_model.op_cost(signature))
            modules[region_call].inner.append(_Call("op", signature.packet, index, flops))
        elif region_call is None:
            continue
        elif kind == "enter":
            region = trace.regions[region_call.region]
            modules[region_call] = parent = modules[region_call.parent]
            if region.kind == "module" and event.kind == "enter":
                modules[region_call] = _Call("module", region.name)
                parent.inner.append(modules[region_call])
        else:
            call = modules.pop(region_call)
            if (
                kind == "exit"
                and trace.regions[region_call.region].kind == "module"
                and region_call.begin.kind == "enter"
            ):
                call.trace_index = index
            if kind == "exit" and event.item in costs and not is_covered and not event.raised:
                call.flops = (call.flops or 0) + (_sum(costs[event.item].costs) or 0)
    return root


def _sum(costs: Sequence[OpCost]) -> int | None:
    supported = [int(cost.value) for cost in costs if cost.status is not Status.UNSUPPORTED]
    return sum(supported) if supported else None


class _StepMatcher:
    """Match the steps of a run with the calls of a Trace."""

    def __init__(self, run: KernelRun, children: Mapping[int, list[int]], calls: _Call | None) -> None:
        self._events = run.events
        self._children = children
        self._calls = calls
        self.call_of_event: dict[int, int] = {}
        self.flops: dict[int, int | None] = {}
        self._no_event: Counter[str] = Counter()
        self._attributed_to_modules: Counter[str] = Counter()
        self._compiled = 0
        self._ops: set[int] = set()

    def match_step(self, roots: Sequence[int]) -> None:
        """Match the events of one step; `roots` are the outermost."""
        assert self._calls is not None
        step = next((event_index for event_index in roots if self._events[event_index].kind == "step"), None)
        self._match(self._calls, roots, step)

    def ledger(self) -> KernelLedger:
        """Return how many ops were matched, and which ops and events were not."""
        unmatched: Counter[str] = Counter()
        if self._calls is not None:
            self._count_unmatched(self._children[-1], unmatched)
        return KernelLedger(
            matched=len(self._ops),
            no_event=tuple(self._no_event.most_common()),
            attributed_to_modules=tuple(self._attributed_to_modules.most_common()),
            no_op=tuple(unmatched.most_common()),
            compiled=self._compiled,
        )

    def _match(self, call: _Call, nested: Sequence[int], call_event: int | None) -> None:
        """Match the calls inside a call with events; FLOPs of unmatched ones are attributed to `call_event`."""
        candidates: list[int] = []
        ends: list[int] = []
        self._list_candidates(nested, candidates, ends)
        names = [self._name(event_index) for event_index in candidates]
        expected = list(_flatten(call.inner, {name for name in names if name[0] == "module"}))
        pairs = _align(names, ends, [(inner.kind, inner.name) for inner in expected])
        events = {call_position: candidates[position] for position, call_position in pairs}
        unmatched_flops = call.flops or 0
        for call_position, inner in enumerate(expected):
            event_index = events.get(call_position)
            if event_index is None:
                unmatched_flops += inner.total()
                self._no_event.update([op.name for op in inner.ops()])
                self._attributed_to_modules.update([op.name for op in inner.ops() if op.flops != 0])
                continue
            if inner.trace_index is not None:
                self.call_of_event[event_index] = inner.trace_index
            if inner.kind == "op":
                self.flops[event_index] = inner.flops
                self._ops.add(event_index)
            else:
                self._match(inner, self._children.get(event_index, ()), event_index)
        if call_event is not None:
            self.flops[call_event] = unmatched_flops

    def _list_candidates(self, event_indexes: Sequence[int], candidates: list[int], ends: list[int]) -> None:
        """Append the ops and modules among events, each before those nested in it, and the position where these end.

        Events in a module call are not listed, since they are matched with that call.
        """
        for event_index in event_indexes:
            event = self._events[event_index]
            if event.kind == "compiled":
                self._compiled += self._count_ops(event_index)
                continue
            is_call = event.kind in ("op", "module")
            if is_call:
                position = len(candidates)
                candidates.append(event_index)
                ends.append(0)
            if event.kind != "module":
                self._list_candidates(self._children.get(event_index, ()), candidates, ends)
            if is_call:
                ends[position] = len(candidates)

    def _count_ops(self, event_index: int) -> int:
        inner = self._children.get(event_index, ())
        return (self._events[event_index].kind == "op") + sum(map(self._count_ops, inner))

    def _name(self, event_index: int) -> tuple[str, str]:
        event = self._events[event_index]
        return event.kind, event.module if event.kind == "module" else event.name

    def _count_unmatched(self, event_indexes: Sequence[int], unmatched: Counter[str]) -> bool:
        """Count the outermost op events that neither are nor contain a matched op; return whether any op is matched."""
        any_matched = False
        for event_index in event_indexes:
            event = self._events[event_index]
            if event_index in self._ops:
                any_matched = True
            elif event.kind != "compiled":
                inner: Counter[str] = Counter()
                matched = self._count_unmatched(self._children.get(event_index, ()), inner)
                if event.kind == "op" and not matched:
                    unmatched[event.name] += 1
                else:
                    unmatched.update(inner)
                any_matched |= matched
        return any_matched


def _flatten(calls: Sequence[_Call], with_events: set[tuple[str, str]]) -> Iterator[_Call]:
    """Yield calls; the call of a module that has no events is replaced by the calls inside it."""
    for call in calls:
        if call.kind == "module" and ("module", call.name) not in with_events:
            if call.flops:
                yield _Call("region", call.name, None, call.flops)
            yield from _flatten(call.inner, with_events)
        else:
            yield call


_Names = Sequence[tuple[str, str]]


def _align(names: _Names, ends: Sequence[int], expected: _Names) -> list[tuple[int, int]]:
    """Return the alignment of two ordered lists of names as pairs of positions.

    Names nested in an aligned one, up to its end, are not aligned. An op equals its in-place variant, since autograd
    accumulates gradients in place if no dispatch mode is active.
    """
    names, expected = list(map(_normalise, names)), list(map(_normalise, expected))
    expected_names = set(expected)
    positions = [position for position, name in enumerate(names) if name in expected_names]
    filtered_names = [names[position] for position in positions]
    filtered_ends = [bisect_left(positions, ends[position]) for position in positions]
    pairs = _align_next(filtered_names, filtered_ends, expected)
    if len(pairs) < len(expected):
        if len(filtered_names) * len(expected) <= _MAX_PAIRS:
            pairs = _align_longest(filtered_names, filtered_ends, expected)
        else:
            pairs = _align_in_window(filtered_names, filtered_ends, expected)
    return [(positions[position], expected_position) for position, expected_position in pairs]


def _normalise(name: tuple[str, str]) -> tuple[str, str]:
    kind, text = name
    return (kind, _RECORDED_OPS.get(text, text).removesuffix("_")) if kind == "op" else name


def _align_next(names: _Names, ends: Sequence[int], expected: _Names) -> list[tuple[int, int]]:
    """Align each expected name with the next equal one; stop where there is none."""
    pairs: list[tuple[int, int]] = []
    position = 0
    while position < len(names) and len(pairs) < len(expected):
        if names[position] == expected[len(pairs)]:
            pairs.append((position, len(pairs)))
            position = ends[position]
        else:
            position += 1
    return pairs


def _align_in_window(names: _Names, ends: Sequence[int], expected: _Names) -> list[tuple[int, int]]:
    """Align each expected name with the first equal one among the next `_WINDOW` names, if there is one."""
    pairs: list[tuple[int, int]] = []
    start = 0
    for expected_position, name in enumerate(expected):
        for position in range(start, min(start + _WINDOW, len(names))):
            if names[position] == name:
                pairs.append((position, expected_position))
                start = ends[position]
                break
    return pairs


def _align_longest(names: _Names, ends: Sequence[int], expected: _Names) -> list[tuple[int, int]]:
    """Return a longest common subsequence as pairs of positions, preferring outer events."""
    count = len(expected)
    # lengths[i][j]: the length of the longest alignment of names[i:] and expected[j:].
    lengths = [array("I", bytes(4 * (count + 1))) for _ in range(len(names) + 1)]
    numbers: dict[tuple[str, str], int] = {}
    expected_numbers = [numbers.setdefault(name, len(numbers)) for name in expected]
    for position in range(len(names) - 1, -1, -1):
        number = numbers.get(names[position], -1)
        row, next_row, end_row = lengths[position], lengths[position + 1], lengths[ends[position]]
        longest = 0
        for column in range(count - 1, -1, -1):
            if next_row[column] > longest:
                longest = next_row[column]
            if expected_numbers[column] == number and end_row[column + 1] >= longest:
                longest = end_row[column + 1] + 1
            row[column] = longest
    pairs: list[tuple[int, int]] = []
    position = column = 0
    while position < len(names) and column < count:
        length = lengths[position][column]
        if names[position] == expected[column] and lengths[ends[position]][column + 1] + 1 == length:
            pairs.append((position, column))
            position, column = ends[position], column + 1
        elif lengths[position][column + 1] == length:
            column += 1
        else:
            position += 1
    return pairs


def _find_owners(
    run: KernelRun, call_of_event: Mapping[int, int], trace: Trace | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the module and the phase of each event.

    A matched op, and the autograd node that runs it, have the module and phase of the Trace. Any other event in a
    module call belongs to that module, and an autograd node to the module of the last forward op with the node's
    sequence number; a node of gradient accumulation has no sequence number, and belongs to the module of the node
    before it.
    """
    located = _locate_ops(run, call_of_event, trace)
    nodes = _locate_nodes(run, located)
    modules: list[str] = []
    phases: list[str] = []
    forward_modules: dict[tuple[int, int], str] = {}
    last_modules: dict[int, str] = {}  # thread → the module of its last node
    for event_index, event in enumerate(run.events):
        parent = event.parent
        module, phase = (modules[parent], phases[parent]) if 0 <= parent < event_index else ("", "forward")
        if event.kind == "module":
            module, phase = event.module, "recompute" if phase in ("backward", "recompute") else phase
        elif event.kind == "optimizer":
            module, phase = "", "optimizer"
        elif event.kind == "node" and (parent < 0 or run.events[parent].kind != "node"):
            phase = "backward"
            forward_module = (
                forward_modules.get((event.forward_thread, event.sequence)) if event.sequence >= 0 else None
            )
            if forward_module is None:
                forward_module = last_modules.get(event.thread, "")
            module = nodes.get(event_index, forward_module)
            last_modules[event.thread] = module
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
            event = trace.events[index]
            located[event_index] = innermost(scopes[event.stack]), event.phase
    return located


def _locate_nodes(run: KernelRun, located: Mapping[int, tuple[str, str]]) -> dict[int, str]:
    """Return the modules of the autograd nodes in which matched ops of the backward pass ran."""
    nodes: dict[int, str] = {}
    for event_index, (module, phase) in located.items():
        parent = run.events[event_index].parent
        while phase == "backward" and parent >= 0:
            if run.events[parent].kind == "node":
                nodes.setdefault(parent, module)
            parent = run.events[parent].parent
    return nodes


def _add_nested(run: KernelRun, self_flops: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return the FLOPs of each event, nested events included; None if unknown."""
    sums: list[Any] = list(self_flops)
    for event_index in range(len(run.events) - 1, -1, -1):  # nested events before their parents
        parent = run.events[event_index].parent
        if parent >= 0 and sums[event_index] is not None and run.events[event_index].kind != "device":
            sums[parent] = sums[event_index] + (sums[parent] or 0)
    return tuple(sums)
