"""The simulated ranks of a pipeline over time: a picture with a lane for each, and a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from fvflops.plan.rank_plan import RankPlan
from fvflops.plan.step_time.schedule_simulation import Span
from fvflops.plan.step_time.step_estimate import StepEstimate
from fvflops.reports.document import Gantt, Slice
from fvflops.units import format_seconds

# Kind of action → its name in the legend.
KINDS = {
    "forward": "forward",
    "backward": "backward",
    "input_backward": "backward of inputs",
    "weight_backward": "backward of weights",
    "optimizer": "optimizer",
    "unshard": "gather parameters",
    "reshard": "free parameters",
    "reduce": "reduce gradients",
    "allreduce": "all-reduce gradients",
    "tied_allreduce": "all-reduce tied gradients",
}


def pipeline_picture(estimate: StepEstimate) -> Gantt:
    """Return the chart of the actions of each pipeline rank; the labels are numbers of microbatches."""
    lanes = {
        name_of(plan): [_make_slice(span, plan.step.stages) for span in spans]
        for plan, spans in zip(estimate.plans, estimate.simulation.spans, strict=True)
    }
    stages = max(len(plan.step.stages) for plan in estimate.plans)
    notes = ["Later stages of a rank are paler, in text in lower case."] if stages > 1 else []
    notes += [f"Not drawn: {format_seconds(estimate.between)} between steps."] if estimate.between else []
    waiting = "waiting for other stages, or sending" if len(lanes) > 1 else "waiting"
    title, length = "Ranks of the pipeline over a step", estimate.simulation.seconds
    return Gantt("pipeline", lanes, KINDS, title, waiting, notes=notes, length=length)


def name_of(plan: RankPlan) -> str:
    """Return the name of a rank: its index along the pipeline, or its number without one."""
    return f"pp {plan.coordinates['pp']}" if "pp" in plan.coordinates else f"rank {plan.rank}"


def describe_span(span: Span) -> str:
    """Return what a span is, such as "forward, stage 3, microbatch 0"."""
    parts = [KINDS.get(span.kind, span.kind)]
    parts += [f"stage {span.stage}"] if span.stage >= 0 else []
    parts += [f"microbatch {span.microbatch}"] if span.microbatch >= 0 else []
    return ", ".join(parts)


def _make_slice(span: Span, stages: Sequence[int]) -> Slice:
    label = str(span.microbatch) if span.microbatch >= 0 else ""
    shade = stages.index(span.stage) if span.stage in stages else 0
    return Slice(span.kind, span.start, span.end, label, describe_span(span), shade)


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
