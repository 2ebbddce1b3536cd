"""Data of the HTML page: timeline, memory curve and roofline, in columns packed where equal layers repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from fvflops.reports.document import find_peaks
from fvflops.reports.escaping import printable
from fvflops.trace.calls import packet_of
from fvflops.trace.timeline import PlacedSpan, Timeline
from fvflops.views.breakdown import MemoryCurve


def pack(values: Sequence[Any]) -> list[Any] | dict[str, Any]:
    """Return a column as runs if these have at most half of its values, else as it is.

    A run is [repetitions, values] or [repetitions, values, steps]; the steps are added at each repetition.
    """
    runs: list[list[Any]] = []
    plain = 0  # the first value that is not in a run
    length = len(values)
    differences = [_difference(first, second) for first, second in pairwise(values)]
    # Equal at corresponding values of two repetitions.
    keys = list(zip(differences, differences[1:], differences[2:], strict=False))
    last: dict[tuple[Any, ...], int] = {}
    for position, key in enumerate(keys):
        start = last.get(key, -1)
        last[key] = position
        period = position - start
        if start < plain or position + period >= len(keys) or keys[position + period] != key:
            continue
        steps = list(map(_difference, values[start:position], values[position : position + period]))
        if None in steps:
            continue
        end = position + period
        while end < length and _difference(values[end - period], values[end]) == steps[(end - start) % period]:
            end += 1
        times = (end - start) // period
        if times < 3:
            continue
        if start > plain:
            runs.append([1, list(values[plain:start])])
        runs.append([times, list(values[start:position]), *([steps] if any(steps) else [])])
        plain = start + times * period
    if plain < length:
        runs.append([1, list(values[plain:])])
    size = sum(sum(map(len, run[1:])) for run in runs)
    return {"runs": runs} if size <= length / 2 else list(values)


def _difference(first: Any, second: Any) -> int | None:
    """Return the difference between two integers, 0 between equal values of any type, else None."""
    if first == second:
        return 0
    return second - first if type(first) is int and type(second) is int else None


# Limits of a page's contents: the longest calls, and the highest points of a curve.
MAX_SPANS = 20_000
MAX_POINTS = 1_500


def intern(text: str, indexes: dict[str, int]) -> int:
    """Return the index of a text, which is added if it is new."""
    return indexes.setdefault(printable(text), len(indexes))


def write_timeline(timeline: Timeline, modules: Mapping[str, int]) -> dict[str, Any]:
    """Return the calls of a timed run in columns, parents before children; times are in ns from the first call.

    `label` indexes `labels` for an op or a function, and is -1 for a call of `module`, an index of the page's modules.
    `track` numbers threads and ranks. `hidden` is the number of omitted calls, the shortest ones.
    """
    placed = [piece for piece in timeline.layout("time") if piece.end > piece.start]
    shown = _longest(placed)
    origin = min((piece.start for piece in shown), default=0)
    labels, phases, tracks = dict[str, int](), dict[str, int](), dict[tuple[int, int], int]()
    columns: dict[str, list[int]] = {
        key: [] for key in ("label", "module", "phase", "track", "depth", "start", "duration")
    }
    for span, start, end in shown:
        callee = timeline.callees[span.callee]
        is_module = callee.frame is not None and callee.kind == "module"
        owner = callee.name if is_module else _owner(timeline, span.event.stack)
        row = (
            -1 if is_module else intern(_short(callee.name), labels),
            modules.get(owner, 0),
            intern(span.event.phase, phases),
            tracks.setdefault(span.track, len(tracks)),
            span.depth,
            start - origin,
            end - start,
        )
        for column, value in zip(columns.values(), row, strict=True):
            column.append(value)
    names = [f"rank {rank}, thread {thread}" if rank else f"thread {thread}" for rank, thread in tracks]
    hidden = len(placed) - len(shown)
    return {**columns, "labels": list(labels), "phases": list(phases), "tracks": names, "hidden": hidden}


def _short(op: str) -> str:
    return packet_of(op).removeprefix("aten::")


def _longest(placed: Sequence[PlacedSpan]) -> Sequence[PlacedSpan]:
    """Return at most MAX_SPANS calls, the longest; a call is at least as long as the calls inside it."""
    if len(placed) <= MAX_SPANS:
        return placed
    shortest = sorted((piece.end - piece.start for piece in placed), reverse=True)[MAX_SPANS]
    return [piece for piece in placed if piece.end - piece.start > shortest]


def _owner(timeline: Timeline, stack: int) -> str:
    frames = [timeline.frames[index] for index in timeline.stacks[stack]]
    return next((frame.name for frame in reversed(frames) if frame.kind == "module"), "")


def measured_memory(timeline: Timeline) -> MemoryCurve | None:
    """Return the memory after each op of a run, None where it was not measured."""
    spans = [span for span in timeline.spans or () if span.event.memory_after is not None]
    ops = [span for span in spans if timeline.callees[span.callee].frame is None]
    if not any(span.event.memory_after for span in ops):
        return None
    return MemoryCurve(
        {"allocated": [max(span.event.memory_after or 0, span.event.memory_peak or 0) for span in ops]},
        [timeline.callees[span.callee].name for span in ops],
        [_owner(timeline, span.event.stack) for span in ops],
        [span.event.phase for span in ops],
        measured=True,
    )


def write_memory(curve: MemoryCurve, modules: Mapping[str, int]) -> dict[str, Any]:
    """Return a memory curve of at most MAX_POINTS points, the highest of their parts, `at` the indexes of their ops."""
    totals = curve.totals()
    points = find_peaks(totals, min(len(totals), MAX_POINTS)) if totals else []
    labels, phases = dict[str, int](), dict[str, int]()
    return {
        "layers": [
            [printable(name), [values[point] for point in points]]
            for name, values in curve.layers.items()
            if any(values)
        ],
        "at": points,
        "ops": len(totals),
        "label": [intern(_short(curve.ops[point]), labels) for point in points],
        "module": [modules.get(curve.modules[point], 0) for point in points],
        "phase": [intern(curve.phases[point], phases) for point in points],
        "labels": list(labels),
        "phases": list(phases),
        "measured": curve.measured,
    }
