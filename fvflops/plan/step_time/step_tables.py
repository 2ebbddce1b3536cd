"""Show an estimated step: exact data, tables, and a timeline of its ranks as a picture or a trace for Perfetto."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fvflops.plan.memory.cuda_allocator import reserved_memory
from fvflops.plan.memory.memory_report import MemoryPrediction
from fvflops.plan.memory.storage_lifetimes import MemoryTimeline
from fvflops.plan.rank_plan import RankPlan
from fvflops.plan.step_time.schedule_simulation import Span
from fvflops.plan.step_time.step_estimate import StepEstimate, TrainingCost
from fvflops.reports.document import Gantt, Slice, Table, module_column, number_column
from fvflops.reports.terminal.collapse import collapse, collapse_note
from fvflops.text import record_data
from fvflops.trace import Summary
from fvflops.trace.module_tree import modules_above
from fvflops.trace.records import reads_of
from fvflops.units import format_quantity, format_seconds, format_share
from fvflops.views.summary_rows import depth_of

_DEPTH = 3  # levels below the root that are shown by default
_MIN_SHARE = 0.01  # of the kernels' time, for a module to be shown by default
# Figures in JSON.
_OF_STEP = (
    *("device=device.name", "device_memory=device.memory", "efficiency", "network", "seconds", "bound_seconds=bound"),
    *("samples", "tokens", "tokens_per_second", "samples_per_second", "model_flops_per_gpu=model_flops"),
    *("model_flops_per_second_per_gpu=model_flops_per_second", "mfu", "hfu"),
    *("bubble_share", "exposed_share", "host_bound_share"),
)
_OF_SLOWEST = (
    *("kernels", "kernels_by_phase=by_phase", "kernels_by_module=by_module", "exposed", "communication"),
    *("launching", "sending", "bubble", "between"),
)
_OF_TRAINING = (
    *("tokens", "steps", "seconds", "days", "gpu_hours", "price_per_gpu_hour=price", "cost"),
    *("watts_per_gpu=watts", "energy_kwh=energy"),
)
_SCALE = 10**12  # counts of a Summary are integers: picoseconds


def module_table(
    estimate: StepEstimate, *, depth: int | None = None, sort: str | None = None, top: int | None = None
) -> Table:
    """Return the slowest rank's kernel time by module, by default those from 1 % on, to a depth of 3 below a stage."""
    plan = estimate.plans[estimate.slowest]
    summary = collapse(_summarise(estimate))
    picoseconds = summary.columns["time"]
    total = picoseconds.get("", 0) or 1
    limit = (_DEPTH + (len(plan.step.stages) > 1)) if depth is None else depth
    names = [module.name for module in summary.modules.modules() if picoseconds.get(module.name)]
    least = 0 if depth is not None or sort is not None or top is not None else _MIN_SHARE
    shown = [name for name in names if depth_of(name) <= limit and picoseconds[name] >= least * total]
    rows = [(summary.labels.get(name, name), picoseconds[name] / _SCALE, picoseconds[name] / total) for name in shown]
    columns = (
        module_column(),
        number_column("seconds", "kernels", form=format_seconds),
        number_column("share", "of kernels", form=format_share),
    )
    notes = collapse_note(summary, shown)
    if len(plan.mesh) > 1 and plan.mesh.get("pp", 1) > 1:
        notes.append("Layers are numbered within a stage.")
    if len(shown) < len(names):
        notes.append(f"{format_quantity(len(names) - len(shown), 'smaller or deeper module')} not shown.")
    title = f"Kernels of the slowest rank, {name_of(plan)}, by module"
    return Table("modules", columns, rows, title=title, notes=notes, noun="module").ranked(sort=sort, top=top)


def _summarise(estimate: StepEstimate) -> Summary:
    """Return the picoseconds of kernels by module, submodules included."""
    tree = estimate.plans[estimate.slowest].recorded.modules
    picoseconds = Counter[str]()
    for module, seconds in estimate.by_module.items():
        picoseconds.update(dict.fromkeys({*modules_above(module), module}, round(seconds * _SCALE)))
    unknown = [name for name in estimate.by_module if name not in tree.by_name]
    return Summary(tree.with_pseudo_modules(unknown), {"time": picoseconds})


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The predicted memory of a rank over its step, and what torch's allocator reserves with expandable segments."""

    plan: RankPlan
    timeline: MemoryPrediction
    reserved: int

    @property
    def by_kind(self) -> dict[str, int]:
        return dict(self.timeline.at_peak().by_kind.most_common())


def read_memories(plans: Sequence[RankPlan]) -> list[RankMemory]:
    """Return the memory of each rank, computed once for ranks with equal recordings and orders of actions."""
    known: dict[tuple[int, object], RankMemory] = {}
    recordings: dict[tuple[int, int], MemoryTimeline] = {}
    keys = []
    for plan in plans:
        recorded = id(plan.recorded.events)
        keys.append((recorded, tuple(plan.step.passes[action].begin for action in plan.step.actions)))
        if keys[-1] not in known:
            part = recorded, plan.step.recorded_events
            if part not in recordings:
                recordings[part] = plan.recorded_memory()
            timeline = plan.memory_of_step(recordings[part])
            reserved = reserved_memory(timeline, expandable_segments=True).peak
            known[keys[-1]] = RankMemory(plan, timeline, reserved)
    return [replace(known[key], plan=plan) for key, plan in zip(keys, plans, strict=True)]


