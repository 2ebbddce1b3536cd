"""Collapsed stacks: a line for each stack with its weight, for flame graph tools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fvflops.reports.files.frames import list_frames
from fvflops.trace.timeline import Timeline


def render(timeline: Timeline, *, weight: str | None = None) -> Iterator[str]:
    """Yield the lines of the collapsed stacks, the format of flamegraph.pl, speedscope, inferno and others.

    A line has the frames (phase, modules, op; outermost first), separated by semicolons, a blank and the weight.
    `weight` is "time" (nanoseconds), "flops", "macs", "bytes" (read and written) or "memory" (bytes allocated and not
    freed); None is time where it was measured, else flops. The lines add up to the total; those of weight 0 are
    dropped. Counted weights need no spans in the timeline. A semicolon in a name is written as \\x3b. A weight that the
    timeline lacks raises TraceError, an unknown one ValueError.

    Source of the format: Brendan Gregg, https://github.com/brendangregg/FlameGraph, "2. Fold stacks".

    >>> from fvflops.trace.timeline import Frame, Callee, Timeline
    >>> timeline = Timeline((Frame("module", "", "Net"),), ((), (0,)), (Callee("op", "aten::mm", flops=24),),
    ...                     {(0, 1, "forward"): 2})
    >>> print(*render(timeline, weight="flops"), end="")
    forward;Net;aten::mm 48
    """
    return _write(timeline, timeline.choose(weight))


def _write(timeline: Timeline, weight: str) -> Iterator[str]:
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
                sums[piece.span.callee, piece.span.stack, piece.span.phase] += piece.weight
    else:
        for (item, stack, phase), calls in timeline.calls.items():
            sums[item, stack, phase] = calls * timeline.self_cost(item, stack, phase, weight)
    return sums
