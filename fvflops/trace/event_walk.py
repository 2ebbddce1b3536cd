"""Iterate over the ordered events of a Trace with the stack of open region calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fvflops.trace.records import Event
from fvflops.trace.trace import Trace


class RegionCall:
    """One call of a region, `depth` calls inside others of its thread; compared by identity, as a dictionary key."""

    __slots__ = ("begin", "depth", "parent", "region")

    def __init__(self, region: int, begin: Event, parent: RegionCall | None) -> None:
        self.region = region
        self.begin = begin
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1

    def enclosing(self) -> Iterator[RegionCall]:
        """Yield the enclosing calls, innermost first."""
        call = self.parent
        while call is not None:
            yield call
            call = call.parent


class Visit(NamedTuple):
    """An event and its `call`: the region call that it begins or ends, or the innermost one around an op.

    `kind` is "enter", "exit", "op" or "free", or "unfinished" for a region without an exit, because the recording
    ended or was paused; `event` then is the one that began it. `position` is the index of the event in the trace, for
    an unfinished region the index of the event before which it ends.
    """

    kind: str
    event: Event
    call: RegionCall | None
    position: int


def walk_events(trace: Trace) -> Iterator[Visit]:
    """Yield the events of a Trace in order, none where it has no ordered events; each thread has a stack of its own.

    Every region call that is entered ends once, innermost first: by its "exit", or as "unfinished". An exit without
    an enter, of a region that was entered while the recording was paused, is visited as both.
    """
    innermost: dict[tuple[int | None, int], RegionCall | None] = {}
    position = 0
    for position, event in enumerate(trace.events or ()):
        kind = event.kind
        if kind == "free":
            yield Visit(kind, event, None, position)
            continue
        thread = event.rank, event.thread
        call = innermost.get(thread)
        if kind == "enter":
            call = innermost[thread] = RegionCall(event.item, event, call)
        elif kind == "exit":
            region = trace.region_signatures[event.item].region
            if not _is_open(region, call):
                call = RegionCall(region, event, call)
                yield Visit("enter", event, call, position)
            while call is not None and call.region != region:
                yield Visit("unfinished", call.begin, call, position)
                call = call.parent
            innermost[thread] = None if call is None else call.parent
        yield Visit(kind, event, call, position)
    for call in innermost.values():
        while call is not None:
            yield Visit("unfinished", call.begin, call, position)
            call = call.parent


def _is_open(region: int, innermost: RegionCall | None) -> bool:
    if innermost is None:
        return False
    return innermost.region == region or any(call.region == region for call in innermost.enclosing())