def encode(estimate: StepEstimate, memories: Sequence[RankMemory], cost: TrainingCost | None) -> dict[str, Any]:
    """Return all figures of an estimated step, times in seconds."""
    first = estimate.plans[0]
    peak_rank = max(range(len(memories)), key=lambda index: memories[index].reserved)
    ranks = [
        {
            **record_data(memory.plan, "rank", "coordinates", "stages=step.stages", "parameters"),
            "actions": sum(span.end - span.start for span in spans),
            **record_data(memory, "peak_memory=timeline.peak", "reserved_memory=reserved", "memory_by_kind=by_kind"),
        }
        for memory, spans in zip(memories, estimate.simulation.spans, strict=True)
    ]
    return {
        **record_data(first, "mesh", "gpus=world", "inputs=trace.info.inputs", "schedule=step.schedule"),
        **record_data(estimate, *_OF_STEP),
        "model_parameters": first.model_parameters,
        "slowest": estimate.slowest,
        "peak_memory_rank": peak_rank,
        "slowest_rank": record_data(estimate, *_OF_SLOWEST),
        "ranks": ranks,
        "training": None if cost is None else record_data(cost, *_OF_TRAINING),
        **record_data(first, "estimated=derived", "left_out"),
        **record_data(estimate, "unknown_time=unknown", "time_of_bytes_only=bytes_only", "assumptions"),
        **reads_of(first.trace.info),
    }


# --- the ranks over time ----------------------------------------------------------------------------------------------

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
    """Return the chart of each pipeline rank's actions over time, labelled by microbatch."""
    lanes = {
        name_of(plan): [_make_slice(span, plan.step.stages) for span in spans]
        for plan, spans in zip(estimate.plans, estimate.simulation.spans, strict=True)
    }
    stages = max(len(plan.step.stages) for plan in estimate.plans)
    notes = ["Later stages of a rank are paler, or lower case in text."] if stages > 1 else []
    notes += [f"Not drawn: {format_seconds(estimate.between)} between steps."] if estimate.between else []
    waiting = "waiting for other stages, or sending" if len(lanes) > 1 else "waiting"
    title, length = "Ranks of the pipeline over a step", estimate.simulation.seconds
    return Gantt("pipeline", lanes, KINDS, title, waiting, notes=notes, length=length)


def name_of(plan: RankPlan) -> str:
    """Return the name of a rank: its index along the pipeline, or its number without one."""
    return f"pp {plan.coordinates['pp']}" if "pp" in plan.coordinates else f"rank {plan.rank}"


def describe_span(span: Span) -> str:
    """Return the name of a span, such as "forward, stage 3, microbatch 0"."""
    parts = [KINDS.get(span.kind, span.kind)]
    parts += [f"stage {span.stage}"] if span.stage >= 0 else []
    parts += [f"microbatch {span.microbatch}"] if span.microbatch >= 0 else []
    return ", ".join(parts)


def _make_slice(span: Span, stages: Sequence[int]) -> Slice:
    label = str(span.microbatch) if span.microbatch >= 0 else ""
    shade = stages.index(span.stage) if span.stage in stages else 0
    return Slice(span.kind, span.start, span.end, label, describe_span(span), shade)


_COMPUTE = 1  # thread of the compute stream; the process groups' follow


def write_step_trace(estimate: StepEstimate) -> Iterator[str]:
    """Yield the text of a file in Chrome's Trace Event Format, one event to a line.

    Each pipeline rank is a process. Its compute stream is a thread with a slice for each action, and one for each time
    it waits for other stages or sends ("bubble"); each process group is a thread with a slice for each collective.
    Times are in microseconds from the start of the step. Source of the format: "Trace Event Format",
    https://www.chromium.org/developers/how-tos/trace-event-profiling-tool/.
    """
    about = {
        **record_data(estimate, "device=device.name", "efficiency=efficiency.source"),
        "network": "" if estimate.network is None else f"{estimate.network.name}: {estimate.network.source}",
        **record_data(estimate, "seconds", "mfu", "unknown_time=unknown", "assumptions"),
    }
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n'
    yield ",\n".join(map(json.dumps, _list_events(estimate)))
    yield "\n]}\n"


def _list_events(estimate: StepEstimate) -> Iterator[dict[str, Any]]:
    for index, plan in enumerate(estimate.plans):
        process, clocks = index + 1, estimate.simulation.clocks[index]
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
        for group, begin, until in clocks.log or ():
            yield _slice(f"collective {group}", process, threads[group], begin, until, {"group": group})


def _bubble(process: int, start: float, end: float) -> Iterator[dict[str, Any]]:
    if end > start:
        yield _slice("bubble", process, _COMPUTE, start, end, {})


def _slice(name: str, process: int, thread: int, start: float, end: float, arguments: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": round(1e6 * start, 3), "dur": round(1e6 * (end - start), 3)}
    return {"name": name, "ph": "X", "pid": process, "tid": thread, **times, "args": arguments}


def _name(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
