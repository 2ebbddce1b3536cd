"""Chrome trace files: modules and ops as nested slices, for Perfetto (https://ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fvflops.reports.escaping import printable
from fvflops.reports.files.flame_graph import UNITS, describe, dump, title
from fvflops.trace.timeline import PlacedSpan, Span, Timeline

# Readers store times as doubles of microseconds, which are exact up to this many nanoseconds.
_MAX_EXACT = 1 << 53


def write_events(timeline: Timeline, *, weight: str | None = None) -> Iterator[str]:
    """Yield the text of a file in Chrome's Trace Event Format, one event to a line.

    Each region and each op call is a complete event ("X") on the track of its thread, each rank a process. Backward ops
    of a module are on autograd's thread. The args of a region include everything inside it. Allocated memory, where
    known, is a counter ("C") of each rank. Counted work is laid end to end: 1 ns is 1 FLOP, or a power of ten of them
    where the total would not be exact; "otherData" has the unit. A slice on an idle thread starts where the last op of
    its rank ends.

    Source of the format: "Trace Event Format", https://www.chromium.org/developers/how-tos/trace-event-profiling-tool/.
    """
    weight = timeline.choose(weight)
    timeline.require_spans()
    return _write(timeline, weight)


def _write(timeline: Timeline, weight: str) -> Iterator[str]:
    scale = _scale(timeline, weight)
    metadata = describe(timeline, weight)
    if weight != "time":
        metadata["unit"] = f"1 ns on the axis = {scale} {UNITS[weight]}"
    yield f'{{"displayTimeUnit":"ns","otherData":{dump(metadata)},"traceEvents":[\n'
    yield ",\n".join(map(dump, _tracks(timeline)))
    writer = _SliceWriter(timeline)
    allocated: dict[int, int] = {}  # rank → last value of its memory counter
    for piece in timeline.layout(weight):
        yield ",\n" + writer.write(piece, scale)
        yield from _counters(piece, scale, allocated)
    yield "\n]}\n"


def _scale(timeline: Timeline, weight: str) -> int:
    """Return the units of weight per nanosecond: the least power of ten with which all positions are exact."""
    scale = 1
    if weight != "time":
        end = max((piece.end for piece in timeline.layout(weight)), default=0)
        while end // scale > _MAX_EXACT:
            scale *= 10
    return scale


def _tracks(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Yield the events that name processes and threads; ids start at 1, as 0 is the idle process."""
    spans = timeline.require_spans()
    root = next((title(frame) for frame in timeline.frames if frame.kind == "module" and not frame.name), "model")
    ranked = any(span.event.rank is not None for span in spans)
    tracks = sorted({span.track for span in spans}) or [(0, 0)]
    for rank in dict.fromkeys(rank for rank, _ in tracks):
        name = f"{root}, rank {rank}" if ranked else root
        yield {"name": "process_name", "ph": "M", "pid": rank + 1, "tid": 1, "args": {"name": name}}
        yield {"name": "process_sort_index", "ph": "M", "pid": rank + 1, "tid": 1, "args": {"sort_index": rank}}
    for rank, thread in tracks:
        args = {"name": f"thread {thread}"}
        yield {"name": "thread_name", "ph": "M", "pid": rank + 1, "tid": thread + 1, "args": args}


def _counters(piece: PlacedSpan, scale: int, allocated: dict[int, int]) -> Iterator[str]:
    """Yield the allocated memory before and after an op, where it differs from the last value of its rank."""
    span, rank = piece.span, piece.span.track[0]
    for position, nbytes in ((piece.start, span.event.memory_before), (piece.end, span.event.memory_after)):
        if nbytes is not None and allocated.get(rank) != nbytes:
            allocated[rank] = nbytes
            yield _counter("memory", span, position // scale, nbytes)
    if span.event.memory_peak is not None:
        yield _counter("peak memory", span, piece.start // scale, span.event.memory_peak)


def _counter(name: str, span: Span, nanoseconds: int, nbytes: int) -> str:
    rank, thread = span.track
    head = f'"name":"{name}","ph":"C","pid":{rank + 1},"tid":{thread + 1}'
    return f',\n{{{head},"ts":{_microseconds(nanoseconds)},"args":{{"bytes":{nbytes}}}}}'


class _SliceWriter:
    """Write the slices of a timeline; the part that slices of equal calls share is cached."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._shared: dict[tuple[int, int, str], tuple[str, str]] = {}

    def write(self, piece: PlacedSpan, scale: int) -> str:
        """Return the event of a slice."""
        span = piece.span
        key = span.callee, span.event.stack, span.event.phase
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = self._write_shared(*key)
        start = piece.start // scale
        rank, thread = span.track
        return (
            f'{{{shared[0]},"ph":"X","pid":{rank + 1},"tid":{thread + 1},"ts":{_microseconds(start)},'
            f'"dur":{_microseconds(piece.end // scale - start)},"args":{{{shared[1]}{self._write_counts(span)}}}}}'
        )

    def _write_shared(self, item: int, stack: int, phase: str) -> tuple[str, str]:
        """Return the name and category of the slices of a call, and the args that do not differ between them."""
        callee = self._timeline.callees[item]
        frames = self._timeline.frames
        stack_frames = (
            self._timeline.stacks[stack] if callee.frame is None else (*self._timeline.stacks[stack], callee.frame)
        )
        owner = next((frames[index] for index in reversed(stack_frames) if frames[index].kind == "module"), None)
        name = printable(callee.name) if callee.frame is None else title(frames[callee.frame])
        args: dict[str, Any] = {
            "module": None if owner is None else printable(owner.name),
            "class": None if owner is None else printable(owner.class_name),
            "phase": phase,
            callee.kind: None if callee.kind == "module" else printable(callee.name),
            "inputs": list(callee.inputs) or None,
            "outputs": list(callee.outputs) or None,
            "dtype": callee.dtype or None,
            "status": "covered" if (stack, phase) in self._timeline.covered else callee.status or None,
        }
        if callee.kind == "module":
            args["module"] = printable(callee.name)
        args = {key: value for key, value in args.items() if value is not None}
        return f'"name":{dump(name)},"cat":{dump(f"{callee.kind},{phase}")}', dump(args)[1:-1]

    def _write_counts(self, span: Span) -> str:
        callee = self._timeline.callees[span.callee]
        covered = (span.event.stack, span.event.phase) in self._timeline.covered
        counts: dict[str, int | float | str] = {}
        if not covered and (callee.frame is not None or callee.flops is not None):
            counts |= {"MACs": span.macs, "FLOPs": span.flops}
            if span.event.duration_ns:
                counts["FLOP/s"] = round(span.flops * 1_000_000_000 / span.event.duration_ns)
        if "bytes" in self._timeline.weights and (callee.frame is not None or callee.nbytes is not None):
            counts["bytes"] = span.nbytes
        if callee.frame is not None and span.unsupported:
            counts["unsupported op calls"] = span.unsupported
        if span.memory:
            counts["bytes allocated and kept"] = span.memory
        if span.event.raised:
            counts["raised"] = "yes"
        return "".join(f',"{key}":{count if type(count) is int else dump(count)}' for key, count in counts.items())


def _microseconds(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"
