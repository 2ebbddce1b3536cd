"""Divide the time of a trace among its ops with FLOPs, so that each kernel is in exactly one row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cache

import torch

from fvflops.explain.time_division import merge
from fvflops.measure.kernels.kernel_sums import event_name
from fvflops.measure.kernels.matching import KernelMatch
from fvflops.measure.kernels.recorded_calls import NO_WORK, Work
from fvflops.trace.kernel_events import KernelEvent

# Rows of the time that no op with FLOPs has.
OTHER_OPS, GRAPH_LAUNCHES, NO_OP, IDLE = "other ops", "graph launches", "no op", "idle"
# Names of inductor: of the kernels that it generates, with the ops fused in them, and of the range around a graph.
_FUSED = re.compile(r"(?:graph_\d+_)?(?:triton_[a-z]+|cpp)_fused(?:_(.+?))?_\d+(?:d\w*)?$")
_COMPILED_GRAPH = "## Call CompiledFxGraph"
_MAX_WORDS = 8  # of the name of an op


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
        return sum(row.nanoseconds for row in self.rows if row.work.flops)


def divide_time(match: KernelMatch, graph_kernels: Collection[int] = ()) -> TimeByOp:
    """Return the time of a run by op; `graph_kernels` are the indexes of the kernels that a graph launched.

    A kernel belongs to the innermost op around its launch that has FLOPs of its own, and in compiled code to the module
    call or step that has the FLOPs of fused ops. One that torch.compile generated is named after the ops fused in it.
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
        name, call, label = (GRAPH_LAUNCHES, -1, "") if index in graph_kernels else _find_row(match, index)
        row = rows.setdefault(name, OpTime(name))
        row.nanoseconds += nanoseconds
        if name == OTHER_OPS:
            divided.others[label] += nanoseconds
            other_calls.add(call)
        elif name in (GRAPH_LAUNCHES, NO_OP):
            row.calls = (row.calls or 0) + 1
    if OTHER_OPS in rows:
        rows[OTHER_OPS].calls = len(other_calls)
    running = [event for event in events if (event.kind == "device" if on_device else _is_op(event))]
    intervals = [(event.start_ns, event.end_ns) for event in running]
    start = min((start for start, _ in intervals), default=0)
    end = max((end for _, end in intervals), default=0)
    covered = sum(end - start for start, end in merge(sorted(intervals)))
    rows[IDLE] = OpTime(IDLE, None, end - start - covered)
    divided.rows = sorted(rows.values(), key=lambda row: (-row.work.flops, row.name == IDLE, -row.nanoseconds))
    return divided


def _list_times(match: KernelMatch, on_device: bool) -> Iterator[tuple[int, int]]:
    """Yield the events whose times are divided, with their times: of kernels, or of ops and their events alone."""
    events = match.run.events
    in_op = bytearray(len(events))
    for index, event in enumerate(events):
        if on_device:
            if event.kind == "device":
                yield index, event.duration_ns
        elif _is_op(event) or (0 <= event.parent < index and in_op[event.parent]):
            in_op[index] = True
            yield index, event.self_ns


def _find_row(match: KernelMatch, index: int) -> tuple[str, int, str]:
    """Return the row of an event's time, and the call around it, the outermost op or else fused ops, with its name."""
    events = match.run.events
    outermost, fused, label, is_compiled, found = -1, -1, "", False, ""
    while index >= 0:
        event, work = events[index], match.self_work[index]
        is_compiled |= event.kind == "compiled"
        if event.kind == "op":
            outermost = index
        elif fused < 0 and (fused_ops := name_fused(event.name)):
            fused, label = index, fused_ops
        if not found and work is not None and work.flops and (event.kind == "op" or is_compiled or outermost < 0):
            found = event_name(event)
        index = event.parent
    if outermost >= 0:
        return found or OTHER_OPS, outermost, events[outermost].name
    return found or (NO_OP if fused < 0 else OTHER_OPS), fused, label


def _is_op(event: KernelEvent) -> bool:
    """Return whether an event is an op, or code that torch.compile generated for several."""
    return event.kind == "op" or (event.kind in ("other", "range") and bool(name_fused(event.name)))


@cache
def name_fused(name: str) -> str:
    """Return the ops that a kernel or a range of torch.compile has, "" for any other.

    >>> name_fused("triton_per_fused_add_native_layer_norm__to_copy_12"), name_fused("cpp_fused_0"), name_fused("gemm")
    ('fused add, native_layer_norm, _to_copy', 'fused ops', '')
    """
    if name.startswith(_COMPILED_GRAPH):
        return "compiled graph"
    fused = _FUSED.match(name)
    if fused is None:
        return ""
    words = (fused[1] or "").split("_")
    ops: list[str] = []
    is_known = True
    while words:
        ends = range(min(len(words), _MAX_WORDS), 0, -1)
        size = next((end for end in ends if hasattr(torch.ops.aten, "_".join(words[:end]))), 0)
        if size or is_known:
            ops.append("_".join(words[: size or 1]))
        else:  # a custom op, of several words
            ops[-1] += "_" + words[0]
        is_known = bool(size)
        words = words[size or 1 :]
    return f"fused {', '.join(ops)}" if ops != [""] else "fused ops"
