"""The timeline of a rank: its steps, the GPU's work, causes of idle time, and straggling ranks."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from fvflops.explain.launch_contexts import Context, IdleCauses, LaunchContexts, kind_of_kernel, kind_of_op
from fvflops.explain.op_costs import UNKNOWN_COST, OpCosts
from fvflops.explain.step_records import IdleRow, StepTimeline, WorkRow
from fvflops.explain.time_division import (
    COMMUNICATION,
    COMPUTE,
    MEMCPY,
    Interval,
    Piece,
    disjoint,
    gaps,
    merge,
    split,
    subtract,
)
from fvflops.explain.trace_columns import MEMCPY as COPY
from fvflops.explain.trace_columns import OP, RANGE, Activities, TraceColumns
from fvflops.text import short_repr, shown_by_fields
from fvflops.units import format_quantity, format_seconds

_STEP = re.compile(r"ProfilerStep\*?#\d+")
# "dtype" of a collective → bytes of an element.
_ELEMENT_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "Float8_e4m3fn", "Float8_e5m2", "Float8_e4m3fnuz"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Double", "Long"), 8),
}
_GROUPS = ("compute", "communication", "memcpy")


class Window(NamedTuple):
    """The time of a step on the GPU; `host_ns` is its time on the host."""

    name: str
    start: int
    host_ns: int | None


class _Key(NamedTuple):
    """Key by which rows are summed: first fields of a WorkRow, `inputs` and `details` as numbers of the columns."""

    kind: str
    group: str
    op: str
    kernel: str
    phase: str
    module: str
    inputs: int
    details: int
    is_graph: bool


@dataclass(slots=True)
class _Sums:
    calls: int = 0
    kernels: int = 0
    kernel_ns: int = 0
    ns: int = 0


@dataclass(frozen=True, slots=True, repr=False)
class RankTimeline:
    """Activity of one rank's GPU in each step; in a trace without kernels, of the host's ops.

    `device_name` is the GPU's as recorded, "" if unknown. `columns` are the events themselves and `activities` the
    kernels, each with its op and launch.
    """

    path: str
    rank: int | None
    device_name: str
    on_gpu: bool
    steps: tuple[StepTimeline, ...]
    columns: TraceColumns = field(compare=False)
    activities: Activities = field(compare=False)

    def __repr__(self) -> str:
        steps = format_quantity(len(self.steps), "step")
        return short_repr(self, self.path, steps, format_seconds(sum(step.total_ns for step in self.steps) / 1e9))


def build_timeline(columns: TraceColumns, costs: OpCosts) -> RankTimeline:
    """Return the timeline of a trace."""
    on_gpu = len(columns.gpu) > 0
    activities = columns.gpu if on_gpu else _list_host_work(columns)
    windows, bounds = _find_windows(columns, activities, on_gpu=on_gpu)
    contexts = LaunchContexts(columns, costs.is_counted)
    found = [contexts.of(op, launch) for op, launch in zip(activities.op, activities.launch, strict=True)]
    named = zip(found, activities.name, activities.kind, strict=True)
    kinds = [contexts.kind(context, columns.names[name], kind) for context, name, kind in named]
    division = _divide(activities, kinds)
    work = _sum_work(columns, activities, found, division, bounds, _find_outer(columns, found, costs))
    idle = _sum_idle(columns, activities, division, bounds, on_gpu=on_gpu)
    unions = [[0, 0] for _ in windows]
    for column, covered in enumerate(division.unions[COMMUNICATION:]):
        for window, piece in split((Piece(*interval, -1) for interval in covered), bounds):
            unions[window][column] += piece.end - piece.start
    steps = []
    for index, (name, _, host_ns) in enumerate(windows):
        rows = tuple(_make_rows(columns, work[index], costs))
        compute, communication, memcpy = (sum(row.ns for row in rows if row.group == group) for group in _GROUPS)
        begin, end, (all_communication, all_memcpy) = bounds[index], bounds[index + 1], unions[index]
        exposed = compute, communication, memcpy, all_communication, all_memcpy
        steps.append(StepTimeline(name, begin, end, *exposed, host_ns, rows, idle[index]))
    name = columns.device_name
    return RankTimeline(columns.path, columns.rank, name, on_gpu, tuple(steps), columns, activities)


def _list_host_work(columns: TraceColumns) -> Activities:
    """Return the self times of ops, for a trace without kernels: each an activity on its thread.

    Collectives of gloo, which have threads of their own, are activities too; ops in other work than the step's are not.
    """
    host, found, causes = columns.host, Activities(), IdleCauses(columns)
    collectives = {number for number, name in enumerate(columns.names.values) if name.startswith("gloo:")}
    pieces = []
    for thread in range(len(columns.threads)):
        first, stop = host.thread_range(thread)
        if first < stop and (OP in host.kind[first:stop] or not collectives.isdisjoint(host.name[first:stop])):
            end = max(host.end[first:stop])
            pieces += [(*piece, thread) for piece in host.pieces(thread, host.start[first], end)]
    for start, end, span, thread in sorted(pieces):
        op = host.op[span] if span >= 0 else -1
        shown = op if op >= 0 or span < 0 or host.name[span] not in collectives else span
        if shown < 0 or causes.is_other_work(span):
            continue
        for column, value in ((found.start, start), (found.end, end), (found.name, host.name[shown]), (found.op, op)):
            column.append(value)
        found.stream.append(thread)
    count = len(found)
    found.kind, found.details, found.launch = (array("i", [value]) * count for value in (0, -1, -1))
    found.external = found.correlation = array("q", [-1]) * count
    return found


def _find_windows(columns: TraceColumns, activities: Activities, *, on_gpu: bool) -> tuple[list[Window], list[int]]:
    """Return the windows of the steps, and their bounds: one more."""
    host = columns.host
    is_step = {number for number, name in enumerate(columns.names.values) if _STEP.fullmatch(name)}
    steps = [index for index, kind in enumerate(host.kind) if kind == RANGE and host.name[index] in is_step]
    steps.sort(key=host.start.__getitem__)
    first, last = min(activities.start, default=0), max(activities.end, default=0)
    if not steps:
        return [Window("whole trace", first, None)], [first, last]
    windows = []
    ends = [host.end[index] for index in steps]
    starts = [host.start[index] for index in steps] + [max(ends)]
    if on_gpu:
        starts = _first_kernels(columns, activities, starts)
    else:
        first, last = min(first, starts[0]), max(last, starts[-1])
    for step, start in zip(steps, starts, strict=False):
        windows.append(Window(columns.names[host.name[step]], start, host.end[step] - host.start[step]))
    windows.append(Window("after the steps", starts[-1], None))
    if first < starts[0]:
        windows.insert(0, Window("before the steps", first, None))
    bounds = [window.start for window in windows] + [last]
    kept = [index for index in range(len(windows)) if bounds[index + 1] > bounds[index] or not index]
    return [windows[index] for index in kept], [bounds[index] for index in kept] + [last]


def _first_kernels(columns: TraceColumns, activities: Activities, starts: Sequence[int]) -> list[int]:
    """Return, for each time of the host, the start of the first kernel that was launched from then on."""
    launched = sorted(
        (columns.host.start[launch], activities.start[index])
        for index, launch in enumerate(activities.launch)
        if launch >= 0
    )
    found: list[int] = []
    earliest, position = max(activities.end), len(launched)
    for start in reversed(starts):
        while position and launched[position - 1][0] >= start:
            position -= 1
            earliest = min(earliest, launched[position][1])
        found.append(earliest)
    return found[::-1]


@dataclass(frozen=True, slots=True)
class _Division:
    """Which activity each moment belongs to; `unions` are the times of compute, communication and copies."""

    kinds: Sequence[str]
    groups: Sequence[int]
    pieces: Sequence[Piece]
    unions: Sequence[Sequence[Interval]]

    def covered(self) -> list[Interval]:
        """Return when anything runs."""
        return merge(sorted(interval for union in self.unions for interval in union))


def _divide(activities: Activities, kinds: Sequence[str]) -> _Division:
    groups = [
        COMMUNICATION if kind == "communication" else MEMCPY if activity == COPY else COMPUTE
        for kind, activity in zip(kinds, activities.kind, strict=True)
    ]
    members = [[index for index, own in enumerate(groups) if own == group] for group in range(len(_GROUPS))]
    unions = [merge((activities.start[index], activities.end[index]) for index in group) for group in members]
    pieces: list[Piece] = []
    for group, indexes in enumerate(members):
        covered = merge(sorted(interval for union in unions[:group] for interval in union))
        pieces += subtract(disjoint(activities.start, activities.end, indexes), covered)
    return _Division(kinds, groups, pieces, unions)


def _sum_work(
    columns: TraceColumns,
    activities: Activities,
    contexts: Sequence[Context],
    division: _Division,
    bounds: Sequence[int],
    outer: Set[int],
) -> list[dict[_Key, _Sums]]:
    """Return the sums of each window's rows; calls of `outer` ops are counted by the ops inside them."""
    host, names = columns.host, columns.names
    sums: list[dict[_Key, _Sums]] = [defaultdict(_Sums) for _ in bounds[1:]]
    keys = []
    for index, (op, phase, module, _, _, is_graph) in enumerate(contexts):
        called, inputs = (names[host.name[op]], host.inputs[op]) if op >= 0 else ("", -1)
        kind, group = division.kinds[index], _GROUPS[division.groups[index]]
        kernel, details = names[activities.name[index]], activities.details[index]
        keys.append(_Key(kind, group, called, kernel, phase, module, inputs, details, is_graph))
    lengths = [end - start for start, end in zip(activities.start, activities.end, strict=True)]
    windows = [bisect_right(bounds, start) - 1 for start in activities.start]
    longest: dict[int, int] = {}  # op call → its longest kernel, which its work is counted with
    for index, (window, key, length) in enumerate(zip(windows, keys, lengths, strict=True)):
        row = sums[window][key]
        row.kernels += 1
        row.kernel_ns += length
        op = contexts[index].op
        if op >= 0 and op not in outer:
            longest[op] = max(longest.get(op, index), index, key=lengths.__getitem__)
    for index in longest.values():
        sums[windows[index]][keys[index]].calls += 1
    for window, piece in split(division.pieces, bounds):
        sums[window][keys[piece.activity]].ns += piece.end - piece.start
    return sums


