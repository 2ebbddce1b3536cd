"""Divide the time of a trace among its ops with FLOPs, so that each kernel is in exactly one row."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from fvflops.measure.kernels.kernel_sums import event_name
from fvflops.measure.kernels.matching import KernelMatch
from fvflops.measure.kernels.recorded_calls import NO_WORK, Work

# Rows of the time that no op with FLOPs has.
OTHER_OPS, GRAPH_LAUNCHES, NO_OP, IDLE = "other ops", "graph launches", "no op", "idle"


@dataclass(slots=True)
class OpTime:
    """The events of one name that have FLOPs of their own, or a kind of time without FLOPs; `nanoseconds` are its own.

    `calls` is the number of ops; of kernels where these have no op. None for idle time.
    """

    name: str
    calls: int | None = 0
    nanoseconds: int = 0
    work: Work = NO_WORK


@dataclass(slots=True)
class TimeByOp:
    """The time of a trace by op: `rows` add up to the time of all kernels and to the time without one.

    Of a trace without kernels it is the CPU time of the outermost ops, and the time without one. `others` are the
    nanoseconds of `other ops` by the name of the outermost op.
    """

    rows: list[OpTime]
    others: Counter[str] = field(default_factory=Counter)

    @property
    def busy_ns(self) -> int:
        """Time of all kernels, or of all outermost ops."""
        return sum(row.nanoseconds for row in self.rows if row.name != IDLE)

    @property
    def counted_ns(self) -> int:
        """Time of the ops with FLOPs."""
        return sum(row.nanoseconds for row in self.rows if row.work.flops)


def divide_time(match: KernelMatch, graph_kernels: Collection[int] = ()) -> TimeByOp:
    """Return the time of a run by op; `graph_kernels` are the indexes of the kernels that a graph launched.

    A kernel belongs to the innermost op around its launch that has FLOPs of its own, and in compiled code to the module
    call or step that has the FLOPs of fused ops.
    """
    events = match.run.events
    rows: dict[str, OpTime] = {}
    for event, work in zip(events, match.self_work, strict=True):
        if work is not None and work.flops:
            row = rows.setdefault(event_name(event), OpTime(event_name(event)))
            row.calls = (row.calls or 0) + 1
            row.work += work
    divided = TimeByOp([])
    on_device = bool(match.run.device)
    other_calls: set[int] = set()
    for index, nanoseconds in _list_times(match, on_device):
        name, outermost = (GRAPH_LAUNCHES, -1) if index in graph_kernels else _find_row(match, index)
        row = rows.setdefault(name, OpTime(name))
        row.nanoseconds += nanoseconds
        if name == OTHER_OPS:
            divided.others[events[outermost].name] += nanoseconds
            other_calls.add(outermost)
        elif name in (GRAPH_LAUNCHES, NO_OP):
            row.calls = (row.calls or 0) + 1
    if OTHER_OPS in rows:
        rows[OTHER_OPS].calls = len(other_calls)
    kind = "device" if on_device else "op"
    intervals = [(event.start_ns, event.end_ns) for event in events if event.kind == kind]
    start = min((start for start, _ in intervals), default=0)
    end = max((end for _, end in intervals), default=0)
    rows[IDLE] = OpTime(IDLE, None, end - start - covered(intervals))
    divided.rows = sorted(rows.values(), key=lambda row: (-row.work.flops, row.name == IDLE, -row.nanoseconds))
    return divided


def covered(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of intervals.

    >>> covered([(0, 4), (2, 5), (7, 9)])
    7
    """
    length, reached = 0, -sys.maxsize
    for start, end in sorted(intervals):
        length += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return length


def _list_times(match: KernelMatch, on_device: bool) -> Iterator[tuple[int, int]]:
    """Yield the events whose times are divided, with them: kernels, or what ops and the events in them take alone."""
    events = match.run.events
    in_op = bytearray(len(events))
    for index, event in enumerate(events):
        if on_device:
            if event.kind == "device":
                yield index, event.duration_ns
        elif event.kind == "op" or (0 <= event.parent < index and in_op[event.parent]):
            in_op[index] = True
            yield index, event.self_ns


def _find_row(match: KernelMatch, index: int) -> tuple[str, int]:
    """Return the row of an event's time, and the outermost op around it, -1 for none."""
    events = match.run.events
    outermost, is_compiled, found = -1, False, ""
    while index >= 0:
        event, work = events[index], match.self_work[index]
        is_compiled |= event.kind == "compiled"
        if event.kind == "op":
            outermost = index
        if not found and work is not None and work.flops and (event.kind == "op" or is_compiled or outermost < 0):
            found = event_name(event)
        index = event.parent
    return found or (NO_OP if outermost < 0 else OTHER_OPS), outermost
