"""Times of ops and modules of a timed Trace."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from fvflops.text import short_repr
from fvflops.trace import Trace, TraceError
from fvflops.trace.event_walk import RegionCall, walk_events
from fvflops.trace.module_tree import innermost, modules_above
from fvflops.trace.notebook_table import write_text_table
from fvflops.units import format_seconds

_MAX_ROWS = 40  # of a table
# Phases whose ops run outside of all calls of the module that owns them.
BY_OWNER = ("backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Timing:
    """Number of calls, total time and self time (`own`, without children) of an op or a module, in ns."""

    calls: int = 0
    total: int = 0
    own: int = 0

    def __add__(self, other: Timing) -> Timing:
        return Timing(self.calls + other.calls, self.total + other.total, self.own + other.own)


@dataclass(frozen=True, slots=True, repr=False)
class Times:
    """The times of a Trace.

    `modules` maps a phase and a module's name to the time of its calls: in the forward phase and under recompute the
    measured time of each call without profiling overhead; in the backward pass and in optimizers' steps, in which no
    module is called, the sum over the ops of the module (own) and of the module and its children (total).
    `operators` maps a phase and an op to the sum over its calls, including the ops that it calls.
    """

    modules: Mapping[str, Mapping[str, Timing]]
    operators: Mapping[str, Mapping[str, Timing]]

    def __repr__(self) -> str:
        phases = [
            f"{phase} {format_seconds(timings[''].total / 1e9)}"
            for phase, timings in self.modules.items()
            if "" in timings
        ]
        return short_repr(self, "", *phases)

    def __str__(self) -> str:
        sums: dict[str, Timing] = {}
        for timings in self.operators.values():
            for op, timing in timings.items():
                sums[op] = sums.get(op, Timing()) + timing
        longest = sorted(sums.items(), key=lambda item: -item[1].own)
        rows = [
            [op, f"{item.calls:,}", format_seconds(item.total / 1e9), format_seconds(item.own / 1e9)]
            for op, item in longest[:_MAX_ROWS]
        ]
        shown = f"{len(rows)} of {len(longest):,} ops" if len(rows) < len(longest) else ""
        return write_text_table("", ["op", "calls", "time", "self"], rows, shown)

    def of_module(self, name: str = "") -> Timing:
        """Return the time of a module in all phases."""
        return sum((timings[name] for timings in self.modules.values() if name in timings), Timing())


def read_times(trace: Trace) -> Times:
    """Return the times of a Trace recorded with measure={"time"}; any other raises TraceError."""
    if trace.events is None or "time" not in trace.info.measured:
        raise TraceError('this trace has no times: record it with measure={"time"}')
    return sum_times(trace)


def sum_times(trace: Trace) -> Times:
    """Return the times and numbers of calls of a Trace; unmeasured times are 0."""
    scopes = trace.scopes()
    modules: dict[str, dict[str, Timing]] = defaultdict(lambda: defaultdict(Timing))
    operators: dict[str, dict[str, Timing]] = defaultdict(lambda: defaultdict(Timing))
    inside: Counter[RegionCall | None] = Counter()  # time of the modules called in an open region
    for kind, event, call, _ in walk_events(trace):
        duration = event.duration_ns or 0
        if call is not None and kind in ("exit", "unfinished"):
            children = inside.pop(call, 0)
            region = trace.regions[call.region]
            is_timed = region.kind == "module" and kind == "exit"
            inside[call.parent] += duration if is_timed else children
            if is_timed and event.phase not in BY_OWNER:
                modules[event.phase][region.name] += Timing(1, duration, duration - children)
        elif kind == "op":
            operators[event.phase][trace.signatures[event.item].packet] += Timing(1, duration, duration)
            if event.phase in BY_OWNER:
                _add_to_owner(modules[event.phase], scopes[event.stack], duration)
    return Times(*({phase: dict(table) for phase, table in tables.items()} for tables in (modules, operators)))


def _add_to_owner(timings: dict[str, Timing], scope: tuple[str, ...], duration: int) -> None:
    owner = innermost(scope)
    for name in modules_above(owner):
        timings[name] += Timing(0, duration, 0)
    timings[owner] += Timing(1, duration, duration)
