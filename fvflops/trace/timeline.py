"""Nested calls of a run with time and cost, from which trace files are exported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fvflops.trace.records import Event, TraceError

# Units for the width of a span. All but time are counted, and need no timed run.
WEIGHTS = ("time", "flops", "macs", "bytes", "memory")


class Frame(NamedTuple):
    """An enclosing region: a "module", a "function" or a parameter "group", with a module's class."""

    kind: str
    name: str
    class_name: str = ""


class Callee(NamedTuple):
    """An op or region with one signature, called by any number of spans; `kind` is "op" or the region's kind.

    `name` is the full name of the op or region; `frame` is a region's frame, None for an op. `inputs` and `outputs`
    are its tensors, `dtype` the compute dtype. `flops`, `macs` and `nbytes` are the cost of one call without its
    children: FLOPs in the table's convention, multiply-adds, bytes read and written; None where unknown. `status` is
    the table's, "" for a region that is not counted as a whole.
    """

    kind: str
    name: str
    frame: int | None = None
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    dtype: str = ""
    status: str = ""
    flops: int | None = 0
    macs: int | None = 0
    nbytes: int | None = 0


class Span(NamedTuple):
    """One call of a callee: its event, with its cost.

    `event` is an op's, or the end of a region with the start and duration of the call. A backward op has the stack of
    the module whose forward created it, which is not being called at that time. An op's event has the allocated bytes
    before and after it. `depth` is the number of open spans around it on its thread. `flops`, `macs`, `nbytes` and
    `memory` include children; `memory` is the bytes allocated and not freed, `unsupported` the number of unsupported
    ops in it.
    """

    callee: int
    event: Event
    depth: int = 0
    flops: int = 0
    macs: int = 0
    nbytes: int = 0
    memory: int = 0
    unsupported: int = 0

    @property
    def track(self) -> tuple[int, int]:
        """Rank and thread of the call."""
        return self.event.rank or 0, self.event.thread

    def weight(self, name: str) -> int:
        """Return one of the WEIGHTS, 0 where unknown."""
        if name == "time":
            return self.event.duration_ns or 0
        return self.nbytes if name == "bytes" else getattr(self, name)


class PlacedSpan(NamedTuple):
    """A span with its interval on the time axis, or on an axis of counted units laid end to end."""

    span: Span
    start: int
    end: int