def _find_outer(columns: TraceColumns, contexts: Sequence[Context], costs: OpCosts) -> set[int]:
    """Return the ops whose work nested ops do: ops of the same class, or with multiply-adds."""
    host, names = columns.host, columns.names
    outer: set[int] = set()
    for op in {context.op for context in contexts if context.op >= 0}:
        name = names[host.name[op]]
        work = costs.cost(name, columns.inputs[host.inputs[op]]).work if host.inputs[op] >= 0 else None
        if work is None:
            continue
        around = host.parent[op]
        while around >= 0 and (around := host.op[around]) >= 0:
            if work.macs or kind_of_op(names[host.name[around]]) == kind_of_op(name):
                outer.add(around)
            around = host.parent[around]
    return outer


def _make_rows(columns: TraceColumns, sums: Mapping[_Key, _Sums], costs: OpCosts) -> Iterator[WorkRow]:
    for key, row in sorted(sums.items(), key=lambda item: -item[1].ns):
        inputs = columns.inputs[key.inputs] if key.inputs >= 0 else ()
        cost = costs.cost(key.op, inputs) if inputs else UNKNOWN_COST
        work, calls = cost.work, row.calls
        details = columns.details[key.details] if key.details >= 0 else {}
        nbytes = None if cost.nbytes is None else cost.nbytes * calls
        if key.kind == "communication":
            message = _message_bytes(details)
            nbytes = None if message is None else message * row.kernels
        yield WorkRow(
            *(*key[:6], inputs, tuple(details.items()), key.is_graph, calls, row.kernels, row.kernel_ns, row.ns),
            macs=None if work is None else work.macs * calls,
            flops=None if work is None else work.flops * calls,
            nbytes=nbytes,
            expected_ns=None if cost.seconds is None else cost.seconds * 1e9 * calls,
            counted_ns=0 if work is None else row.kernel_ns,
            modelled_ns=0 if cost.seconds is None else row.kernel_ns,
        )


