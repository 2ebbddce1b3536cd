"""Files of a timeline: chrome traces for ui.perfetto.dev, collapsed stacks, and files for www.speedscope.app."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache, partial
from typing import Any

from fvflops.reports.escaping import printable
from fvflops.trace.timeline import Frame, PlacedSpan, Span, Timeline

# Weight → its unit, as written in files.
UNITS: Mapping[str, str] = {
    "time": "nanosecond, measured",
    "flops": "FLOP, counted and not timed",
    "macs": "multiply-add, counted and not timed",
    "bytes": "byte read or written, counted and not timed",
    "memory": "byte allocated and kept",
}

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


@lru_cache(maxsize=1 << 14)
def title(frame: Frame) -> str:
    """Return the text of a region: its full name and its class or kind; for the root, its class.

    It does not end with a number, which readers of collapsed stacks would parse as a weight.
    """
    if frame.kind == "module" and not frame.name:
        return printable(frame.class_name) or "(model)"
    return f"{printable(frame.name)} ({printable(frame.class_name) or frame.kind})"


def list_frames(timeline: Timeline, item: int, stack: int, phase: str) -> tuple[str, ...]:
    """Return the frames of one call: its phase, the enclosing regions, and its op or region."""
    callee = timeline.callees[item]
    last = printable(callee.name) if callee.frame is None else title(timeline.frames[callee.frame])
    return (phase, *(title(timeline.frames[index]) for index in timeline.stacks[stack]), last)


def describe(timeline: Timeline, weight: str) -> dict[str, str]:
    """Return metadata of an export: weight, unit, and the metadata of the timeline."""
    metadata = {"exporter": "fvflops", "weight": weight, "unit": f"1 unit = 1 {UNITS[weight]}"}
    metadata |= {key: printable(text) for key, text in timeline.about.items()}
    if not timeline.complete:
        metadata["complete"] = "no: the run raised; this is the part before"
    return metadata


def dump(value: Any) -> str:
    """Return a value as JSON text that is safe in a script element of a page too."""
    return _encode(value).replace("<", "\\u003c")


def write_stacks(timeline: Timeline, *, weight: str | None = None) -> Iterator[str]:
    """Yield the lines of the collapsed stacks, the format of flamegraph.pl, speedscope, inferno and others.

    A line has the frames (phase, modules, op; outermost first), separated by semicolons, a blank and the weight; lines
    of weight 0 are dropped. Counted weights need no spans in the timeline. A semicolon in a name is written as \\x3b.

    Source of the format: Brendan Gregg, https://github.com/brendangregg/FlameGraph, "2. Fold stacks".
    """
    return _write_stacks(timeline, timeline.choose(weight))


def _write_stacks(timeline: Timeline, weight: str) -> Iterator[str]:
    # Several keys may have the same text: calls of one op with different shapes, or names that are escaped alike.
    sums: Counter[str] = Counter()
    for key, value in _sums(timeline, weight).items():
        if value > 0:
            sums[";".join(frame.replace(";", "\\x3b") for frame in list_frames(timeline, *key))] += value
    for stack, value in sums.items():
        yield f"{stack} {value}\n"


def _sums(timeline: Timeline, weight: str) -> Counter[tuple[int, int, str]]:
    sums: Counter[tuple[int, int, str]] = Counter()
    if weight in ("time", "memory"):
        for piece in timeline.self_segments(weight):
            if piece.span is not None:
                sums[piece.span.callee, piece.span.event.stack, piece.span.event.phase] += piece.weight
    else:
        for (item, stack, phase), calls in timeline.calls.items():
            sums[item, stack, phase] = calls * timeline.self_cost(item, stack, phase, weight)
    return sums


SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_UNITS: Mapping[str, str] = {"time": "nanoseconds", "bytes": "bytes", "memory": "bytes"}


def write_speedscope(timeline: Timeline, *, weight: str | None = None) -> Iterator[str]:
    """Yield the text of a speedscope file, with one profile for each thread of each rank.

    A sample is an interval of one call outside of its children, in execution order, with the frames phase, modules, op.
    Time in which nothing was recorded is a sample without frames. Counted work is laid end to end. The key "fvflops",
    which speedscope ignores, has metadata of the run.

    Source of the format: https://www.speedscope.app/file-format-schema.json.
    """
    weight = timeline.choose(weight)
    timeline.require_spans()
    return _write_speedscope(timeline, weight)


def _write_speedscope(timeline: Timeline, weight: str) -> Iterator[str]:
    # Track → the number of the stack, and the weight, of each sample.
    profiles: dict[tuple[int, int], list[tuple[int, int]]] = {}
    stacks: dict[tuple[int, int, str] | None, int] = {}
    for piece in timeline.self_segments(weight):
        span = piece.span
        if span is None and weight != "time":
            continue
        key = None if span is None else (span.callee, span.event.stack, span.event.phase)
        profiles.setdefault(piece.track, []).append((stacks.setdefault(key, len(stacks)), piece.weight))
    frames: dict[str, int] = {}
    samples = [
        dump([] if key is None else [frames.setdefault(text, len(frames)) for text in list_frames(timeline, *key)])
        for key in stacks
    ]
    root = next((frame.class_name for frame in timeline.frames if frame.kind == "module" and not frame.name), "")
    heading = f"{printable(root) or 'model'}: {weight} (1 unit = 1 {UNITS[weight]})"
    yield (
        f'{{"$schema":{dump(SCHEMA)},"exporter":"fvflops","name":{dump(heading)},'
        f'"fvflops":{dump(describe(timeline, weight))},"activeProfileIndex":0,'
        f'"shared":{{"frames":{dump([{"name": text} for text in frames])}}},"profiles":['
    )
    # Speedscope cannot open a file without a profile.
    several_ranks = len({rank for rank, _ in profiles}) > 1
    for number, ((rank, thread), profile) in enumerate(sorted((profiles or {(0, 0): []}).items())):
        name = f"rank {rank}, thread {thread}" if several_ranks else f"thread {thread}"
        yield "," if number else ""
        yield (
            f'{{"type":"sampled","name":{dump(f"{weight}, {name}")},"unit":{dump(_UNITS.get(weight, "none"))},'
            f'"startValue":0,"endValue":{dump(sum(sample_weight for _, sample_weight in profile))},"samples":['
        )
        yield from _join(samples[stack] for stack, _ in profile)
        yield '],"weights":['
        yield from _join(dump(sample_weight) for _, sample_weight in profile)
        yield "]}"
    yield "]}\n"


def _join(texts: Iterator[str]) -> Iterator[str]:
    for number, text in enumerate(texts):
        yield "," + text if number else text


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
    return _write_chrome(timeline, weight)


def _write_chrome(timeline: Timeline, weight: str) -> Iterator[str]:
    scale = _scale(timeline, weight)
    metadata = describe(timeline, weight)
    if weight != "time":
        metadata["unit"] = f"1 ns on the axis = {scale} {UNITS[weight]}"
    yield f'{{"displayTimeUnit":"ns","otherData":{dump(metadata)},"traceEvents":[\n'
    yield ",\n".join(map(dump, _tracks(timeline)))
    shared = cache(partial(_write_shared, timeline))
    allocated: dict[int, int] = {}  # rank → last value of its memory counter
    for piece in timeline.layout(weight):
        span, start = piece.span, piece.start // scale
        head, args = shared(span.callee, span.event.stack, span.event.phase)
        rank, thread = span.track
        yield (
            f',\n{{{head},"ph":"X","pid":{rank + 1},"tid":{thread + 1},"ts":{_microseconds(start)},'
            f'"dur":{_microseconds(piece.end // scale - start)},"args":{{{args}{_write_counts(timeline, span)}}}}}'
        )
        yield from _counters(piece, scale, allocated)
    yield "\n]}\n"


def _scale(timeline: Timeline, weight: str) -> int:
    """Return the units of weight per nanosecond: the least power of ten with which all positions are exact."""
    scale = 1
    end = 0 if weight == "time" else max((piece.end for piece in timeline.layout(weight)), default=0)
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
    event, (rank, thread) = piece.span.event, piece.span.track
    values = [("memory", piece.start, event.memory_before), ("memory", piece.end, event.memory_after)]
    for name, position, nbytes in (*values, ("peak memory", piece.start, event.memory_peak)):
        if nbytes is not None and (name != "memory" or allocated.get(rank) != nbytes):
            if name == "memory":
                allocated[rank] = nbytes
            head = f'"name":"{name}","ph":"C","pid":{rank + 1},"tid":{thread + 1}'
            yield f',\n{{{head},"ts":{_microseconds(position // scale)},"args":{{"bytes":{nbytes}}}}}'


def _write_shared(timeline: Timeline, item: int, stack: int, phase: str) -> tuple[str, str]:
    """Return the name and category of the slices of a call, and the args that do not differ between them."""
    callee, frames = timeline.callees[item], timeline.frames
    stack_frames = timeline.stacks[stack] if callee.frame is None else (*timeline.stacks[stack], callee.frame)
    owner = next((frames[index] for index in reversed(stack_frames) if frames[index].kind == "module"), None)
    name = printable(callee.name) if callee.frame is None else title(frames[callee.frame])
    args: dict[str, Any] = {
        "module": None if owner is None else printable(owner.name),
        "class": None if owner is None else printable(owner.class_name),
        "phase": phase,
        callee.kind: printable(callee.name),
        "inputs": list(callee.inputs) or None,
        "outputs": list(callee.outputs) or None,
        "dtype": callee.dtype or None,
        "status": "covered" if (stack, phase) in timeline.covered else callee.status or None,
    }
    args = {key: value for key, value in args.items() if value is not None}
    return f'"name":{dump(name)},"cat":{dump(f"{callee.kind},{phase}")}', dump(args)[1:-1]


def _write_counts(timeline: Timeline, span: Span) -> str:
    callee = timeline.callees[span.callee]
    covered = (span.event.stack, span.event.phase) in timeline.covered
    counts: dict[str, int | float | str] = {}
    if not covered and (callee.frame is not None or callee.flops is not None):
        counts |= {"MACs": span.macs, "FLOPs": span.flops}
        if span.event.duration_ns:
            counts["FLOP/s"] = round(span.flops * 1_000_000_000 / span.event.duration_ns)
    if "bytes" in timeline.weights and (callee.frame is not None or callee.nbytes is not None):
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
