"""A timeline of the simulated ranks for Perfetto, in Chrome's trace format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fvflops.plan.step_time.pipeline_picture import KINDS, describe_span, name_of
from fvflops.plan.step_time.step_estimate import StepEstimate

_COMPUTE = 1  # thread of the compute stream; those of process groups follow


def write_step_trace(estimate: StepEstimate) -> Iterator[str]:
    """Yield the text of a file in Chrome's Trace Event Format, one event to a line.

    Each pipeline rank is a process. Its compute stream is a thread with a slice for each action, and one for each time
    it waits for other stages or sends ("bubble"); each process group is a thread with a slice for each collective.
    Times are in microseconds from the start of the step. Source of the format: "Trace Event Format",
    https://www.chromium.org/developers/how-tos/trace-event-profiling-tool/.
    """
    about = {
        "device": estimate.device.name,
        "efficiency": estimate.efficiency.source,
        "network": "" if estimate.network is None else f"{estimate.network.name}: {estimate.network.source}",
        "seconds": estimate.seconds,
        "mfu": estimate.mfu,
        "unknown_time": dict(estimate.unknown),
        "assumptions": list(estimate.assumptions),
    }
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n'
    yield ",\n".join(map(json.dumps, _list_events(estimate)))
    yield "\n]}\n"


def _list_events(estimate: StepEstimate) -> Iterator[dict[str, Any]]:
    for index, plan in enumerate(estimate.plans):
        process = index + 1
        clocks = estimate.simulation.clocks[index]
        collectives = clocks.log or []
        threads = {group: _COMPUTE + 1 + number for number, group in enumerate(clocks.streams)}
        yield _name("process_name", process, _COMPUTE, f"{name_of(plan)} (rank {plan.rank})")
        yield _name("thread_name", process, _COMPUTE, "compute")
        for group, thread in threads.items():
            yield _name("thread_name", process, thread, f"collectives {group}")
        end = 0.0
        for span in estimate.simulation.spans[index]:
            yield from _bubble(process, end, span.start)
            arguments = {"stage": span.stage, "microbatch": span.microbatch, "what": describe_span(span)}
            yield _slice(KINDS.get(span.kind, span.kind), process, _COMPUTE, span.start, span.end, arguments)
            end = span.end
        yield from _bubble(process, end, estimate.simulation.seconds)
        for group, begin, until in collectives:
            yield _slice(f"collective {group}", process, threads[group], begin, until, {"group": group})


def _bubble(process: int, start: float, end: float) -> Iterator[dict[str, Any]]:
    if end > start:
        yield _slice("bubble", process, _COMPUTE, start, end, {})


def _slice(name: str, process: int, thread: int, start: float, end: float, arguments: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": round(1e6 * start, 3), "dur": round(1e6 * (end - start), 3)}
    return {"name": name, "ph": "X", "pid": process, "tid": thread, **times, "args": arguments}


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