class SelfSegment(NamedTuple):
    """An interval of a track in which one span runs outside of its children, or none runs."""

    track: tuple[int, int]
    span: Span | None
    weight: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """All spans of one trace by start, parents before children.

    `stacks` are tuples of indexes of `frames`, innermost last. `calls` is the aggregated form, (callee, stack, phase) →
    number of calls of ops and of regions that the table counts; `spans` is None where the trace is aggregated.
    `covered` are the stacks, with their phases, whose FLOPs are counted as part of an enclosing region. `weights` are
    the known WEIGHTS.

    >>> relu, event = Callee("op", "aten::relu", flops=6), Event("op", 0)
    >>> timeline = Timeline((Frame("module", "", "Net"),), ((0,),), (relu,), {(0, 0, "forward"): 2},
    ...                     (Span(0, event, flops=6), Span(0, event, flops=6)), weights=("flops",))
    >>> [(start, end) for _, start, end in timeline.layout("flops")]
    [(0, 6), (6, 12)]
    """

    frames: tuple[Frame, ...]
    stacks: tuple[tuple[int, ...], ...]
    callees: tuple[Callee, ...]
    calls: Mapping[tuple[int, int, str], int]
    spans: Sequence[Span] | None = None
    covered: frozenset[tuple[int, str]] = frozenset()
    weights: tuple[str, ...] = ("flops", "macs")
    about: Mapping[str, str] = field(default_factory=dict)
    complete: bool = True

    def choose(self, weight: str | None = None) -> str:
        """Return the requested weight; None is time where it was measured, else FLOPs.

        A weight that the timeline lacks raises TraceError, an unknown one ValueError.
        """
        if weight is None:
            return "time" if "time" in self.weights else "flops"
        if weight not in WEIGHTS:
            raise ValueError(f"weight must be one of {', '.join(WEIGHTS)}; got {weight!r}")
        if weight not in self.weights:
            raise TraceError(f"weight={weight!r}, but {_MISSING[weight]}; available are {', '.join(self.weights)}")
        return weight

    def require_spans(self) -> Sequence[Span]:
        """Return the spans; an aggregated trace raises TraceError."""
        if self.spans is None:
            raise TraceError(
                "this trace has the number of calls of each op, not their order: "
                "record without folding or merging, or export collapsed stacks of counted work"
            )
        return self.spans

    def self_cost(self, item: int, stack: int, phase: str, weight: str) -> int:
        """Return the cost of one call without its children: FLOPs, multiply-adds or bytes, 0 where unknown."""
        if weight == "bytes":
            return self.callees[item].nbytes or 0
        if (stack, phase) in self.covered:
            return 0
        return (self.callees[item].flops if weight == "flops" else self.callees[item].macs) or 0

    def layout(self, weight: str) -> Iterator[PlacedSpan]:
        """Yield each span with its position; spans of one track nest or follow each other and never cross.

        By time, the position is the measured one, cut where it crosses another span; an unmeasured span has no width.
        By other weights, spans are laid end to end, and the first span on an idle thread starts at the end of the last
        op of its rank.
        """
        timed = weight == "time"
        ends: dict[tuple[int, int], list[int]] = {}
        cursors: dict[tuple[int, int], int] = {}
        rank_ends: dict[int, int] = {}
        for span in self.require_spans():
            track = span.track
            opened = ends.setdefault(track, [])
            cursor = cursors.get(track, 0)
            while len(opened) > span.depth:
                cursor = max(cursor, opened.pop())
            if not (opened or timed):
                cursor = max(cursor, rank_ends.get(track[0], 0))
            begun = span.event.start_ns if timed else None
            start = cursor if begun is None else max(cursor, begun)
            end = max(start, (start if begun is None else begun) + span.weight(weight))
            if timed and opened:
                start, end = min(start, opened[-1]), min(end, opened[-1])
            opened.append(end)
            cursors[track] = start
            if self.callees[span.callee].frame is None:
                rank_ends[track[0]] = max(end, rank_ends.get(track[0], 0))
            yield PlacedSpan(span, start, end)

    def self_segments(self, weight: str) -> Iterator[SelfSegment]:
        """Yield the intervals of each span outside of its children, in the order of each track, without empty ones.

        The intervals of all spans add up to the total. A region has several, between its children.
        """
        opened: dict[tuple[int, int], list[PlacedSpan]] = {}
        cursors: dict[tuple[int, int], int] = {}
        for piece in self.layout(weight):
            track = piece.span.track
            enclosing = opened.setdefault(track, [])
            yield from _close_spans(enclosing, piece.span.depth, track, cursors)
            if piece.start > cursors.get(track, 0):
                yield SelfSegment(track, enclosing[-1].span if enclosing else None, piece.start - cursors.get(track, 0))
            cursors[track] = piece.start
            enclosing.append(piece)
        for track, enclosing in opened.items():
            yield from _close_spans(enclosing, 0, track, cursors)


_MISSING = {
    "time": "the run was not timed: record with measure={'time'}",
    "flops": "the timeline was built without a formula table",
    "macs": "the timeline was built without a formula table",
    "bytes": "memory traffic was not counted: build the timeline with a traffic_model",
    "memory": "the trace has no storages: record without folding or merging, or with measure={'memory'}",
}


def _close_spans(
    enclosing: list[PlacedSpan], depth: int, track: tuple[int, int], cursors: dict[tuple[int, int], int]
) -> Iterator[SelfSegment]:
    while len(enclosing) > depth:
        span, _, end = enclosing.pop()
        if end > cursors[track]:
            yield SelfSegment(track, span, end - cursors[track])
            cursors[track] = end
