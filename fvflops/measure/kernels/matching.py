"""Match torch.profiler's events with the ops of a Trace: by module call and, within one, by order and shapes."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fvflops.counting.count_trace import CostModel
from fvflops.counting.traffic.byte_costs import split_by_aliasing
from fvflops.measure.kernels.alignment import align, find_owners, name_of_work
from fvflops.measure.kernels.recorded_calls import NO_WORK, RecordedCall, ShapeCosts, Work, add_works, nest_calls
from fvflops.text import short_repr
from fvflops.trace import Trace
from fvflops.trace.kernel_events import KernelLedger, KernelRun

_WRAPPERS = ("torch::autograd::", "torch.")  # names of events that are not ops of their own, such as AccumulateGrad


@dataclass(frozen=True, slots=True, repr=False)
class KernelMatch:
    """A torch.profiler run with the module, the phase and the work of each event.

    Its events are all of torch.profiler's, such as ops, module calls and autograd nodes. Kernels have the kind
    "device": they have the module and phase of the op that launched them, and no work of their own.

    `modules`, `phases` and `steps` have an item for each event; `steps` are numbers of steps, -1 outside all steps.
    `self_work` is without nested events, `work` with them; None if unknown. `call_of_event` maps the index of an event
    to the index of the Trace's event matched with it: an op, or the end of a module call. `total` is the work of one
    step, None without a Trace. `nbytes` maps events to the bytes that they read and write, without cache reuse or
    fusion, where known.
    """

    run: KernelRun
    modules: tuple[str, ...]
    phases: tuple[str, ...]
    steps: tuple[int, ...]
    self_work: tuple[Work | None, ...]
    work: tuple[Work | None, ...]
    call_of_event: Mapping[int, int]
    ledger: KernelLedger
    trace: Trace | None = None
    total: Work | None = None
    nbytes: Mapping[int, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        matched = f"{len(self.call_of_event):,} matched with ops or modules"
        return short_repr(self, "", f"{len(self.run.events):,} events", matched)

    @property
    def self_flops(self) -> tuple[int | None, ...]:
        """FLOPs of each event without nested events."""
        return tuple([None if work is None else work.flops for work in self.self_work])

    @property
    def flops(self) -> tuple[int | None, ...]:
        """FLOPs of each event with nested events."""
        return tuple([None if work is None else work.flops for work in self.work])

    def complete_steps(self) -> list[int]:
        """Return the numbers of the completed steps; a run that raised did not complete its last step."""
        numbers = sorted({step for step in self.steps if step >= 0})
        return numbers if self.run.complete else numbers[:-1]

    def clock(self) -> tuple[int, int]:
        """Return the number of completed steps and their time in ns; without a schedule the run is one step.

        The time is the span of the kernels if there are any: the CPU may launch a step's kernels in less time.
        """
        complete = set(self.complete_steps())
        inside = [event for event, step in zip(self.run.events, self.steps, strict=True) if step in complete]
        steps = [event for event in inside if event.kind == "step"]
        kernels = [event for event in inside if event.kind == "device"]
        if steps and not kernels:
            return len(steps), max(sum(event.duration_ns for event in steps), 1)
        start = min((event.start_ns for event in kernels or inside), default=0)
        end = max((event.end_ns for event in kernels or inside), default=0)
        return len(complete), max(end - start, 1)


def match_kernels(
    run: KernelRun, trace: Trace | None, cost_model: CostModel, *, by_shapes: ShapeCosts | None = None
) -> KernelMatch:
    """Return a run with the modules, phases and work of its events.

    The Trace has one step; each step of the run is matched with it. In each module call, ops are matched in order
    with the outermost op events of their names, which get their work; kernels are not matched. The work of ops without
    an event, as in fused kernels, is attributed to the call of their module.

    `by_shapes` are costs of events by the shapes of their own inputs. They replace the recorded op's costs where
    the shapes of the two differ, and apply to events that match no op.
    """
    steps = _number_steps(run)
    calls = None if trace is None else nest_calls(trace, cost_model)
    matcher = _StepMatcher(run, calls, by_shapes)
    numbers = sorted({step for step in steps if step >= 0})
    if calls is not None:
        for number in numbers:
            step = [index for index, event in enumerate(run.events) if event.kind == "step" and steps[index] == number]
            outermost = matcher.children[-1]
            others = [index for index in outermost if steps[index] == number and run.events[index].kind != "step"]
            matcher.match(calls, [*step, *others], step[0] if step else None)
    matcher.count_by_shapes()
    modules, phases = find_owners(run, matcher.call_of_event, trace)
    self_work = tuple([matcher.work.get(event_index) for event_index in range(len(run.events))])
    total = None if calls is None else calls.total()
    return KernelMatch(
        run=run,
        modules=modules,
        phases=phases,
        steps=steps,
        self_work=self_work,
        work=_add_nested(run, self_work),
        call_of_event=matcher.call_of_event,
        ledger=matcher.ledger(0 if total is None else total.flops * len(numbers)),
        trace=trace,
        total=total,
        nbytes=_list_bytes(matcher, trace, by_shapes),
    )


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


class _StepMatcher:
    """Match the steps of a run with the calls of a Trace."""

    def __init__(self, run: KernelRun, calls: RecordedCall | None, by_shapes: ShapeCosts | None) -> None:
        self._events = run.events
        # Event → the events nested in it, without device events; -1 → the outermost events.
        self.children: dict[int, list[int]] = defaultdict(list)
        for event_index, event in enumerate(run.events):
            if event.kind != "device":
                self.children[event.parent].append(event_index)
        recorded = [] if calls is None else list(calls.walk())
        self._modules = {call.name for call in recorded if call.kind == "module"}
        counted = (call.name for call in recorded if call.kind == "op" and call.work not in (None, NO_WORK))
        self._counted = set(map(name_of_work, counted))
        self._calls = calls
        self._by_shapes = by_shapes
        self.call_of_event: dict[int, int] = {}
        self.work: dict[int, Work | None] = {}
        self.counted_by_shapes: set[int] = set()
        # Fields of the ledger: sums, and numbers of calls by name.
        self._sums: Counter[str] = Counter()
        self._named: dict[str, Counter[str]] = defaultdict(Counter)
        self._ops: set[int] = set()
        self._in_compiled: set[int] = set()

    def count_by_shapes(self) -> None:
        """Count the outermost op events of known shapes that neither are nor contain a matched op."""
        # If code is compiled, the work of recorded ops without an event is on modules and steps.
        if self._by_shapes is None or (self._sums["compiled"] and self._calls is not None):
            return
        by_shapes, around = self._by_shapes, self._around_matched()
        for event_index in self._list_outermost(
            self.children[-1], lambda event: self._is_unmatched(event, around) and by_shapes.work(event) is not None
        ):
            self._ops.add(event_index)
            self._count_by_shapes(event_index, by_shapes.work(event_index) or NO_WORK, "flops_by_shapes")

    def _count_by_shapes(self, event_index: int, work: Work, total: str) -> None:
        self.work[event_index] = work
        self.counted_by_shapes.add(event_index)
        self._sums[total] += work.flops

    def ledger(self, recorded: int) -> KernelLedger:
        """Return how ops and events were matched; `recorded` are the FLOPs of the ops of all steps."""
        if self._calls is not None or self._by_shapes is not None:
            around = self._around_matched()
            indexes = self._list_outermost(self.children[-1], lambda event: self._is_unmatched(event, around))
            self._named["no_op"].update(self._events[event_index].name for event_index in indexes)
        named: dict[str, Any] = {field: tuple(names.most_common()) for field, names in self._named.items()}
        return KernelLedger(**{**named, **self._sums}, recorded_flops=recorded)

    def match(self, call: RecordedCall, nested: Sequence[int], call_event: int | None) -> None:
        """Match the calls inside a call with events; the work of unmatched ones is attributed to `call_event`."""
        candidates, ends = list[int](), list[int]()
        calls = self._list_outermost(nested, lambda e: self._is_call(e) or self._events[e].kind == "compiled")
        # Threads of the backward pass run while the calling thread waits.
        outermost = sorted(calls, key=lambda event: self._events[event].start_ns)
        for event_index in outermost:
            self._list_candidates(event_index, candidates, ends)
        items = [self._read_call(event_index) for event_index in candidates]
        expected = list(_flatten(call.inner, {item.name for item in items if item.kind == "module"}))
        events = {call_position: candidates[position] for position, call_position in align(items, ends, expected)}
        unmatched_works = [NO_WORK, call.work]
        for call_position, inner in enumerate(expected):
            if call_position not in events:
                unmatched_works.append(inner.total())
                ops = [op for op in inner.walk() if op.kind == "op"]
                self._named["no_event"].update([op.name for op in ops])
                self._named["attributed_to_modules"].update([op.name for op in ops if op.work != NO_WORK])
                continue
            event_index = events[call_position]
            if inner.trace_index is not None:
                self.call_of_event[event_index] = inner.trace_index
            if inner.kind == "op":
                self._add_op(event_index, inner)
            else:
                self.match(inner, self.children[event_index], event_index)
        unmatched_work = self._count_compiled(outermost, add_works(unmatched_works) or NO_WORK)
        if call_event is None or (self._by_shapes is not None and not self._sums["compiled"]):
            # With shapes, an event that no recorded op matches has its own work, possibly the same as these ops.
            self._sums["lost_flops"] += unmatched_work.flops
        else:
            self.work[call_event] = unmatched_work

    def _read_call(self, event_index: int) -> RecordedCall:
        event = self._events[event_index]
        kind = "compiled" if event_index in self._in_compiled else event.kind
        return RecordedCall(kind, event.module if event.kind == "module" else event.name, shapes=event.tensor_shapes)

    def _add_op(self, event_index: int, call: RecordedCall) -> None:
        """Give an event the work of the op matched with it, or the work of its own shapes if they differ."""
        work = call.work
        self._sums["landed_flops"] += 0 if work is None else work.flops
        self._sums["matched"] += 1
        if work is None and self._by_shapes is not None:
            return  # counted by the shapes of the ops inside it
        self._ops.add(event_index)
        local = self._find_local(event_index)
        event = self._events[local]
        # An event of an op's out= variant has the shapes of the results too.
        if event.tensor_shapes and call.shapes and event.tensor_shapes[: len(call.shapes)] != call.shapes:
            self._named["other_shapes"][event.name] += 1
            own = None if self._by_shapes is None else self._by_shapes.work(local)
            if own is not None:
                return self._count_by_shapes(local, own, "flops_by_shapes")
        self.work[event_index] = work

    def _find_local(self, event_index: int) -> int:
        """Return the event of a DTensor's op on its local part: nested, with the same name and other shapes."""
        event = self._events[event_index]
        pending = list(self.children[event_index])
        while pending and event.tensor_shapes is not None:
            inner = pending.pop(0)
            if self._events[inner].name != event.name:
                pending += self.children[inner]
            elif self._events[inner].tensor_shapes not in (None, event.tensor_shapes):
                return inner
        return event_index

    def _list_outermost(self, event_indexes: Iterable[int], is_wanted: Callable[[int], bool | None]) -> Iterator[int]:
        """Yield the outermost wanted events among some and the events in them; None excludes an event with these."""
        pending = list(event_indexes)[::-1]
        while pending:  # Python functions may be nested deeper than Python's stack
            event_index = pending.pop()
            wanted = is_wanted(event_index)
            if wanted:
                yield event_index
            elif wanted is not None:
                pending += reversed(self.children[event_index])

    def _list_candidates(self, event_index: int, candidates: list[int], ends: list[int]) -> None:
        """Append an op or a module with the ops nested in it, and for each the position where its nested ops end.

        Events in a module call are matched with that call; of compiled code only ops with work are listed.
        """
        kind = self._events[event_index].kind
        if kind == "compiled":
            self._sums["compiled"] += self._count_ops(event_index)
            if self._by_shapes is None:
                for op in self._list_counted(event_index):
                    self._in_compiled.add(op)
                    candidates.append(op)
                    ends.append(len(candidates))
            return
        is_call, position = self._is_call(event_index), len(candidates)
        if is_call:
            candidates.append(event_index)
            ends.append(0)
        for inner in self.children[event_index] if not is_call or kind != "module" else ():
            self._list_candidates(inner, candidates, ends)
        if is_call:
            ends[position] = len(candidates)

    def _list_counted(self, event_index: int) -> Iterator[int]:
        """Yield the outermost ops in compiled code that have work: ops that are called as such, not fused."""
        return self._list_outermost(
            self.children[event_index], lambda inner: self._events[inner].kind == "op" and self._has_work(inner)
        )

    def _has_work(self, event_index: int) -> bool:
        """Return whether an op has work: by its shapes, else as a recorded one has."""
        if self._by_shapes is None:
            return name_of_work(self._events[event_index].name) in self._counted
        return self._by_shapes.work(event_index) not in (None, NO_WORK)

    def _count_compiled(self, event_indexes: Sequence[int], unmatched: Work) -> Work:
        """Count ops in compiled code, in whatever order, by shapes; return the unmatched work that remains."""
        for event_index in event_indexes:
            if self._events[event_index].kind != "compiled" or self._by_shapes is None:
                continue
            for op in self._list_counted(event_index):
                work = self._by_shapes.work(op)
                if work is not None and work.macs <= unmatched.macs and work.flops <= unmatched.flops:
                    unmatched = unmatched - work
                    self._ops.add(op)
                    self._count_by_shapes(op, work, "landed_flops")
        return unmatched

    def _is_call(self, event_index: int) -> bool:
        event = self._events[event_index]
        return event.kind == "op" or (event.kind == "module" and event.module in self._modules)

    def _count_ops(self, event_index: int) -> int:
        inner = self.children[event_index]
        return (self._events[event_index].kind == "op") + sum(map(self._count_ops, inner))

    def _around_matched(self) -> set[int]:
        """Return the events around matched ops, up to a call of compiled code.

        An op without FLOPs, such as a view, does not identify an enclosing custom op or op with a formula.
        """
        around: set[int] = set()
        for event_index in self._ops:
            has_work = self.work.get(event_index) != NO_WORK
            parent = self._events[event_index].parent
            while parent >= 0 and parent not in around and self._events[parent].kind != "compiled":
                if not has_work and not self._is_decomposed(parent):
                    break
                around.add(parent)
                parent = self._events[parent].parent
        return around

    def _is_decomposed(self, event_index: int) -> bool:
        """Return whether the ops inside an event do its work: it is an op of ATen without a formula, or no op."""
        event = self._events[event_index]
        if event.kind != "op":
            return True
        work = None if self._by_shapes is None else self._by_shapes.work(event_index)
        return event.name.startswith(("aten::", *_WRAPPERS)) and work in (None, NO_WORK)

    def _is_unmatched(self, event_index: int, around_matched: Collection[int]) -> bool | None:
        """Return whether an event is an op that neither is nor contains a matched op, None for a matched one."""
        kind, name = self._events[event_index].kind, self._events[event_index].name
        if event_index in self._ops or (kind == "compiled" and self._calls is not None):
            return None
        return kind == "op" and event_index not in around_matched and not name.startswith(_WRAPPERS)