def _message_bytes(details: Mapping[str, Any]) -> int | None:
    """Return the bytes of a collective's larger message, None if they were not recorded."""
    sizes = [details.get(key) for key in ("In msg nelems", "Out msg nelems")]
    dtype = _ELEMENT_BYTES.get(str(details.get("dtype")))
    known = [size for size in sizes if isinstance(size, int)]
    return max(known) * dtype if known and dtype else None


def _sum_idle(
    columns: TraceColumns, activities: Activities, division: _Division, bounds: Sequence[int], *, on_gpu: bool
) -> list[tuple[IdleRow, ...]]:
    causes, covered = IdleCauses(columns), division.covered()
    main = Counter(activities.stream).most_common(1)[0][0] if len(activities) else 0
    starting = dict(zip(activities.start, activities.launch, strict=True))
    found = []
    for first, last in pairwise(bounds):
        sums: dict[tuple[str, str], IdleRow] = {}
        for start, end in gaps(covered, first, last):
            pieces = causes.of_gap(start, end, starting.get(end, -1)) if on_gpu else causes.on_host(start, end, main)
            for cause, name, ns in pieces:
                row = sums.get((cause, name), IdleRow(cause, name))
                sums[cause, name] = IdleRow(cause, name, row.intervals + 1, row.ns + ns)
        found.append(tuple(sorted(sums.values(), key=lambda row: -row.ns)))
    return found


