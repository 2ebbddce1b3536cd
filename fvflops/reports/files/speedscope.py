"""Files for speedscope (https://www.speedscope.app): a flame graph in execution order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fvflops.reports.escaping import printable
from fvflops.reports.files.frames import UNITS, describe, dump, list_frames
from fvflops.trace.timeline import Timeline

SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_UNITS: Mapping[str, str] = {"time": "nanoseconds", "bytes": "bytes", "memory": "bytes"}


@dataclass(slots=True)
class _Profile:
    """Samples of one thread: the number of the stack, and the weight, of each."""

    stacks: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)


def render(timeline: Timeline, *, weight: str | None = None) -> Iterator[str]:
    """Yield the text of a speedscope file, with one profile for each thread of each rank.

    A sample is an interval of one call outside of its children, in execution order, with the frames phase, modules, op;
    the samples of all profiles add up to the total. Time in which nothing was recorded is a sample without frames.
    `weight` is "time", "flops", "macs", "bytes" (read and written) or "memory" (bytes allocated and not freed); None is
    time where it was measured, else flops. Counted work is laid end to end. The key "name" has the unit; the key
    "fvflops", which speedscope ignores, has metadata of the run and the unsupported ops.

    A weight that the timeline lacks, or a timeline without spans, raises TraceError; an unknown weight ValueError.
    Source of the format: https://www.speedscope.app/file-format-schema.json.

    >>> import json
    >>> from fvflops.trace.timeline import Frame, Callee, Span, Timeline
    >>> timeline = Timeline((Frame("module", "", "Net"),), ((), (0,)), (Callee("op", "aten::mm", flops=24),), {},
    ...                     (Span(0, 1, flops=24),))
    >>> json.loads("".join(render(timeline)))["profiles"][0]["weights"]
    [24]
    """
    weight = timeline.choose(weight)
    timeline.require_spans()
    return _write(timeline, weight)


def _write(timeline: Timeline, weight: str) -> Iterator[str]:
    profiles: dict[tuple[int, int], _Profile] = {}
    stacks: dict[tuple[int, int, str] | None, int] = {}
    for piece in timeline.self_segments(weight):
        span = piece.span
        if span is None and weight != "time":
            continue
        profile = profiles.setdefault(piece.track, _Profile())
        key = None if span is None else (span.callee, span.stack, span.phase)
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
