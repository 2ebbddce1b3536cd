"""The timing: what the ops and the modules of a measured Trace took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from fvflops.trace import Trace, TraceError
from fvflops.trace.module_tree import innermost, modules_above

# Phases whose ops run inside no call of the module that they belong to.
BY_OWNER = ("backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Timing:
    """What something took, in ns: `own` leaves out what was called inside it; `calls` is how often it ran.

    >>> Timing(1, 50, 20) + Timing(2, 10, 10)
    Timing(calls=3, total=60, own=30)
    """

    calls: int = 0
    total: int = 0
    own: int = 0

    def __add__(self, other: Timing) -> Timing:
        return Timing(self.calls + other.calls, self.total + other.total, self.own + other.own)


@dataclass(frozen=True, slots=True)
class Times:
    """The times of a Trace.

    `modules` maps a phase and a module's name to what its calls took: in the forward phase and under recompute by the
    clock around each call, less what watching it took; in the backward pass and in optimizers' steps, in which no
    module is called, the sum over the ops that belong to the module (own) and to it and its children (total).
    `operators` maps a phase and an op to the sum over its calls; what an op calls inside is in it.
    """

    modules: Mapping[str, Mapping[str, Timing]]
    operators: Mapping[str, Mapping[str, Timing]]

    def of_module(self, name: str = "") -> Timing:
        """Return what a module took in all phases."""
        return sum((timings[name] for timings in self.modules.values() if name in timings), Timing())


def read_times(trace: Trace) -> Times:
    """Return the times of a Trace that was recorded with measure={"time"}; another raises TraceError."""
    if trace.events is None or "time" not in trace.about.get("measured", ""):
        raise TraceError('this trace holds no times: record it with measure={"time"}')
    return sum_times(trace)


def sum_times(trace: Trace) -> Times:
    """Return the times of a Trace, and how often all was called; what was not measured took nothing."""
    scopes = trace.scopes()
    modules: dict[str, dict[str, Timing]] = defaultdict(lambda: defaultdict(Timing))
    operators: dict[str, dict[str, Timing]] = defaultdict(lambda: defaultdict(Timing))
    inside: dict[int, list[int]] = defaultdict(lambda: [0])  # of each thread, what modules inside an open region took
    for event in trace.events or ():
        duration = event.duration_ns or 0
        if event.kind == "enter":
            inside[event.thread].append(0)
        elif event.kind == "exit":
            opened = inside[event.thread]
            children = opened.pop() if len(opened) > 1 else 0
            region = trace.regions[trace.region_signatures[event.item].region]
            opened[-1] += duration if region.kind == "module" else children
            if region.kind == "module" and event.phase not in BY_OWNER:
                modules[event.phase][region.name] += Timing(1, duration, duration - children)
        elif event.kind == "op":
            operators[event.phase][trace.signatures[event.item].packet] += Timing(1, duration, duration)
            if event.phase in BY_OWNER:
                _add_to_owner(modules[event.phase], scopes[event.stack], duration)
    return Times(*({phase: dict(table) for phase, table in tables.items()} for tables in (modules, operators)))


def _add_to_owner(timings: dict[str, Timing], scope: tuple[str, ...], duration: int) -> None:
    owner = innermost(scope)
    for name in modules_above(owner):
        timings[name] += Timing(0, duration, 0)
    timings[owner] += Timing(1, duration, duration)