# Arguments that collectives of one group and kind share on all its ranks.
_SHARED = ("Process Group Name", "Collective name", "dtype")


@dataclass(frozen=True, slots=True, repr=False)
@shown_by_fields
class RankWait:
    """How long a rank's collectives waited for others, in nanoseconds over the whole trace.

    A collective's kernel runs from the time at which its rank joins until all have. Clocks of different hosts differ,
    so durations are compared: the rank that joins last has the shortest, and the others waited for the difference.
    `collectives` is the number of collectives in the traces of all given ranks of the group, `kernel_ns` their time.
    """

    rank: int | None
    collectives: int
    kernel_ns: int
    waiting_ns: int


def find_waits(timelines: Sequence[RankTimeline]) -> tuple[RankWait, ...]:
    """Return the wait of each rank; empty if the traces have no collective in common."""
    sums = [[0, 0, 0] for _ in timelines]
    for _, index, time, waiting in _compare(timelines):
        sums[index] = [a + b for a, b in zip(sums[index], (1, time, waiting), strict=True)]
    if not any(count for count, _, _ in sums):
        return ()
    return tuple(RankWait(timeline.rank, *own) for timeline, own in zip(timelines, sums, strict=True))


def sum_waits(timelines: Sequence[RankTimeline]) -> Counter[str]:
    """Return how long all ranks together waited in the collectives of each name, in nanoseconds."""
    sums: Counter[str] = Counter()
    for name, _, _, waiting in _compare(timelines):
        sums[name] += waiting
    return sums


def _compare(timelines: Sequence[RankTimeline]) -> Iterator[tuple[str, int, int, int]]:
    """Yield the name of each collective, and for each rank its index, its time and how much of it is waiting."""
    durations = [_list_durations(timeline) for timeline in timelines]
    for key in dict.fromkeys(key for own in durations for key in own):
        members = [index for index, own in enumerate(durations) if key in own]
        if len(members) < 2 or len({len(durations[index][key]) for index in members}) > 1:
            continue  # calls that are missing from one trace cannot be matched with the others'
        for times in zip(*(durations[index][key] for index in members), strict=True):
            for index, time in zip(members, times, strict=True):
                yield " ".join(map(str, key)), index, time, time - min(times)


def _list_durations(timeline: RankTimeline) -> dict[tuple[object, ...], list[int]]:
    """Return the durations of a rank's collectives in their order, by group and kind."""
    found: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for kernel, _, details, duration in list_collectives(timeline):
        key = kernel, *(details.get(shared) for shared in _SHARED)
        found[key].append(duration)
    return found


def list_collectives(timeline: RankTimeline) -> Iterator[tuple[str, int, Mapping[str, Any], int]]:
    """Yield the kernel of each collective of a rank, the number of its details, the details, and its duration."""
    columns, activities = timeline.columns, timeline.activities
    for index, name in enumerate(activities.name):
        kernel, number = columns.names[name], activities.details[index]
        is_launch = not timeline.on_gpu and activities.op[index] >= 0  # on the CPU gloo's threads do the work
        if kind_of_kernel(kernel) == "communication" and not is_launch:
            duration = activities.end[index] - activities.start[index]
            yield kernel, number, columns.details[number] if number >= 0 else {}, duration
