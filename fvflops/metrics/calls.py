"""The listing of calls: a Trace in, each call of an op with what it comes to out."""

from __future__ import annotations

from collections import Counter

from fvflops.metrics.counting import Pricer
from fvflops.metrics.timeline import build_timeline
from fvflops.trace import Trace
from fvflops.trace.calls import OpCall
from fvflops.trace.signature import packet_of
from fvflops.trace.timeline import Item


def list_op_calls(trace: Trace, pricer: Pricer) -> tuple[OpCall, ...]:
    """Return the op calls of a Trace in the order in which they began; one that keeps no order raises TraceError.

    A call of a module or a function that the pricer counts as one has a line before those of the ops in it.
    """
    measured_memory = "memory" in trace.about.get("measured", "")
    timeline = build_timeline(trace, pricer)
    scopes = trace.scopes()
    seen: Counter[str] = Counter()
    calls: list[OpCall] = []
    for span in timeline.ordered():
        item = timeline.items[span.item]
        covered = (span.stack, span.phase) in timeline.covered
        if item.frame is not None and (not item.status or covered):
            continue
        op, target, name = _name_call(trace, item)
        scope = scopes[span.stack] + ((item.name,) if item.kind == "module" else ())
        measured: tuple[int | None, ...] = ()
        if item.frame is None:  # what a region took is that of the ops in it, which have lines of their own
            memory = (span.memory_before, span.memory_after, span.memory_peak) if measured_memory else ()
            measured = (span.duration, *memory)
        calls.append(
            OpCall(
                len(calls),
                f"{name}_{seen[op]}" if seen[op] else name,
                op,
                target,
                scope[-1] if scope else "",
                span.phase,
                item.inputs,
                item.outputs,
                item.dtype,
                "covered" if covered else item.status,
                0 if covered else item.flops,
                *measured,
            )
        )
        seen[op] += 1
    return tuple(calls)


def _name_call(trace: Trace, item: Item) -> tuple[str, str, str]:
    """Return the op, the target and the name of the calls of an item."""
    if item.kind == "module":
        place = trace.modules.places[item.name]
        return place.class_name, place.classes[0] if place.classes else place.class_name, place.class_name
    if item.frame is not None:
        return f"prim::PythonOp.{item.name}", f"prim::PythonOp.{item.name}", item.name
    op = packet_of(item.name)
    return op, item.name if item.name != op else f"{op}.default", op.rpartition("::")[2]
