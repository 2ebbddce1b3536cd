"""Flame graphs: collapsed stacks and files for speedscope (https://www.speedscope.app)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fvflops.reports.escaping import printable
from fvflops.trace.timeline import Frame, Timeline

# Weight → its unit, as written in files.
UNITS: Mapping[str, str] = {
    "time": "nanosecond, measured",
    "flops": "FLOP, counted and not timed",
    "macs": "multiply-add, counted and not timed",
    "bytes": "byte read or written, counted and not timed",
    "memory": "byte allocated and kept",
}

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def title(frame: Frame) -> str:
    """Return the text of a region: its full name and its class or kind; for the root, its class.

    It does not end with a number, which readers of collapsed stacks would parse as a weight.
    """
    return _title(*frame)


@lru_cache(maxsize=1 << 14)
def _title(kind: str, name: str, class_name: str) -> str:
    if kind == "module" and not name:
        return printable(class_name) or "(model)"
    return f"{printable(name)} ({printable(class_name) or kind})"


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

    A line has the frames (phase, modules, op; outermost first), separated by semicolons, a blank and the weight; those
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


@dataclass(slots=True)
class _Profile:
    """Samples of one thread: the number of the stack, and the weight, of each."""

    stacks: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)


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
    profiles: dict[tuple[int, int], _Profile] = {}
    stacks: dict[tuple[int, int, str] | None, int] = {}
    for piece in timeline.self_segments(weight):
        span = piece.span
        if span is None and weight != "time":
            continue
        profile = profiles.setdefault(piece.track, _Profile())
        key = None if span is None else (span.callee, span.event.stack, span.event.phase)
        profile.stacks.append(stacks.setdefault(key, len(stacks)))
        profile.weights.append(piece.weight)
    frames: dict[str, int] = {}
    samples = [
        dump([] if key is None else [frames.setdefault(text, len(frames)) for text in list_frames(timeline, *key)])
        for key in stacks
    ]
    yield (
        f'{{"$schema":{dump(SCHEMA)},"exporter":"fvflops","name":{dump(_name(timeline, weight))},'
        f'"fvflops":{dump(describe(timeline, weight))},"activeProfileIndex":0,'
        f'"shared":{{"frames":{dump([{"name": text} for text in frames])}}},"profiles":['
    )
    # Speedscope cannot open a file without a profile.
    several_ranks = len({rank for rank, _ in profiles}) > 1
    for number, ((rank, thread), profile) in enumerate(sorted((profiles or {(0, 0): _Profile()}).items())):
        name = f"rank {rank}, thread {thread}" if several_ranks else f"thread {thread}"
        yield "," if number else ""
        yield (
            f'{{"type":"sampled","name":{dump(f"{weight}, {name}")},"unit":{dump(_UNITS.get(weight, "none"))},'
            f'"startValue":0,"endValue":{dump(sum(profile.weights))},"samples":['
        )
        yield from _join(samples[stack] for stack in profile.stacks)
        yield '],"weights":['
        yield from _join(map(dump, profile.weights))
        yield "]}"
    yield "]}\n"


def _name(timeline: Timeline, weight: str) -> str:
    root = next((frame.class_name for frame in timeline.frames if frame.kind == "module" and not frame.name), "")
    return f"{printable(root) or 'model'}: {weight} (1 unit = 1 {UNITS[weight]})"


def _join(texts: Iterator[str]) -> Iterator[str]:
    for number, text in enumerate(texts):
        yield "," + text if number else text