def _list_bytes(matcher: _StepMatcher, trace: Trace | None, by_shapes: ShapeCosts | None) -> dict[int, int]:
    """Return event → the bytes that it reads and writes, where known."""
    known: dict[int, int] = {}
    if trace is not None:
        split, cost_model = split_by_aliasing(trace, keep_events=True)
        traffic = [cost_model.op_traffic(signature) for signature in split.signatures]
        for event_index, index in matcher.call_of_event.items():
            event = (split.events or ())[index]
            if event.kind == "op" and (moved := traffic[event.item]) is not None:
                known[event_index] = sum(moved)
    for event_index in matcher.counted_by_shapes:
        nbytes = None if by_shapes is None else by_shapes.nbytes(event_index)
        if nbytes is not None:
            known[event_index] = nbytes
    return known


def _flatten(calls: Sequence[RecordedCall], modules: set[str]) -> Iterator[RecordedCall]:
    """Yield calls; the call of a module without events, which is not in `modules`, is replaced by its inner calls."""
    for call in calls:
        if call.kind == "module" and call.name not in modules:
            if call.work not in (None, NO_WORK):
                yield RecordedCall("region", call.name, None, call.work)
            yield from _flatten(call.inner, modules)
        else:
            yield call


def _add_nested(run: KernelRun, self_work: Sequence[Work | None]) -> tuple[Work | None, ...]:
    """Return the work of each event, nested events included; None if unknown."""
    sums = list(self_work)
    for event_index in range(len(run.events) - 1, -1, -1):  # nested events before their parents
        event, work = run.events[event_index], sums[event_index]
        if event.parent >= 0 and work is not None and event.kind != "device":
            outer = sums[event.parent]
            sums[event.parent] = work if outer is None else work + outer
    return tuple(sums)
